"""One seed per image of a batch."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

pipe = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
prompt = "Labrador in the style of Vermeer"
generator = [torch.Generator(device="cuda").manual_seed(i) for i in range(3)]
images = pipe([prompt] * 3, generator=generator, num_inference_steps=2).images
for number, image in enumerate(images):
    image.save(f"{output}/labrador-{number}.png")
