"""Usages that change a pipeline between or during calls."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import diffusers
import torch
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.differential.session import Session, usage

EDIT = "changes between calls"
WITHIN = "changes during a call"


def twice(session: Session, edit: Any, **changes: Any) -> dict[str, Any]:
    """Call a pipeline, edit it, and call it again."""
    pipe = session.make()
    first = session.run(pipe, **changes)
    edit(pipe)
    return {"before": first, "after": session.run(pipe, **changes)}


# Weights


@usage(EDIT)
def weight_data_multiplied(session: Session) -> Any:
    """`weight.data.mul_(…)` between calls."""
    return twice(session, lambda pipe: pipe.unet.conv_in.weight.data.mul_(1.5))


@usage(EDIT)
def weight_data_replaced(session: Session) -> Any:
    """`weight.data = …` between calls."""

    def edit(pipe: Any) -> None:
        pipe.unet.conv_in.weight.data = pipe.unet.conv_in.weight.data * 1.5

    return twice(session, edit)


@usage(EDIT)
def weight_copied_in_place(session: Session) -> Any:
    """`weight.copy_(…)` under `torch.no_grad()`."""

    def edit(pipe: Any) -> None:
        with torch.no_grad():
            pipe.unet.conv_out.weight.copy_(pipe.unet.conv_out.weight * 0.5)

    return twice(session, edit)


@usage(EDIT)
def parameter_replaced(session: Session) -> Any:
    """`module.weight = torch.nn.Parameter(…)`."""

    def edit(pipe: Any) -> None:
        layer = pipe.unet.conv_in
        layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)

    return twice(session, edit)


@usage(EDIT)
def vae_weight_edited(session: Session) -> Any:
    """An edit of a decoder weight."""
    return twice(session, lambda pipe: pipe.vae.decoder.conv_out.weight.data.mul_(0.5))


@usage(EDIT)
def text_encoder_weight_edited(session: Session) -> Any:
    """An edit of a text encoder weight."""

    def edit(pipe: Any) -> None:
        next(pipe.text_encoder.parameters()).data.mul_(1.3)

    return twice(session, edit)


@usage(EDIT)
def buffer_edited(session: Session) -> Any:
    """An edit of a buffer."""

    def edit(pipe: Any) -> None:
        for module in pipe.text_encoder.modules():
            if "position_ids" in module._buffers:
                module.position_ids.copy_(module.position_ids.flip(-1))

    return twice(session, edit)


@usage(EDIT)
def state_dict_loaded(session: Session) -> Any:
    """`load_state_dict` with changed weights."""

    def edit(pipe: Any) -> None:
        state = {name: value * 1.1 for name, value in pipe.unet.state_dict().items()}
        pipe.unet.load_state_dict(state)

    return twice(session, edit)


@usage(EDIT)
def state_dict_assigned(session: Session) -> Any:
    """`load_state_dict(…, assign=True)`."""

    def edit(pipe: Any) -> None:
        state = {name: value.clone() * 1.1 for name, value in pipe.unet.state_dict().items()}
        pipe.unet.load_state_dict(state, assign=True)

    return twice(session, edit)


@usage(EDIT)
def state_dict_edited(session: Session) -> Any:
    """In-place edits of the tensors that `state_dict()` returned earlier."""
    pipe = session.make()
    state = pipe.unet.state_dict()
    first = session.run(pipe)
    with torch.no_grad():
        state["conv_in.weight"].mul_(1.5)
    return {"before": first, "after": session.run(pipe)}


@usage(EDIT)
def ema_swapped(session: Session) -> Any:
    """`EMAModel.store`, `copy_to` and `restore`."""
    pipe = session.make()
    ema = EMAModel(pipe.unet.parameters(), decay=0.5)
    ema.to(pipe.device)
    with torch.no_grad():
        for weight in pipe.unet.parameters():
            weight.mul_(1.1)
    ema.step(pipe.unet.parameters())
    ema.store(pipe.unet.parameters())
    ema.copy_to(pipe.unet.parameters())
    averaged = session.run(pipe)
    ema.restore(pipe.unet.parameters())
    return {"averaged": averaged, "restored": session.run(pipe)}


@usage(EDIT)
def weight_swapped_by_parametrize(session: Session) -> Any:
    """`torch.nn.utils.parametrize` on a layer."""

    class Scale(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 1.5

    return twice(session, lambda pipe: parametrize.register_parametrization(pipe.unet.conv_in, "weight", Scale()))


@usage(EDIT)
def weight_norm_added(session: Session) -> Any:
    """`weight_norm` on a layer."""
    return twice(session, lambda pipe: parametrizations.weight_norm(pipe.unet.conv_in))


@usage(EDIT)
def parameters_flattened(session: Session) -> Any:
    """`parameters_to_vector` and `vector_to_parameters`."""

    def edit(pipe: Any) -> None:
        vector = torch.nn.utils.parameters_to_vector(pipe.unet.parameters())
        torch.nn.utils.vector_to_parameters(vector * 1.1, pipe.unet.parameters())

    return twice(session, edit)


# Training


def train_step(pipe: Any) -> float:
    """Run one optimizer step on the UNet and return the loss."""
    pipe.unet.train()
    optimizer = torch.optim.SGD(pipe.unet.parameters(), lr=1e-3)
    weight = pipe.unet.conv_in.weight
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 4, 8, 8, generator=generator).to(weight.device)
    states = torch.randn(1, 7, pipe.text_encoder.config.hidden_size, generator=generator).to(weight.device)
    output = pipe.unet(latents, torch.tensor([10], device=weight.device), encoder_hidden_states=states).sample
    loss = output.pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    pipe.unet.eval()
    return float(loss)


NO_AUTOGRAD = {"mps": "training is outside a pipeline call", "neuron": "training is outside a pipeline call"}


@usage(EDIT, skip=NO_AUTOGRAD)
def training_step_between_calls(session: Session) -> Any:
    """One optimizer step between two calls."""
    pipe = session.make()
    first = session.run(pipe)
    loss = train_step(pipe)
    return {"before": first, "loss": loss, "after": session.run(pipe)}


@usage(EDIT, skip=NO_AUTOGRAD)
def training_step_before_the_first_call(session: Session) -> Any:
    """One optimizer step before the first call."""
    pipe = session.make()
    return {"loss": train_step(pipe), "result": session.run(pipe)}


@usage(EDIT, skip=NO_AUTOGRAD)
def training_after_inference_mode(session: Session) -> Any:
    """A call under `torch.inference_mode()`, then a training step."""
    pipe = session.make()
    with torch.inference_mode():
        first = session.run(pipe)
    return {"before": first, "loss": train_step(pipe), "after": session.run(pipe)}


@usage(EDIT)
def requires_grad_disabled(session: Session) -> Any:
    """`requires_grad_(False)` on a model."""
    return twice(session, lambda pipe: pipe.unet.requires_grad_(False))


@usage(EDIT)
def train_mode_with_dropout(session: Session) -> Any:
    """`model.train()` with dropout, seeded globally."""

    def edit(pipe: Any) -> None:
        pipe.unet.down_blocks[0].resnets[0].dropout.p = 0.5
        pipe.unet.train()
        torch.manual_seed(5)

    return twice(session, edit)


# Adapters


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


@usage(EDIT)
def lora_added(session: Session) -> Any:
    """`unet.add_adapter(LoraConfig)` after placing."""
    return twice(session, add_lora)


@usage(EDIT)
def lora_scaled(session: Session) -> Any:
    """`set_adapters` with a weight."""
    pipe = session.make()
    add_lora(pipe)
    full = session.run(pipe)
    pipe.unet.set_adapters(["style"], [0.3])
    return {"full": full, "scaled": session.run(pipe)}


@usage(EDIT)
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


@usage(EDIT)
def lora_disabled_and_enabled(session: Session) -> Any:
    """`disable_adapters` and `enable_adapters`."""
    pipe = session.make()
    add_lora(pipe)
    pipe.unet.disable_adapters()
    disabled = session.run(pipe)
    pipe.unet.enable_adapters()
    return {"disabled": disabled, "enabled": session.run(pipe)}


@usage(EDIT)
def lora_deleted(session: Session) -> Any:
    """`delete_adapters`."""
    pipe = session.make()
    add_lora(pipe)
    first = session.run(pipe)
    pipe.unet.delete_adapters("style")
    return {"with": first, "without": session.run(pipe)}


@usage(EDIT)
def lora_fused_and_unfused(session: Session) -> Any:
    """`fuse_lora` and `unfuse_lora` on the model."""
    pipe = session.make()
    add_lora(pipe)
    pipe.unet.fuse_lora()
    fused = session.run(pipe)
    pipe.unet.unfuse_lora()
    return {"fused": fused, "unfused": session.run(pipe)}


@usage(EDIT)
def lora_saved_and_loaded(session: Session) -> Any:
    """`save_lora_weights`, `load_lora_weights` and `unload_lora_weights`."""
    import tempfile

    from peft.utils import get_peft_model_state_dict

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


@usage(EDIT)
def textual_inversion(session: Session) -> Any:
    """`load_textual_inversion` with a tensor."""
    pipe = session.make()
    width = pipe.text_encoder.config.hidden_size
    pipe.load_textual_inversion({"<cat>": torch.full((width,), 0.1)}, token="<cat>")
    return session.run(pipe, prompt="a <cat>")


# Schedulers


def change_scheduler(kind: str) -> Any:
    """Return a usage that replaces the scheduler."""

    def run(session: Session) -> Any:
        def edit(pipe: Any) -> None:
            pipe.scheduler = getattr(diffusers, kind).from_config(pipe.scheduler.config)

        return twice(session, edit)

    run.__name__ = f"scheduler_replaced_by_{kind}"
    run.__doc__ = f"`pipe.scheduler = {kind}.from_config(…)` between calls."
    return run


for scheduler in (
    "DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "UniPCMultistepScheduler",
    "HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "DEISMultistepScheduler",
    "LCMScheduler", "PNDMScheduler", "TCDScheduler", "SASolverScheduler",
):  # fmt: skip
    usage(EDIT)(change_scheduler(scheduler))


@usage(EDIT)
def scheduler_config_changed(session: Session) -> Any:
    """`from_config` with other options."""

    def edit(pipe: Any) -> None:
        pipe.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
            pipe.scheduler.config, use_karras_sigmas=True, algorithm_type="sde-dpmsolver++"
        )

    return twice(session, edit)


@usage(EDIT)
def scheduler_step_patched(session: Session) -> Any:
    """A function assigned to `scheduler.step`."""

    def edit(pipe: Any) -> None:
        original = pipe.scheduler.step

        def step(model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(model_output * 0.9, *args, **kwargs)

        pipe.scheduler.step = step

    return twice(session, edit)


@usage(EDIT)
def scheduler_class_patched(session: Session) -> Any:
    """`step` patched on the scheduler's class."""
    kind = diffusers.PNDMScheduler
    original = kind.step
    try:

        def edit(pipe: Any) -> None:
            @functools.wraps(original)
            def step(self: Any, model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return original(self, model_output * 0.9, *args, **kwargs)

            kind.step = step

        return twice(session, edit)
    finally:
        kind.step = original


# Processors and features


@usage(EDIT)
def attention_processor_replaced(session: Session) -> Any:
    """`unet.set_attn_processor` with a processor of the user."""

    class Processor(diffusers.models.attention_processor.AttnProcessor):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 0.9

    return twice(session, lambda pipe: pipe.unet.set_attn_processor(Processor()))


@usage(EDIT, tolerance=1e-5)  # anyaccel slices attention in its own order
def attention_sliced(session: Session) -> Any:
    """`enable_attention_slicing` and `disable_attention_slicing`."""
    pipe = session.make()
    pipe.enable_attention_slicing()
    sliced = session.run(pipe)
    pipe.disable_attention_slicing()
    return {"sliced": sliced, "whole": session.run(pipe)}


@usage(EDIT)
def vae_sliced_and_tiled(session: Session) -> Any:
    """`vae.enable_slicing` and `vae.enable_tiling`."""

    def edit(pipe: Any) -> None:
        pipe.vae.enable_slicing()
        pipe.vae.enable_tiling()

    return twice(session, edit, num_images_per_prompt=2)


@usage(EDIT)
def freeu(session: Session) -> Any:
    """`enable_freeu` and `disable_freeu`."""
    pipe = session.make()
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    enabled = session.run(pipe)
    pipe.disable_freeu()
    return {"enabled": enabled, "disabled": session.run(pipe)}


@usage(EDIT)
def qkv_projections_fused(session: Session) -> Any:
    """`fuse_qkv_projections` and `unfuse_qkv_projections`."""
    pipe = session.make()
    pipe.fuse_qkv_projections()
    fused = session.run(pipe)
    pipe.unfuse_qkv_projections()
    return {"fused": fused, "unfused": session.run(pipe)}


@usage(EDIT)
def module_replaced(session: Session) -> Any:
    """`pipe.unet.conv_in = …`: a layer replaced by the user's own."""

    def edit(pipe: Any) -> None:
        old = pipe.unet.conv_in
        new = torch.nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1)
        new.load_state_dict({name: value * 1.2 for name, value in old.state_dict().items()})
        pipe.unet.conv_in = new.to(old.weight.device)

    return twice(session, edit)


