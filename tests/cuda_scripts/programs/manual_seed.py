"""Reproducible results with global seeds instead of a generator."""

import random
import sys

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
set_seed(42)
first = pipe("a cat", num_inference_steps=2, output_type="np").images
set_seed(42)
second = pipe("a cat", num_inference_steps=2, output_type="np").images
assert np.array_equal(first, second)
np.save(f"{output}/cat.npy", first)
