"""A float32 pipeline under autocast."""

import sys

import torch
from diffusers import StableDiffusionPipeline
from torch import autocast

models, output = sys.argv[1:3]

pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion").to("cuda")
generator = torch.Generator("cuda").manual_seed(0)
with autocast("cuda"):
    image = pipe("a dog", generator=generator, num_inference_steps=2)["images"][0]
image.save(f"{output}/dog.png")