@usage(EDIT)
def component_replaced(session: Session) -> Any:
    """`pipe.unet = other`: a whole model replaced, on the CPU as loaded."""

    def edit(pipe: Any) -> None:
        other = session.make(place=False).unet
        with torch.no_grad():
            other.conv_in.weight.mul_(1.2)
        pipe.unet = other.to(pipe.device)

    return twice(session, edit)


@usage(EDIT)
def component_registered(session: Session) -> Any:
    """`pipe.register_modules(unet=…)`."""

    def edit(pipe: Any) -> None:
        other = copy.deepcopy(session.make(place=False).unet)
        with torch.no_grad():
            other.conv_in.weight.mul_(1.2)
        pipe.register_modules(unet=other.to(pipe.device))

    return twice(session, edit)


@usage(EDIT)
def tokenizer_changed(session: Session) -> Any:
    """`tokenizer.model_max_length` changed between calls."""
    pipe = session.make()
    first = session.run(pipe, prompt="red fox")
    pipe.tokenizer.model_max_length = 5
    return {"before": first, "after": session.run(pipe, prompt="red fox")}


# Hooks


@usage(EDIT)
def forward_hook(session: Session) -> Any:
    """`register_forward_hook` that changes the output."""

    def edit(pipe: Any) -> None:
        pipe.unet.conv_out.register_forward_hook(lambda module, args, output: output * 0.9)

    return twice(session, edit)


