"""Timing with CUDA events."""

import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]

pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
start = torch.cuda.Event(enable_timing=True)
end = torch.cuda.Event(enable_timing=True)
torch.cuda.synchronize()
start.record()
image = pipe("a fox", num_inference_steps=2, generator=torch.Generator("cuda").manual_seed(7)).images[0]
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
print(f"{start.elapsed_time(end):.0f} ms on {torch.cuda.get_device_name()}")
image.save(f"{output}/fox.png")
