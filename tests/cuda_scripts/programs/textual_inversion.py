"""A textual-inversion token."""

import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]

pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
pipe.load_textual_inversion(f"{models}/concept.safetensors", token="<cat-toy>")
generator = torch.Generator("cuda").manual_seed(9)
image = pipe("A <cat-toy> backpack", num_inference_steps=2, generator=generator).images[0]
image.save(f"{output}/cat-backpack.png")
