"""A base model and a refiner that share the steps."""

import sys

import torch
from diffusers import DiffusionPipeline

models, output = sys.argv[1:3]

base = DiffusionPipeline.from_pretrained(f"{models}/stable-diffusion-xl", torch_dtype=torch.float32).to("cuda")
refiner = DiffusionPipeline.from_pretrained(
    f"{models}/stable-diffusion-xl-refiner",
    text_encoder_2=base.text_encoder_2,
    vae=base.vae,
    torch_dtype=torch.float32,
    use_safetensors=True,
).to("cuda")

n_steps = 5
high_noise_frac = 0.8
prompt = "A majestic lion jumping from a big stone at night"
generator = torch.Generator("cuda").manual_seed(12)
image = base(
    prompt=prompt,
    num_inference_steps=n_steps,
    denoising_end=high_noise_frac,
    output_type="latent",
    generator=generator,
).images
image = refiner(
    prompt=prompt, num_inference_steps=n_steps, denoising_start=high_noise_frac, image=image, generator=generator
).images[0]
image.save(f"{output}/lion.png")