@usage(EDIT)
def forward_pre_hook(session: Session) -> Any:
    """`register_forward_pre_hook` with keyword arguments on the UNet."""

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] * 0.9, *args[1:]), kwargs

    return twice(session, lambda pipe: pipe.unet.register_forward_pre_hook(hook, with_kwargs=True))


@usage(EDIT)
def hook_removed(session: Session) -> Any:
    """A hook that is removed again."""
    pipe = session.make()
    handle = pipe.unet.conv_out.register_forward_hook(lambda module, args, output: output * 0.9)
    hooked = session.run(pipe)
    handle.remove()
    return {"hooked": hooked, "removed": session.run(pipe)}


@usage(EDIT)
def hook_counts_calls(session: Session) -> Any:
    """A hook that only counts calls and records shapes."""
    pipe = session.make()
    shapes: list[str] = []
    pipe.unet.register_forward_hook(lambda module, args, output: shapes.append(str(tuple(args[0].shape))))
    result = session.run(pipe)
    return {"result": result, "shapes": tuple(shapes)}


@usage(EDIT)
def global_forward_hook(session: Session) -> Any:
    """A hook on all modules of the process."""
    pipe = session.make()
    calls = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: calls.append(1))
    try:
        result = session.run(pipe)
    finally:
        handle.remove()
    return {"result": result, "calls": len(calls)}


