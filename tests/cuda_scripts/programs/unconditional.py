"""DDPM with its pipeline and with a hand-written loop."""

import sys

import numpy as np
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from PIL import Image

models, output = sys.argv[1:3]

ddpm = DDPMPipeline.from_pretrained(f"{models}/ddpm", use_safetensors=True).to("cuda")
image = ddpm(num_inference_steps=3, generator=torch.manual_seed(5)).images[0]
image.save(f"{output}/ddpm.png")

scheduler = DDPMScheduler.from_pretrained(f"{models}/ddpm", subfolder="scheduler")
model = UNet2DModel.from_pretrained(f"{models}/ddpm", subfolder="unet", use_safetensors=True).to("cuda")
scheduler.set_timesteps(3)
sample_size = model.config.sample_size
torch.manual_seed(1)
noise = torch.randn((1, 3, sample_size, sample_size), device="cuda")
sample = noise
for t in scheduler.timesteps:
    with torch.no_grad():
        noisy_residual = model(sample, t).sample
    previous_noisy_sample = scheduler.step(noisy_residual, t, sample).prev_sample
    sample = previous_noisy_sample
image = (sample / 2 + 0.5).clamp(0, 1).squeeze()
image = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).cpu().numpy()
Image.fromarray(np.ascontiguousarray(image)).save(f"{output}/loop.png")
