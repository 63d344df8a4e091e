"""A loop with the deprecated `torch.cuda.amp` autocast and a scaler."""

import sys

import numpy as np
import torch
from diffusers import DDIMScheduler, UNet2DModel
from torch.cuda.amp import GradScaler, autocast

models, output = sys.argv[1:3]

model = UNet2DModel.from_pretrained(f"{models}/ddpm", subfolder="unet").to("cuda")
scheduler = DDIMScheduler.from_pretrained(f"{models}/ddpm", subfolder="scheduler")
scaler = GradScaler(enabled=False)
scheduler.set_timesteps(3)
torch.manual_seed(1)
x = torch.randn(1, 3, 16, 16).to("cuda", non_blocking=True)
with torch.no_grad():
    for t in scheduler.timesteps:
        with autocast(dtype=torch.bfloat16):
            prediction = model(x, t).sample
        x = scheduler.step(prediction.float(), t, x).prev_sample
assert torch.isfinite(x).all()
assert scaler.get_scale() == 1.0
np.save(f"{output}/x.npy", x.cpu().numpy())
