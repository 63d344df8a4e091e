"""Models and tensors created under a default device."""

import sys

import numpy as np
import torch
from diffusers import UNet2DModel

models, output = sys.argv[1:3]

torch.set_default_device("cuda")
torch.manual_seed(6)
noise = torch.randn(1, 3, 16, 16) + torch.randint(0, 3, (1,)) + torch.empty(3, 16, 16).normal_()
torch.set_default_device("cpu")

with torch.device("cuda"):
    layer = torch.nn.Conv2d(3, 3, 3, padding=1)
    steps = torch.arange(0, 4)
torch.nn.init.constant_(layer.weight, 0.1)
torch.nn.init.zeros_(layer.bias)

model = UNet2DModel.from_pretrained(f"{models}/ddpm", subfolder="unet").to(torch.device("cuda"))
with torch.inference_mode():
    sample = model(layer(noise), steps[2]).sample
assert sample.is_cuda
np.save(f"{output}/sample.npy", sample.cpu().numpy())
