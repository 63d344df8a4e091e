"""Placement with `device_map` at load time."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

pipeline = DiffusionPipeline.from_pretrained(
    f"{models}/stable-diffusion-xl", torch_dtype=torch.float32, device_map="cuda"
)
generator = torch.Generator("cuda").manual_seed(2)
pipeline("a lion", num_inference_steps=2, generator=generator).images[0].save(f"{output}/lion.png")
print(f"Max memory reserved: {torch.cuda.max_memory_allocated() / 1024**3:.2f} GB")
