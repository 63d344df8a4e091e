"""A callback after each step."""

import sys

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

models, output = sys.argv[1:3]
steps = []


def callback_dynamic_cfg(pipe, step_index, timestep, callback_kwargs):
    if step_index == int(pipe.num_timesteps * 0.4):
        prompt_embeds = callback_kwargs["prompt_embeds"]
        prompt_embeds = prompt_embeds.chunk(2)[-1]
        pipe._guidance_scale = 0.0
        callback_kwargs["prompt_embeds"] = prompt_embeds
    latents = callback_kwargs["latents"]
    latents = latents + 0.01 * torch.ones(latents.shape, device="cuda", dtype=latents.dtype)
    callback_kwargs["latents"] = latents
    steps.append(latents.mean().item())
    return callback_kwargs


pipeline = StableDiffusionPipeline.from_pretrained(f"{models}/stable-diffusion", torch_dtype=torch.float32)
pipeline = pipeline.to("cuda")
generator = torch.Generator(device="cuda").manual_seed(1)
out = pipeline(
    "a photo of an astronaut",
    generator=generator,
    num_inference_steps=4,
    callback_on_step_end=callback_dynamic_cfg,
    callback_on_step_end_tensor_inputs=["prompt_embeds", "latents"],
)
out.images[0].save(f"{output}/out_custom_cfg.png")
np.save(f"{output}/steps.npy", np.array(steps))
