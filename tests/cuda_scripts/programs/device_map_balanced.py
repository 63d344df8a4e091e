"""A balanced `device_map` over all devices."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

pipeline = DiffusionPipeline.from_pretrained(
    f"{models}/stable-diffusion", torch_dtype=torch.float32, use_safetensors=True, device_map="balanced"
)
image = pipeline("a dog", num_inference_steps=2, generator=torch.manual_seed(3)).images[0]
image.save(f"{output}/dog.png")
print(pipeline.hf_device_map)
