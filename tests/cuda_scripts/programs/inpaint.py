"""Inpainting with an image and a mask."""

import sys

import torch
from diffusers import StableDiffusionInpaintPipeline
from diffusers.utils import load_image

models, output = sys.argv[1:3]

pipe = StableDiffusionInpaintPipeline.from_pretrained(f"{models}/stable-diffusion-inpaint", torch_dtype=torch.float32)
pipe.to("cuda")

image = load_image(f"{models}/image.png")
mask_image = load_image(f"{models}/mask.png")
torch.manual_seed(0)
image = pipe(
    prompt="Face of a yellow cat, high resolution",
    image=image,
    mask_image=mask_image,
    height=16,
    width=16,
    num_inference_steps=3,
    generator=torch.Generator("cuda").manual_seed(0),
).images[0]
image.save(f"{output}/cat.png")
