"""FLUX entirely on the device."""

import sys

import torch
from diffusers import FluxPipeline

models, output = sys.argv[1:3]

pipe = FluxPipeline.from_pretrained(f"{models}/flux").to("cuda")
image = pipe(
    "A cat holding a sign that says hello world",
    height=16,
    width=16,
    guidance_scale=0.0,
    num_inference_steps=2,
    max_sequence_length=32,
    generator=torch.Generator("cuda").manual_seed(0),
).images[0]
image.save(f"{output}/flux-schnell.png")
