"""Pipelines that share components through the constructor."""

import sys

import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from PIL import Image

models, output = sys.argv[1:3]

text2img = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
img2img = StableDiffusionImg2ImgPipeline(**text2img.components, requires_safety_checker=False)
source = Image.open(f"{models}/image.png").convert("RGB")
generator = torch.Generator("cuda").manual_seed(3)
image = img2img("a hill", image=source, strength=0.6, num_inference_steps=4, generator=generator).images[0]
image.save(f"{output}/hill.png")
