"""Model offloading."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

pipeline = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion-xl", torch_dtype=torch.float32)
pipeline.enable_model_cpu_offload()
generator = torch.Generator("cpu").manual_seed(5)
image = pipeline("an astronaut in a jungle, cold color palette", num_inference_steps=2, generator=generator).images[0]
image.save(f"{output}/jungle.png")
