"""Attention slicing, as in the guide for GPUs with little memory."""

import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]

pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32)
pipe = pipe.to("cuda")
pipe.enable_attention_slicing()
pipe.vae.enable_slicing()
image = pipe(["a photo of an astronaut"] * 2, num_inference_steps=2, generator=torch.manual_seed(1)).images[0]
image.save(f"{output}/astronaut.png")
