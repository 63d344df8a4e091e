"""FLUX in bfloat16 with model offloading."""

import sys

import torch
from diffusers import FluxPipeline

models, output = sys.argv[1:3]

pipe = FluxPipeline.from_pretrained(f"{models}/flux", torch_dtype=torch.bfloat16)
pipe.enable_model_cpu_offload()
image = pipe(
    prompt="a tiny astronaut hatching from an egg on the moon",
    guidance_scale=3.5,
    height=16,
    width=16,
    num_inference_steps=2,
    max_sequence_length=32,
    generator=torch.Generator("cpu").manual_seed(0),
).images[0]
image.save(f"{output}/image.png")
