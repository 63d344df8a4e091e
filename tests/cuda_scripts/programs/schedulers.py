"""Several schedulers in turn."""

import sys

import torch
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
)

models, output = sys.argv[1:3]

pipeline = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32)
pipeline.to("cuda")
print(pipeline.scheduler.compatibles)
for kind in (HeunDiscreteScheduler, EulerAncestralDiscreteScheduler, DPMSolverMultistepScheduler, DDIMScheduler):
    pipeline.scheduler = kind.from_config(pipeline.scheduler.config)
    generator = torch.Generator(device="cuda").manual_seed(8)
    image = pipeline("an astronaut on Mars", generator=generator, num_inference_steps=3).images[0]
    image.save(f"{output}/{kind.__name__}.png")
