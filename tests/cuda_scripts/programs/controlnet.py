"""Stable Diffusion with a separately loaded ControlNet."""

import sys

import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline, UniPCMultistepScheduler
from diffusers.utils import load_image

models, output = sys.argv[1:3]

controlnet = ControlNetModel.from_pretrained(f"{models}/controlnet/controlnet", torch_dtype=torch.float32)
pipe = StableDiffusionControlNetPipeline.from_pretrained(
    f"{models}/stable-diffusion", controlnet=controlnet, torch_dtype=torch.float32
)
pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
pipe.to("cuda")

canny_image = load_image(f"{models}/image.png")
generator = torch.Generator(device="cuda").manual_seed(2)
image = pipe("disco dancer with colorful lights", image=canny_image, num_inference_steps=3, generator=generator).images[
    0
]
image.save(f"{output}/dancer.png")
