"""Pipelines for the benchmark variants: stock diffusers, compiled stock diffusers, and anyaccel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.device import open_device
from anyaccel.bench.case import FAST, OURS, BenchCase
from anyaccel.emulator.torch_patch_registry import patched
from anyaccel.explanation.model_configs import find_model
from anyaccel.runtime.pipeline import place
from anyaccel.tracing.meta_pipeline import build_components

__all__ = ["KINDS", "drawing_in_float32", "make_call", "make_pipeline"]

_PROMPT = "a red apple on a table"
# Components with weights in a random pipeline: the denoiser under either name, and the autoencoder.
KINDS = ("unet", "transformer", "vae")


def make_pipeline(case: BenchCase, variant: str) -> Any:
    """Create the pipeline for a case and a variant, and place it on the case's device."""
    opened = open_device(case.device)
    device = opened.tensor_device
    stock = _make_random(case, device) if case.random else _load(case)
    dtype = getattr(torch, case.dtype) if case.dtype else None
    if variant in (OURS, FAST):
        speed = {"speed": "fast"} if variant == FAST else {}
        pipe = place(stock, case.device, **({"dtype": case.dtype} if case.dtype else {}), **case.options, **speed)
    else:
        pipe = stock.to(device, dtype) if dtype else stock.to(device)
    if variant == "stock compiled":
        _compile(pipe)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _load(case: BenchCase) -> Any:
    import diffusers

    library: Any = diffusers
    return library.DiffusionPipeline.from_pretrained(case.model)


def _make_random(case: BenchCase, device: torch.device) -> Any:
    """Create a pipeline with random weights from config files.

    It contains only a denoiser, an autoencoder and a scheduler.
    """
    import diffusers

    library: Any = diffusers
    folder = find_model(case.model)
    descriptions = [
        replace(component, config={**(component.config or {}), **case.config})
        if component.name in KINDS[:2]
        else component
        for component in folder.components
        if component.name in (*KINDS, "scheduler")
    ]
    # Every process must get the same weights, since the images are compared.
    torch.manual_seed(0)
    components = build_components(descriptions, str(device), getattr(torch, case.dtype or "float32"))
    if case.scheduler:
        components["scheduler"] = getattr(library, case.scheduler)()
    pipeline_class = getattr(library, folder.pipeline)
    parameters = inspect.signature(pipeline_class.__init__).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    # Pipelines accept None for the tokenizers and text encoders, because the call passes embeddings.
    missing = {name: None for name in required if name not in (*components, "self")}
    flags = {name: False for name in ("requires_safety_checker", "add_watermarker") if name in parameters}
    return pipeline_class(**components, **missing, **flags)


def _compile(pipe: Any) -> None:
    """Compile the denoiser and the VAE decoder, as the diffusers documentation recommends."""
    for name in KINDS[:2]:
        if getattr(pipe, name, None) is not None:
            setattr(pipe, name, torch.compile(getattr(pipe, name)))
    if getattr(pipe, "vae", None) is not None:
        pipe.vae.decode = torch.compile(pipe.vae.decode)


def make_call(case: BenchCase, pipe: Any) -> dict[str, Any]:
    """Return the arguments for the pipeline call: a prompt or, for random weights, random embeddings."""
    call: dict[str, Any] = {"output_type": "pt", **case.call}
    if not case.random:
        return {"prompt": _PROMPT, **call}
    generator = torch.Generator().manual_seed(1)
    for name, shape in case.embeds.items():
        value = torch.ones(shape) if "mask" in name else torch.randn(shape, generator=generator)
        call[name] = value.to(pipe.device, getattr(torch, case.dtype or "float32"))
    return call


@contextmanager
def drawing_in_float32() -> Iterator[None]:
    """Draw half-precision noise in float32 inside the `with` block, as anyaccel does.

    Otherwise, torch draws different values from the same seed, and the images cannot be compared.
    """
    # https://github.com/huggingface/diffusers/issues/11056, seen in diffusers 0.42

    def wrap(original: Any) -> Any:
        def randn(*size: Any, dtype: torch.dtype | None = None, generator: Any = None, **options: Any) -> Any:
            if dtype not in (torch.float16, torch.bfloat16) or generator is None:
                return original(*size, dtype=dtype, generator=generator, **options)
            return original(*size, dtype=torch.float32, generator=generator, **options).to(dtype)

        return randn

    with patched("torch.randn", wrap, "bench"):
        yield
