"""A hand-written loop with timesteps, noise and masks created on the device."""

import sys

import numpy as np
import torch
from diffusers import EulerDiscreteScheduler, UNet2DConditionModel

models, output = sys.argv[1:3]

unet = UNet2DConditionModel.from_pretrained(f"{models}/stable-diffusion", subfolder="unet").to("cuda").eval()
scheduler = EulerDiscreteScheduler.from_pretrained(f"{models}/stable-diffusion", subfolder="scheduler")
scheduler.set_timesteps(4, device="cuda")

torch.manual_seed(3)
states = torch.randn(2, 77, unet.config.cross_attention_dim, device="cuda")
latents = torch.randn(2, 4, 8, 8, device="cuda") * scheduler.init_noise_sigma
mask = torch.zeros_like(latents)
mask[:, :, :4] = 1.0
rows = torch.tensor([0, 1], device="cuda")

with torch.no_grad():
    for t in scheduler.timesteps:
        inputs = scheduler.scale_model_input(latents, t)
        noise_pred = unet(inputs, t.expand(2), encoder_hidden_states=states[rows]).sample
        latents = scheduler.step(noise_pred, t, latents).prev_sample
        latents = torch.where(mask > 0.5, latents, latents * 0.9)
np.save(f"{output}/latents.npy", latents.float().cpu().numpy())
