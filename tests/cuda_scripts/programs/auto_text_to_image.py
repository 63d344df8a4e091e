"""AutoPipeline with two images per prompt."""

import sys

import torch
from diffusers import AutoPipelineForText2Image

models, output = sys.argv[1:3]

pipeline = AutoPipelineForText2Image.from_pretrained(f"{models}/stable-diffusion-xl", torch_dtype=torch.float32).to(
    "cuda"
)
generator = torch.Generator("cuda").manual_seed(33)
images = pipeline(
    "peasant and dragon combat", num_images_per_prompt=2, num_inference_steps=2, generator=generator
).images
for number, image in enumerate(images):
    image.save(f"{output}/dragon-{number}.png")
