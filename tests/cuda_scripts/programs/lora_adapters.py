"""Two weighted LoRA adapters."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

pipe = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32)
pipe.load_lora_weights(f"{models}/lora", adapter_name="toy")
pipe.load_lora_weights(f"{models}/lora", adapter_name="pixel")
pipe.to("cuda")
pipe.set_adapters(["pixel", "toy"], adapter_weights=[0.5, 1.0])
print(pipe.get_active_adapters())
image = pipe("toy face of a hacker, pixel art", num_inference_steps=2, generator=torch.manual_seed(0)).images[0]
image.save(f"{output}/pixel.png")
