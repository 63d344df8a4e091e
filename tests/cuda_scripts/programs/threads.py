"""A worker thread that generates images, as in small servers."""

import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]

jobs = queue.Queue()
pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")


def worker():
    while (seed := jobs.get()) is not None:
        generator = torch.Generator("cuda").manual_seed(seed)
        latents = torch.randn((1, 4, 8, 8), generator=generator, device="cuda")
        image = pipe("a boat", latents=latents, num_inference_steps=2).images[0]
        image.save(f"{output}/boat-{seed}.png")


thread = threading.Thread(target=worker)
thread.start()
for seed in (1, 2, None):
    jobs.put(seed)
thread.join()

with ThreadPoolExecutor(max_workers=2) as pool:
    sums = list(pool.map(lambda n: torch.full((4,), n, device="cuda").sum().item(), range(3)))
assert sums == [0, 4, 8]
