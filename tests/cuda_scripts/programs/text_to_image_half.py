"""Half precision, as on most model cards."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

pipeline = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float16)
pipeline.to("cuda")
generator = torch.Generator(device="cuda").manual_seed(0)
image = pipeline("portrait photo of an old warrior chief", generator=generator, num_inference_steps=2).images[0]
image.save(f"{output}/warrior.png")
