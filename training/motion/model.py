"""The video model: the embedded model with a motion module, and low-rank updates of its UNet and text encoder.

The updates are needed because the text encoder has never seen words for motions (for `a cat bouncing` the image model
draws a person bouncing a ball), and the UNet has never seen a thing that is off-center or rotated. AnimateDiff trains
such updates too, as its domain adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, MotionAdapter, UNetMotionModel
from safetensors.torch import save_file
from torch.nn.utils import parametrize

from anyaccel.embedded.model import find_embedded_model
from anyaccel.embedded.motion import FRAMES, LORA_FILE

__all__ = ["VideoModel", "make_motion_adapter"]

_RANK = 16


def make_motion_adapter(config: Any) -> Any:
    """Return a motion module for a UNet config; at first it does not change the UNet's output."""
    adapter: Any = MotionAdapter(
        block_out_channels=tuple(config.block_out_channels),
        motion_layers_per_block=config.layers_per_block,
        motion_num_attention_heads=tuple(config.attention_head_dim),  # head size 32, for fast attention kernels
        motion_norm_num_groups=config.norm_num_groups,
        motion_max_seq_length=FRAMES,
    )
    for name, module in adapter.named_modules():
        if name.endswith("proj_out"):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    return adapter


class _LowRankUpdate(torch.nn.Module):
    """Adds the product of two small matrices to a weight; at first the product is zero."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.shape, inputs = weight.shape, weight[0].numel()
        self.down = torch.nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = torch.nn.Parameter(torch.zeros(len(weight), rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.up @ self.down).view_as(weight)

    def as_layers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of two consecutive layers, as in a LoRA file; the second convolution is 1 × 1."""
        ones = [1] * len(self.shape[2:])
        return self.down.detach().view(-1, *self.shape[1:]), self.up.detach().view(*self.up.shape, *ones)


class VideoModel:
    """The embedded model's components for videos; only the motion module and the updates are trained."""

    def __init__(self, model: Path | None = None, rank: int = _RANK) -> None:
        """`rank`: rank of the updates; 0 trains only the motion module."""
        pipe: Any = DiffusionPipeline.from_pretrained(model or find_embedded_model())
        self.tokenizer, self.autoencoder = pipe.tokenizer, pipe.vae.requires_grad_(False)
        self.text_encoder = pipe.text_encoder.requires_grad_(False)
        self.unet: Any = UNetMotionModel.from_unet2d(pipe.unet, make_motion_adapter(pipe.unet.config))
        self.unet.freeze_unet2d_params()
        self._updated: dict[str, _LowRankUpdate] = {}
        if rank:
            for name, module in self._updatable():
                update = _LowRankUpdate(module.weight, rank)
                parametrize.register_parametrization(module, "weight", update)
                self._updated[name] = update
        trained = [p for part in (self.unet, self.text_encoder) for p in part.parameters() if p.requires_grad]
        self.trained = torch.nn.ParameterList(trained)

    def to(self, device: torch.device) -> VideoModel:
        """Move the components to a device."""
        for part in (self.unet, self.text_encoder, self.autoencoder):
            part.to(device)
        return self

    def save(self, folder: Path) -> None:
        """Write the motion module and the updates in float16, as diffusers and peft read them."""
        config = self.unet.config
        adapter: Any = MotionAdapter(
            block_out_channels=tuple(config.block_out_channels),
            motion_layers_per_block=config.layers_per_block,
            motion_num_attention_heads=tuple(config.motion_num_attention_heads),
            motion_norm_num_groups=config.norm_num_groups,
            motion_max_seq_length=config.motion_max_seq_length,
        )
        states = self.unet.state_dict()
        adapter.load_state_dict({name: states[name] for name in adapter.state_dict()})
        adapter.to(torch.float16).save_pretrained(folder)
        tensors: dict[str, torch.Tensor] = {}
        for name, update in self._updated.items():
            down, up = update.as_layers()
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        save_file({name: t.to("cpu", torch.float16).contiguous() for name, t in tensors.items()}, folder / LORA_FILE)
        path = folder / "config.json"
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored.pop("_name_or_path", None)
        path.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")

    def _updatable(self) -> Iterator[tuple[str, Any]]:
        """Yield the linear and convolution layers of the UNet and the text encoder, by name."""
        for component, model in (("unet", self.unet), ("text_encoder", self.text_encoder)):
            for name, module in list(model.named_modules()):
                if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and "motion_modules" not in name:
                    yield f"{component}.{name}", module
