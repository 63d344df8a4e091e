"""A modular pipeline from a folder, in two workflows and with another guider."""

import sys

import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline
from PIL import Image

models, output = sys.argv[1:3]

pipe = ModularPipeline.from_pretrained(f"{models}/stable-diffusion-xl-modular")
pipe.load_components(torch_dtype=torch.float32)
pipe.to("cuda")
assert pipe.unet.conv_in.weight.is_cuda
generator = torch.Generator("cuda").manual_seed(3)
call = {"num_inference_steps": 3, "height": 16, "width": 16}
image = pipe(prompt="a fox", generator=generator, output="images", **call)[0]
image.save(f"{output}/fox.png")

pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=2.0, guidance_rescale=0.5))
source = Image.open(f"{models}/image.png").convert("RGB")
generator = torch.Generator("cuda").manual_seed(4)
state = pipe(prompt="a hill", image=source, strength=0.7, generator=generator, **call)
state.get("images")[0].save(f"{output}/hill.png")
