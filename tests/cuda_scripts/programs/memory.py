"""Memory statistics and `empty_cache`."""

import gc
import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]


def bytes_to_giga_bytes(count):
    return count / 1024 / 1024 / 1024


def flush():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    torch.cuda.reset_peak_memory_stats()


flush()
pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
image = pipe("a fox", num_inference_steps=2, generator=torch.Generator("cuda").manual_seed(7)).images[0]
image.save(f"{output}/fox.png")
print(f"{bytes_to_giga_bytes(torch.cuda.max_memory_allocated()):.3f} GB at most")
print(f"{torch.cuda.memory_allocated(0)} allocated, {torch.cuda.memory_reserved('cuda:0')} reserved")
free, total = torch.cuda.mem_get_info()
properties = torch.cuda.get_device_properties(torch.device("cuda"))
print(free, total, properties.name, properties.total_memory)
del pipe
flush()
