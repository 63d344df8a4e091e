"""An image decoded in tiles."""

import sys

import torch
from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline

models, output = sys.argv[1:3]

pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32)
pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
pipe = pipe.to("cuda")
pipe.vae.enable_tiling()
generator = torch.Generator("cuda").manual_seed(6)
image = pipe(
    "a beautiful landscape photograph", width=64, height=32, num_inference_steps=2, generator=generator
).images[0]
image.save(f"{output}/landscape.png")
