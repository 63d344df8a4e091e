"""A cast to half precision, then a move to the device."""

import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]

pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion")
pipe = pipe.to(torch.float16).to("cuda")
assert pipe.unet.dtype == torch.float16
generator = torch.Generator("cuda").manual_seed(7)
image = pipe("a fox", num_inference_steps=2, generator=generator).images[0]
image.save(f"{output}/fox.png")
