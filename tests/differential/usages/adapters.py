"""Usages with LoRA and textual inversion."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from tests.differential.session import CPU_NOISE, Session, twice, usage

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
    with torch.random.fork_rng():  # new embeddings are drawn on the device, then overwritten
        pipe.load_textual_inversion({"<cat>": torch.full((width,), 0.1)}, token="<cat>")
    return session.run(pipe, prompt="a <cat>")


def save_lora(session: Session, folder: str, seed: int) -> None:
    """Save a LoRA for the UNet to a folder."""
    pipe = session.make(place=False)
    add_lora(pipe, "style", seed)
    pipe.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet, adapter_name="style"))


@usage(GROUP)
def lora_hotswapped(session: Session) -> Any:
    """`load_lora_weights(…, hotswap=True)` replaces the weights of a loaded LoRA."""
    pipe = session.make()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        save_lora(session, first, 1)
        save_lora(session, second, 2)
        pipe.load_lora_weights(first, adapter_name="style")
        before = session.run(pipe)
        pipe.load_lora_weights(second, adapter_name="style", hotswap=True)
        return {"before": before, "after": session.run(pipe)}


@usage(GROUP)
def lora_prepared_for_hotswapping(session: Session) -> Any:
    """`enable_lora_hotswap(target_rank=…)` before LoRAs are loaded and swapped."""
    pipe = session.make()
    pipe.unet.enable_lora_hotswap(target_rank=4)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        save_lora(session, first, 1)
        save_lora(session, second, 2)
        pipe.load_lora_weights(first, adapter_name="style")
        before = session.run(pipe)
        pipe.load_lora_weights(second, adapter_name="style", hotswap=True)
        return {"before": before, "after": session.run(pipe)}


@usage(GROUP)
def lora_loaded_before_placing(session: Session) -> Any:
    """A LoRA that is loaded before the pipeline is placed."""
    pipe = session.make(place=False)
    add_lora(pipe)
    pipe = session.place(pipe)
    full = session.run(pipe)
    pipe.unet.set_adapters(["style"], [0.3])
    return {"full": full, "scaled": session.run(pipe)}


@usage(GROUP)
def two_loras_combined(session: Session) -> Any:
    """`pipe.set_adapters` with two LoRAs and a weight for each."""
    pipe = session.make()
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in (("first", 1), ("second", 2)):
            save_lora(session, folder, seed)
            pipe.load_lora_weights(folder, adapter_name=name)
    values = {}
    for weights in ((0.5, 0.8), (1.0, 0.1)):
        pipe.set_adapters(["first", "second"], adapter_weights=list(weights))
        values[str(weights)] = session.run(pipe)
    return {**values, "active": tuple(pipe.get_active_adapters())}


@usage(GROUP)
def lora_weight_for_each_block(session: Session) -> Any:
    """`pipe.set_adapters` with a weight for each block of the UNet."""
    pipe = session.make()
    with tempfile.TemporaryDirectory() as folder:
        save_lora(session, folder, 1)
        pipe.load_lora_weights(folder, adapter_name="style")
    full = session.run(pipe)
    pipe.set_adapters("style", {"unet": {"down": 0.9, "mid": 0.3, "up": 0.2}})
    return {"full": full, "by block": session.run(pipe)}


@usage(GROUP)
def lora_fused_by_the_pipeline(session: Session) -> Any:
    """`pipe.fuse_lora(lora_scale=…)`, `unload_lora_weights` and `unfuse_lora`."""
    pipe = session.make()
    with tempfile.TemporaryDirectory() as folder:
        save_lora(session, folder, 1)
        pipe.load_lora_weights(folder, adapter_name="style")
    pipe.fuse_lora(lora_scale=0.7)
    fused = session.run(pipe)
    pipe.unfuse_lora()
    unfused = session.run(pipe)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    return {"fused": fused, "unfused": unfused, "unloaded": session.run(pipe)}


@usage(GROUP)
def lora_switched_in_a_callback(session: Session) -> Any:
    """`set_adapters` in `callback_on_step_end`."""
    pipe = session.make()
    add_lora(pipe, "first", 1)
    add_lora(pipe, "second", 2)

    def callback(running: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        running.unet.set_adapters("first" if step % 2 else "second")
        return {}

    pipe.unet.set_adapters("first")
    result = session.run(pipe, callback_on_step_end=callback, num_inference_steps=4)
    return {"result": result, "next": session.run(pipe)}


@usage(GROUP)
def lora_on_a_transformer(session: Session) -> Any:
    """A LoRA on the Flux transformer, scaled by `joint_attention_kwargs`."""
    pipe = session.make("flux")
    pipe.transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False), adapter_name="style"
    )
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in pipe.transformer.named_parameters():
            if ".style." in name:
                weight.copy_(torch.randn(weight.shape, generator=source) * 0.1)
    full = session.run(pipe, "flux")
    return {"full": full, "scaled": session.run(pipe, "flux", joint_attention_kwargs={"scale": 0.3})}


@usage(GROUP)
def lora_trained(session: Session) -> Any:
    """A training step of a LoRA with frozen weights, between two calls."""
    pipe = session.make()
    pipe.unet.requires_grad_(False)
    add_lora(pipe)
    first = session.run(pipe)
    weights = [weight for weight in pipe.unet.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    source = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 4, 8, 8, generator=source).to(pipe.device)
    states = torch.randn(1, 7, pipe.text_encoder.config.hidden_size, generator=source).to(pipe.device)
    loss = pipe.unet(latents, 10, encoder_hidden_states=states).sample.pow(2).mean()
    loss.backward()
    optimizer.step()
    return {"before": first, "loss": float(loss), "trained": len(weights), "after": session.run(pipe)}


@usage(GROUP, skip=CPU_NOISE)
def textual_inversion_before_a_call_without_generator(session: Session) -> Any:
    """`load_textual_inversion` and `fuse_qkv_projections`, which draw random numbers, and calls without a generator."""
    pipe = session.make()
    torch.manual_seed(0)
    embedding = torch.full((pipe.text_encoder.config.hidden_size,), 0.1)
    pipe.load_textual_inversion({"<new>": embedding}, token="<new>")
    first = session.run(pipe, generator=None)
    pipe.fuse_qkv_projections()
    return {"loaded": first, "fused": session.run(pipe, generator=None)}
