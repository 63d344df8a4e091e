"""LoRA weights fused into the model and unfused again."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

pipe = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
pipe.load_lora_weights(f"{models}/lora", adapter_name="toy")
pipe.fuse_lora(lora_scale=0.7)
pipe.unload_lora_weights()
image = pipe("toy face of a hacker", num_inference_steps=2, generator=torch.manual_seed(0)).images[0]
image.save(f"{output}/hacker.png")
