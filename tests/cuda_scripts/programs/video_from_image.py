"""Image to video with model offloading and forward chunking."""

import sys

import numpy as np
import torch
from diffusers import StableVideoDiffusionPipeline
from diffusers.utils import load_image

models, output = sys.argv[1:3]

pipe = StableVideoDiffusionPipeline.from_pretrained(f"{models}/stable-video-diffusion", torch_dtype=torch.float32)
pipe.enable_model_cpu_offload()
pipe.unet.enable_forward_chunking()
image = load_image(f"{models}/image.png")
frames = pipe(
    image,
    height=16,
    width=16,
    num_frames=2,
    num_inference_steps=2,
    decode_chunk_size=2,
    generator=torch.manual_seed(42),
    output_type="np",
).frames[0]
np.save(f"{output}/frames.npy", frames)
