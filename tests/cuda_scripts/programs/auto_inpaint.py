"""AutoPipeline for inpainting."""

import sys

import torch
from diffusers import AutoPipelineForInpainting
from diffusers.utils import load_image, make_image_grid

models, output = sys.argv[1:3]

pipeline = AutoPipelineForInpainting.from_pretrained(f"{models}/stable-diffusion-xl", torch_dtype=torch.float32)
pipeline.to("cuda")

init_image = load_image(f"{models}/image.png").convert("RGB")
mask_image = load_image(f"{models}/mask.png").convert("RGB")
generator = torch.Generator("cuda").manual_seed(92)
image = pipeline(
    prompt="concept art digital painting of an elven castle",
    image=init_image,
    mask_image=mask_image,
    strength=0.9,
    num_inference_steps=4,
    height=16,
    width=16,
    generator=generator,
).images[0]
make_image_grid([init_image, mask_image, image], rows=1, cols=3).save(f"{output}/castle.png")
