"""A pipeline created from the components of another."""

import sys

import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForText2Image

models, output = sys.argv[1:3]

pipeline_text2image = AutoPipelineForText2Image.from_pretrained(
    f"{models}/stable-diffusion", torch_dtype=torch.float32, use_safetensors=True
).to("cuda")
pipeline = AutoPipelineForImage2Image.from_pipe(pipeline_text2image)

first = pipeline_text2image("a red panda", num_inference_steps=2, generator=torch.Generator("cuda").manual_seed(1))
generator = torch.Generator("cuda").manual_seed(2)
image = pipeline(
    "a blue panda", image=first.images[0], strength=0.8, num_inference_steps=4, generator=generator
).images[0]
image.save(f"{output}/panda.png")
