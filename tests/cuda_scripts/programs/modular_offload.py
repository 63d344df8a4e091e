"""Two modular pipelines that share their components through a manager, which offloads them to the CPU."""

import sys

import torch
from diffusers import ComponentsManager, ModularPipeline
from PIL import Image

models, output = sys.argv[1:3]

manager = ComponentsManager()
manager.enable_auto_cpu_offload(device="cuda")
pipe = ModularPipeline.from_pretrained(
    f"{models}/stable-diffusion-xl-modular", components_manager=manager, collection="xl"
)
pipe.load_components(torch_dtype=torch.float32)
generator = torch.Generator("cuda").manual_seed(3)
call = {"num_inference_steps": 3, "height": 16, "width": 16, "output": "images"}
pipe(prompt="a fox", generator=generator, **call)[0].save(f"{output}/fox.png")

workflow = pipe.blocks.get_workflow("image2image")
second = workflow.init_pipeline(components_manager=manager)
second.update_components(**{name: getattr(pipe, name) for name in second.pretrained_component_names})
source = Image.open(f"{models}/image.png").convert("RGB")
generator = torch.Generator("cuda").manual_seed(4)
second(prompt="a hill", image=source, strength=0.7, generator=generator, **call)[0].save(f"{output}/hill.png")
