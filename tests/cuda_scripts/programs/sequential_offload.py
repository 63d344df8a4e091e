"""Sequential offloading."""

import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]

pipe = StableDiffusionPipeline.from_pretrained(
    f"{models}/stable-diffusion", torch_dtype=torch.float32, use_safetensors=True
)
pipe.enable_sequential_cpu_offload()
image = pipe("a photo of an astronaut", num_inference_steps=2, generator=torch.manual_seed(8)).images[0]
image.save(f"{output}/astronaut.png")
