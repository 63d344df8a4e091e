"""A modular pipeline whose blocks the script inserts, replaces and removes, with a guider of its own."""

import sys

import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline
from diffusers.modular_pipelines import InputParam, ModularPipelineBlocks, OutputParam, SequentialPipelineBlocks

models, output = sys.argv[1:3]


class Tint(ModularPipelineBlocks):
    """Scales the latents by a table on the device."""

    model_name = "stable-diffusion-xl"

    @property
    def inputs(self):
        return [InputParam(name="latents", required=True), InputParam(name="tint", default=0.8)]

    @property
    def intermediate_outputs(self):
        return [OutputParam(name="latents"), OutputParam(name="table")]

    def __call__(self, components, state):
        block_state = self.get_block_state(state)
        channels = block_state.latents.shape[1]
        block_state.table = torch.linspace(block_state.tint, 1, channels, device="cuda")[None, :, None, None]
        block_state.latents = block_state.latents * block_state.table
        self.set_block_state(state, block_state)
        return components, state


class StrongTint(Tint):
    """Replaces the tint block."""

    def __call__(self, components, state):
        state.set("tint", 0.5)
        return super().__call__(components, state)


class HalfGuidance(ClassifierFreeGuidance):
    """A guider of the script."""

    def forward(self, pred_cond, pred_uncond=None):
        if pred_uncond is None:
            return super().forward(pred_cond, pred_uncond)
        self.guidance_scale, scale = self.guidance_scale / 2, self.guidance_scale
        result = super().forward(pred_cond, pred_uncond)
        self.guidance_scale = scale
        return result


def draw(blocks, name, **call):
    pipe = blocks.init_pipeline(f"{models}/stable-diffusion-xl-modular")
    pipe.load_components(torch_dtype=torch.float32)
    pipe.update_components(guider=HalfGuidance(guidance_scale=6.0))
    pipe.to("cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    call = {"prompt": "a fox", "num_inference_steps": 2, "height": 16, "width": 16, "generator": generator, **call}
    pipe(output="images", **call)[0].save(f"{output}/{name}.png")
    return pipe


folder = ModularPipeline.from_pretrained(f"{models}/stable-diffusion-xl-modular")
blocks = folder.blocks
blocks.sub_blocks.insert("tint", Tint(), list(blocks.sub_blocks).index("decode"))
pipe = draw(blocks, "inserted", tint=0.6)
assert list(pipe.blocks.sub_blocks)[-2] == "tint"
blocks.sub_blocks["tint"] = StrongTint()
draw(blocks, "replaced")
decode = blocks.sub_blocks.pop("decode")
blocks.sub_blocks.pop("ip_adapter")
pipe = blocks.init_pipeline(f"{models}/stable-diffusion-xl-modular")
pipe.load_components(torch_dtype=torch.float32)
pipe.to("cuda")
generator = torch.Generator("cuda").manual_seed(3)
latents = pipe(prompt="a fox", num_inference_steps=2, height=16, width=16, generator=generator, output="latents")
assert latents.is_cuda
decoder = SequentialPipelineBlocks.from_blocks_dict({"decode": decode}).init_pipeline()
decoder.update_components(vae=pipe.vae)
decoder.to("cuda")
decoder(latents=latents, output="images")[0].save(f"{output}/decoded.png")
