"""Image to image with the `strength` argument."""

import sys

import torch
from diffusers import StableDiffusionImg2ImgPipeline
from PIL import Image

models, output = sys.argv[1:3]
device = "cuda"

pipe = StableDiffusionImg2ImgPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32)
pipe = pipe.to(device)

init_image = Image.open(f"{models}/image.png").convert("RGB").resize((16, 16))
generator = torch.Generator(device=device).manual_seed(1024)
prompt = "A fantasy landscape, trending on artstation"
images = pipe(
    prompt=prompt, image=init_image, strength=0.75, guidance_scale=7.5, num_inference_steps=4, generator=generator
).images
images[0].save(f"{output}/fantasy_landscape.png")
