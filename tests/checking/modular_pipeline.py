"""Modular pipeline with a custom block that has a deliberate fault."""

from typing import Any

import diffusers.modular_pipelines as plain
import torch

from anyaccel.recipes import recipes

modular: Any = plain  # not fully typed
__all__ = ["Tint", "make"]


class Tint(modular.ModularPipelineBlocks):  # type: ignore[misc]
    """Scale the latents by a table in float64."""

    model_name = "stable-diffusion-xl"

    @property
    def inputs(self) -> list[Any]:
        """The latents."""
        return [modular.InputParam(name="latents", required=True)]

    @property
    def intermediate_outputs(self) -> list[Any]:
        """The latents."""
        return [modular.OutputParam(name="latents")]

    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        block = self.get_block_state(state)
        latents = block.latents
        tint = torch.linspace(0.9, 1, latents.shape[1], dtype=torch.float64, device=latents.device)  # fault: float64
        block.latents = latents * tint.to(latents.dtype)[None, :, None, None]
        self.set_block_state(state, block)
        return components, state


def make() -> Any:
    """Return a tiny modular SDXL with the tint block before the decoder, and its call arguments."""
    blocks = modular.StableDiffusionXLAutoBlocks()
    blocks.sub_blocks.insert("tint", Tint(), list(blocks.sub_blocks).index("decode"))
    pipe = blocks.init_pipeline()
    plain_pipe: Any = recipes()["stable-diffusion-xl"].make()
    components = {name: value for name, value in plain_pipe.components.items() if value is not None}
    pipe.update_components(**{name: value for name, value in components.items() if hasattr(pipe, name)})
    return pipe, {"height": 16, "width": 16}
