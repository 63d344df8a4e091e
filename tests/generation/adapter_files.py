"""Files of a tiny LoRA, ControlNet and IP-Adapter with random weights, for the recipe `stable-diffusion`."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from anyaccel.recipes import recipes
from anyaccel.recipes.families.adapters import add_ip_adapter
from tests.generation.models import LIBRARY

__all__ = ["save_controlnet", "save_ip_adapter", "save_lora"]


def _make_unet(recipe: str = "stable-diffusion") -> Any:
    pipe: Any = recipes()[recipe].make()
    return pipe.unet


def save_lora(path: Path, seed: int = 1, recipe: str = "stable-diffusion") -> str:
    """Write the file of a LoRA for the attention of the UNet, and return its path."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, layer in _make_unet(recipe).named_modules():
        if name.endswith(("to_q", "to_v")):
            rows, columns = layer.weight.shape
            weights[f"unet.{name}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            weights[f"unet.{name}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    save_file(weights, path)
    return str(path)


def save_controlnet(folder: Path) -> str:
    """Write a ControlNet for the UNet to a folder, and return its path."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LIBRARY.ControlNetModel.from_unet(_make_unet(), conditioning_embedding_out_channels=(8, 16))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    return str(folder)


class _Recorder:
    """Receives the weights of the recipe's IP-Adapter, which are zero."""

    def __init__(self) -> None:
        self.unet = _make_unet()
        self.weights: dict[str, Any] = {}

    def load_ip_adapter(self, weights: dict[str, Any], **_: Any) -> None:
        self.weights = weights

    def set_ip_adapter_scale(self, scale: float) -> None: ...


def save_ip_adapter(path: Path) -> str:
    """Write the file of an IP-Adapter for the UNet, and return its path."""
    recorder, generator = _Recorder(), torch.Generator().manual_seed(2)
    add_ip_adapter(recorder)
    weights = {
        f"{part}.{name}": torch.randn(weight.shape, generator=generator)
        for part, values in recorder.weights.items()
        for name, weight in values.items()
    }
    save_file(weights, path)
    return str(path)
