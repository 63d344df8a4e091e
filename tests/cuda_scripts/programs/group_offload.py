"""Group offloading."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]
onload_device = torch.device("cuda")
offload_device = torch.device("cpu")

pipe = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32)
pipe.enable_group_offload(
    onload_device=onload_device, offload_device=offload_device, offload_type="leaf_level", use_stream=True
)
image = pipe("a beautiful sunset", num_inference_steps=2, generator=torch.manual_seed(8)).images[0]
image.save(f"{output}/sunset.png")
