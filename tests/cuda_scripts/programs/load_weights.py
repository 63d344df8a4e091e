"""Weights loaded from files directly to the device."""

import sys

import numpy as np
import torch
from diffusers import UNet2DModel
from safetensors.torch import load_file

models, output = sys.argv[1:3]

weights = load_file(f"{models}/ddpm/unet/diffusion_pytorch_model.safetensors", device="cuda")
torch.save(weights, f"{output}/unet.pt")
weights = torch.load(f"{output}/unet.pt", map_location="cuda", weights_only=True)
config = UNet2DModel.load_config(f"{models}/ddpm", subfolder="unet")
model = UNet2DModel.from_config(config)
model.load_state_dict(weights)
model.to("cuda").eval()
with torch.no_grad():
    result = model(torch.ones(1, 3, 16, 16, device="cuda"), torch.tensor([5], device="cuda")).sample
np.save(f"{output}/result.npy", result.cpu().numpy())
