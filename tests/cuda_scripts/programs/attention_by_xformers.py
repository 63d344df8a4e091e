"""xformers attention, which requires CUDA."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

pipe = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
pipe.enable_xformers_memory_efficient_attention()
with torch.inference_mode():
    sample = pipe("a small cat", num_inference_steps=2, generator=torch.Generator("cuda").manual_seed(2))
sample.images[0].save(f"{output}/cat.png")
pipe.disable_xformers_memory_efficient_attention()
