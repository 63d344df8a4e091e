"""LoRA weights, loaded and scaled."""

import sys

import torch
from diffusers import AutoPipelineForText2Image

models, output = sys.argv[1:3]

pipeline = AutoPipelineForText2Image.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to("cuda")
pipeline.load_lora_weights(f"{models}/lora", weight_name="pytorch_lora_weights.safetensors")
image = pipeline(
    "A naruto with blue eyes",
    num_inference_steps=2,
    cross_attention_kwargs={"scale": 0.5},
    generator=torch.Generator("cuda").manual_seed(4),
).images[0]
image.save(f"{output}/naruto.png")