@usage(EDIT)
def forward_patched_on_instance(session: Session) -> Any:
    """`module.forward = function`."""

    def edit(pipe: Any) -> None:
        original = pipe.unet.conv_out.forward
        pipe.unet.conv_out.forward = lambda *args, **kwargs: original(*args, **kwargs) * 0.9

    return twice(session, edit)


@usage(EDIT)
def model_forward_patched_on_instance(session: Session) -> Any:
    """`unet.forward = function` on a placed model."""

    def edit(pipe: Any) -> None:
        original = pipe.unet.forward

        def forward(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(sample * 0.9, *args, **kwargs)

        pipe.unet.forward = forward

    return twice(session, edit)


@usage(EDIT)
def method_patched_on_class(session: Session) -> Any:
    """A method of the pipeline's diffusers class patched after placing."""
    kind = diffusers.StableDiffusionPipeline
    original = kind.encode_prompt
    try:

        def edit(pipe: Any) -> None:
            def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
                positive, negative = original(self, *args, **kwargs)
                return positive * 0.5, negative

            kind.encode_prompt = encode_prompt

        return twice(session, edit)
    finally:
        kind.encode_prompt = original


@usage(EDIT)
def call_patched_on_class(session: Session) -> Any:
    """`__call__` of the pipeline's diffusers class patched after placing."""
    kind = diffusers.StableDiffusionPipeline
    original = kind.__call__
    try:

        def edit(pipe: Any) -> None:
            @functools.wraps(original)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                kwargs["guidance_scale"] = 2.0
                return original(self, *args, **kwargs)

            kind.__call__ = call

        return twice(session, edit)
    finally:
        kind.__call__ = original


@usage(EDIT)
def functional_patched(session: Session) -> Any:
    """`torch.nn.functional.silu` patched between calls."""
    original = torch.nn.functional.silu
    try:

        def edit(pipe: Any) -> None:
            torch.nn.functional.silu = lambda value, inplace=False: original(value) * 0.9  # type: ignore[assignment]

        return twice(session, edit)
    finally:
        torch.nn.functional.silu = original


# Modes


class Halving(TorchFunctionMode):
    """Function mode that halves the result of convolutions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Halve the output of `conv2d`."""
        output = func(*args, **(kwargs or {}))
        return output * 0.5 if func is torch.nn.functional.conv2d or func is torch.conv2d else output


class Counting(TorchDispatchMode):
    """Dispatch mode that counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count convolutions."""
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


@usage(EDIT)
def function_mode_around_one_call(session: Session) -> Any:
    """A `TorchFunctionMode` around the second of three calls."""
    pipe = session.make()
    first = session.run(pipe)
    with Halving():
        second = session.run(pipe)
    return {"before": first, "inside": second, "after": session.run(pipe)}


@usage(EDIT)
def dispatch_mode_counts_operations(session: Session) -> Any:
    """A `TorchDispatchMode` that counts convolutions."""
    pipe = session.make()
    with Counting() as mode:
        result = session.run(pipe)
    return {"result": result, "convolutions": mode.count}


def under(name: str, document: str, enter: Any) -> None:
    """Register a usage with the second of three calls inside a context."""

    def run(session: Session) -> Any:
        pipe = session.make()
        first = session.run(pipe)
        with enter():
            second = session.run(pipe)
        return {"before": first, "inside": second, "after": session.run(pipe)}

    run.__name__, run.__doc__ = name, document
    usage(EDIT)(run)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """Set the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Any:
    """Use deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


under("call_under_no_grad", "A call under `torch.no_grad()`.", torch.no_grad)
under("call_under_inference_mode", "A call under `torch.inference_mode()`.", torch.inference_mode)
under("call_under_enable_grad", "A call under `torch.enable_grad()`.", torch.enable_grad)
under("call_under_default_dtype_float64", "A call with the default dtype float64.",
      functools.partial(default_dtype, torch.float64))  # fmt: skip
under("call_under_deterministic_algorithms", "A call with `torch.use_deterministic_algorithms(True)`.", deterministic)
under("call_under_fork_rng", "A call under `torch.random.fork_rng()`.",
      functools.partial(torch.random.fork_rng, devices=[]))  # fmt: skip


# Within a call


@usage(WITHIN)
def callback_changes_latents(session: Session) -> Any:
    """`callback_on_step_end` that returns changed latents."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"latents": values["latents"] * 0.9}

    return session.run(session.make(), callback_on_step_end=callback)


@usage(WITHIN)
def callback_changes_embeddings(session: Session) -> Any:
    """`callback_on_step_end` that changes the prompt embeddings."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": values["prompt_embeds"] * 0.5}

    names = ["latents", "prompt_embeds"]
    return session.run(
        session.make(), callback_on_step_end=callback, callback_on_step_end_tensor_inputs=names, num_inference_steps=3
    )


