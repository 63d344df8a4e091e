"""Models and tensors moved with `.cuda()`."""

import sys

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

models, output = sys.argv[1:3]

vae = AutoencoderKL.from_pretrained(f"{models}/stable-diffusion", subfolder="vae").cuda().eval()
image = Image.open(f"{models}/image.png").convert("RGB")
pixels = torch.from_numpy(np.array(image)).float().permute(2, 0, 1)[None] / 127.5 - 1
pixels = pixels.pin_memory().cuda(non_blocking=True)
with torch.no_grad():
    latents = vae.encode(pixels).latent_dist.mode()
    decoded = vae.decode(latents.cuda(0)).sample
assert decoded.is_cuda
np.save(f"{output}/decoded.npy", decoded.cpu().numpy())
