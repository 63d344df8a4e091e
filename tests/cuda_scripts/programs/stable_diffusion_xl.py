"""Stable Diffusion XL with a negative prompt."""

import sys

import torch
from diffusers import StableDiffusionXLPipeline

models, output = sys.argv[1:3]

pipe = StableDiffusionXLPipeline.from_pretrained(f"{models}/stable-diffusion-xl", use_safetensors=True).to("cuda")

image = pipe(
    prompt="An astronaut riding a green horse",
    negative_prompt="ugly, blurry",
    num_inference_steps=3,
    generator=torch.Generator("cuda").manual_seed(1),
).images[0]
image.save(f"{output}/horse.png")