@usage(WITHIN)
def callback_changes_guidance(session: Session) -> Any:
    """A callback that sets `pipe._guidance_scale` to 0 after a step."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            pipe._guidance_scale = 0.0
            return {"prompt_embeds": values["prompt_embeds"].chunk(2)[-1]}
        return {}

    return session.run(
        session.make(), callback_on_step_end=callback, callback_on_step_end_tensor_inputs=["prompt_embeds"],
        num_inference_steps=4,
    )  # fmt: skip


@usage(WITHIN)
def callback_interrupts(session: Session) -> Any:
    """A callback that sets `pipe._interrupt`."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step >= 1
        return {}

    pipe = session.make()
    stopped = session.run(pipe, callback_on_step_end=callback, num_inference_steps=6)
    return {"stopped": stopped, "next": session.run(pipe)}


@usage(WITHIN)
def callback_edits_weights(session: Session) -> Any:
    """A callback that edits weights by `.data`."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe.unet.conv_in.weight.data.mul_(1.1)
        return {}

    return session.run(session.make(), callback_on_step_end=callback, num_inference_steps=3)


@usage(WITHIN)
def callback_raises(session: Session) -> Any:
    """A callback that raises; the next call works."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("stop")

    pipe = session.make()
    error = ""
    try:
        session.run(pipe, callback_on_step_end=callback)
    except KeyError as raised:
        error = str(raised)
    return {"error": error, "next": session.run(pipe)}


