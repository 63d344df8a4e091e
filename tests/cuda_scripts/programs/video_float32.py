"""A video with LTX."""

import sys

import numpy as np
import torch
from diffusers import LTXPipeline

models, output = sys.argv[1:3]

pipe = LTXPipeline.from_pretrained(f"{models}/ltx", torch_dtype=torch.float32).to("cuda")
video = pipe(
    prompt="A woman with long brown hair smiles",
    width=32,
    height=32,
    num_frames=9,
    num_inference_steps=2,
    max_sequence_length=32,
    output_type="np",
    generator=torch.Generator("cuda").manual_seed(0),
).frames[0]
np.save(f"{output}/video.npy", video)
