"""Stable Diffusion 3."""

import sys

import torch
from diffusers import StableDiffusion3Pipeline

models, output = sys.argv[1:3]

pipe = StableDiffusion3Pipeline.from_pretrained(f"{models}/stable-diffusion-3", torch_dtype=torch.float32)
pipe.to("cuda")
image = pipe(
    prompt="a photo of a cat holding a sign that says hello world",
    negative_prompt="",
    num_inference_steps=2,
    height=16,
    width=16,
    guidance_scale=7.0,
    max_sequence_length=32,
    generator=torch.Generator("cuda").manual_seed(0),
).images[0]
image.save(f"{output}/sd3_hello_world.png")