@usage(WITHIN)
def callback_counts_steps(session: Session) -> Any:
    """A callback that records steps and timesteps."""
    steps: list[int] = []

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        steps.extend([step, int(timestep)])
        return {}

    result = session.run(session.make(), callback_on_step_end=callback, num_inference_steps=4)
    return {"result": result, "steps": tuple(steps)}


@usage(WITHIN)
def callback_draws_random_numbers(session: Session) -> Any:
    """A callback that draws from the global generator."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = values["latents"]
        return {"latents": latents + 0.01 * torch.randn(latents.shape).to(latents)}

    return session.run(session.make(), callback_on_step_end=callback)


@usage(WITHIN)
def legacy_callback(session: Session) -> Any:
    """The deprecated `callback` and `callback_steps` arguments."""
    steps: list[int] = []
    result = session.run(session.make(), callback=lambda step, timestep, latents: steps.append(step), callback_steps=1)
    return {"result": result, "steps": tuple(steps)}


@usage(WITHIN)
def hook_on_first_layer_edits_input_in_place(session: Session) -> Any:
    """A pre-hook that edits its input in place."""
    pipe = session.make()
    pipe.unet.conv_in.register_forward_pre_hook(lambda module, args: (args[0].mul_(0.9),))
    return session.run(pipe)
