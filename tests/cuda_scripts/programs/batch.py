"""Several prompts in one call, with the fastest settings from the guide."""

import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True
pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
pipe.fuse_qkv_projections()
prompts = ["a red fox", "a blue whale"]
generator = torch.Generator("cuda").manual_seed(11)
images = pipe(prompts, num_images_per_prompt=2, num_inference_steps=2, generator=generator).images
for number, image in enumerate(images):
    image.save(f"{output}/animal-{number}.png")
