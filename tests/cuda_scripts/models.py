"""The tiny models that the programs load, in one folder: pipelines, adapters, images."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from anyaccel.recipes import recipes
from anyaccel.recipes.families.adapters import processor_width
from anyaccel.recipes.parts.calls import make_image, mask

__all__ = ["make_models"]

PIPELINES = (
    "stable-diffusion",
    "stable-diffusion-inpaint",
    "stable-diffusion-xl",
    "stable-diffusion-xl-refiner",
    "stable-diffusion-3",
    "stable-video-diffusion",
    "controlnet",
    "ddpm",
    "flux",
    "ltx",
    "pixart-sigma",
    "wan",
)
IMAGE_SIZE = 16


def make_models(folder: Path) -> Path:
    """Write all files that the programs use: a few megabytes, in a few seconds."""
    all_recipes: dict[str, Any] = recipes()
    for name in PIPELINES:
        all_recipes[name].make().save_pretrained(folder / name)
    modular: Any = all_recipes["stable-diffusion-xl-modular"].make()
    modular.save_pretrained(str(folder / "stable-diffusion-xl-modular"), overwrite_modular_index=True)
    make_image(IMAGE_SIZE).save(folder / "image.png")
    mask(IMAGE_SIZE).save(folder / "mask.png")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        pipe: Any = all_recipes["stable-diffusion"].make()
        _write_concept(pipe, folder / "concept.safetensors")
        _write_image_adapter(pipe, all_recipes["ip-adapter"].make(), folder / "ip-adapter-weights")
        _write_lora(pipe, folder / "lora")
    return folder


def _write_lora(pipe: Any, folder: Path) -> None:
    """Write rank-2 LoRA weights for the UNet's attention, in the format of training scripts."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    pipe.unet.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, target_modules=targets))
    layers = {name: value.contiguous() for name, value in get_peft_model_state_dict(pipe.unet).items()}
    type(pipe).save_lora_weights(folder, unet_lora_layers=layers)


def _write_concept(pipe: Any, path: Path) -> None:
    """Write a textual-inversion embedding of one token."""
    width = pipe.text_encoder.config.hidden_size
    save_file({"<cat-toy>": torch.randn(width)}, path)


def _write_image_adapter(pipe: Any, encoded: Any, folder: Path) -> None:
    """Write an IP-Adapter with four tokens and its image encoder."""
    encoder = encoded.image_encoder
    encoder.save_pretrained(folder / "image_encoder")
    names = [name for name in pipe.unet.attn_processors if name.endswith("attn2.processor")]
    width = pipe.unet.config.cross_attention_dim
    weights = {
        "image_proj.proj.weight": torch.randn(4 * width, encoder.config.projection_dim) * 0.1,
        "image_proj.proj.bias": torch.zeros(4 * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    for position, name in enumerate(names):
        for projection in ("k", "v"):
            shape = processor_width(pipe.unet, name), width
            weights[f"ip_adapter.{2 * position + 1}.to_{projection}_ip.weight"] = torch.randn(shape) * 0.1
    save_file(weights, folder / "ip-adapter.safetensors")
