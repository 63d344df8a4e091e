"""An image prompt with IP-Adapter."""

import sys

import torch
from diffusers import AutoPipelineForText2Image
from diffusers.utils import load_image

models, output = sys.argv[1:3]

pipeline = AutoPipelineForText2Image.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
pipeline.load_ip_adapter(models, subfolder="ip-adapter-weights", weight_name="ip-adapter.safetensors")
pipeline.set_ip_adapter_scale(0.6)
image = load_image(f"{models}/image.png")
generator = torch.Generator(device="cuda").manual_seed(0)
images = pipeline(
    prompt="a polar bear sitting in a chair",
    ip_adapter_image=image,
    num_inference_steps=2,
    generator=generator,
).images
images[0].save(f"{output}/bear.png")
