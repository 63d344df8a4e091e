"""The GPU if available, otherwise the CPU."""

import sys

import torch
from diffusers import LCMScheduler, StableDiffusionPipeline

models, output = sys.argv[1:3]

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Using {device}: {torch.cuda.device_count()} devices, the current one is {torch.cuda.current_device()}")
assert device == "cuda"
dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=dtype)
pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
pipe = pipe.to(device)
generator = torch.Generator(device).manual_seed(0)
image = pipe("a bird", num_inference_steps=4, guidance_scale=1.0, generator=generator).images[0]
image.save(f"{output}/bird.png")
