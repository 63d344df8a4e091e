"""Usages with LoRA and textual inversion."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from tests.differential.session import Session, twice, usage

GROUP = "adapters"


def add_lora(pipe: Any, name: str = "style", seed: int = 1) -> None:
    """Add a LoRA with random weights to the UNet."""
    pipe.unet.add_adapter(
        LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False), adapter_name=name
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, weight in pipe.unet.named_parameters():
            if f".{name}." in parameter_name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


@usage(GROUP)
def lora_added(session: Session) -> Any:
    """`unet.add_adapter(LoraConfig)` after placing."""
    return twice(session, add_lora)


@usage(GROUP)
def lora_scaled(session: Session) -> Any:
    """`set_adapters` with a weight."""
    pipe = session.make()
    add_lora(pipe)
    full = session.run(pipe)
    pipe.unet.set_adapters(["style"], [0.3])
    return {"full": full, "scaled": session.run(pipe)}


@usage(GROUP)
def lora_switched(session: Session) -> Any:
    """Two adapters, one active at a time."""
    pipe = session.make()
    add_lora(pipe, "first", 1)
    add_lora(pipe, "second", 2)
    values = {}
    for name in ("first", "second"):
        pipe.unet.set_adapters(name)
        values[name] = session.run(pipe)
    return values


@usage(GROUP)
def lora_disabled_and_enabled(session: Session) -> Any:
    """`disable_adapters` and `enable_adapters`."""
    pipe = session.make()
    add_lora(pipe)
    pipe.unet.disable_adapters()
    disabled = session.run(pipe)
    pipe.unet.enable_adapters()
    return {"disabled": disabled, "enabled": session.run(pipe)}


@usage(GROUP)
def lora_deleted(session: Session) -> Any:
    """`delete_adapters`."""
    pipe = session.make()
    add_lora(pipe)
    first = session.run(pipe)
    pipe.unet.delete_adapters("style")
    return {"with": first, "without": session.run(pipe)}


@usage(GROUP)
def lora_fused_and_unfused(session: Session) -> Any:
    """`fuse_lora` and `unfuse_lora` on the model."""
    pipe = session.make()
    add_lora(pipe)
    pipe.unet.fuse_lora()
    fused = session.run(pipe)
    pipe.unet.unfuse_lora()
    return {"fused": fused, "unfused": session.run(pipe)}


@usage(GROUP)
def lora_saved_and_loaded(session: Session) -> Any:
    """`save_lora_weights`, `load_lora_weights` and `unload_lora_weights`."""
    pipe = session.make()
    add_lora(pipe)
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet, adapter_name="style"))
        other = session.make()
        plain = session.run(other)
        other.load_lora_weights(folder, adapter_name="style")
    loaded = session.run(other)
    scaled = session.run(other, cross_attention_kwargs={"scale": 0.5})
    other.unload_lora_weights()
    return {"plain": plain, "loaded": loaded, "scaled": scaled, "unloaded": session.run(other)}


@usage(GROUP)
def textual_inversion(session: Session) -> Any:
    """`load_textual_inversion` with a tensor."""
    pipe = session.make()
    width = pipe.text_encoder.config.hidden_size
    pipe.load_textual_inversion({"<cat>": torch.full((width,), 0.1)}, token="<cat>")
    return session.run(pipe, prompt="a <cat>")
