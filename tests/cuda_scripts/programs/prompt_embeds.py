"""A prompt encoded by hand on the device."""

import sys

import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]
device = torch.device("cuda:0")

pipe = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32).to(device)


def encode(text):
    tokens = pipe.tokenizer(text, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return pipe.text_encoder(tokens.input_ids.to(device))[0]


latents = torch.randn((1, 4, 8, 8), generator=torch.Generator(device=device).manual_seed(4), device=device)
image = pipe(
    prompt_embeds=encode("a tree") * 0.7 + encode("a house") * 0.3,
    negative_prompt_embeds=encode("blurry"),
    latents=latents,
    num_inference_steps=2,
).images[0]
image.save(f"{output}/tree.png")
