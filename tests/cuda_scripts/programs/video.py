"""A video with a float32 VAE and a bfloat16 transformer."""

import sys

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline

models, output = sys.argv[1:3]

vae = AutoencoderKLWan.from_pretrained(f"{models}/wan", subfolder="vae", torch_dtype=torch.float32)
pipe = WanPipeline.from_pretrained(f"{models}/wan", vae=vae, torch_dtype=torch.bfloat16)
pipe.to("cuda")
assert pipe.vae.dtype == torch.float32
frames = pipe(
    prompt="A cat walks on the grass, realistic",
    negative_prompt="Bright tones, overexposed",
    height=16,
    width=16,
    num_frames=5,
    guidance_scale=5.0,
    num_inference_steps=2,
    max_sequence_length=32,
    generator=torch.Generator("cuda").manual_seed(0),
).frames[0]
assert np.isfinite(frames).all()
np.save(f"{output}/frames.npy", frames)
