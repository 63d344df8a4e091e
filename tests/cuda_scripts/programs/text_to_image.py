"""The first example of every guide."""

import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]

pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32)
pipe = pipe.to("cuda")

generator = torch.Generator("cuda").manual_seed(31)
image = pipe("a photo of an astronaut riding a horse on mars", generator=generator, num_inference_steps=3).images[0]
image.save(f"{output}/astronaut.png")
