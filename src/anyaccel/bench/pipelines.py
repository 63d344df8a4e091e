"""The pipelines that are measured: as diffusers makes them, compiled as its documents say, and placed by anyaccel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.device import open_device
from anyaccel.bench.case import FAST, OURS, BenchCase
from anyaccel.emulator.torch_patches import patched
from anyaccel.explanation.model_configs import find_model
from anyaccel.runtime.pipeline import place
from anyaccel.tracing.meta_pipeline import build_components

__all__ = ["KINDS", "drawing_alike", "make_call", "make_pipeline"]

_PROMPT = "a red apple on a table"
# The models of a pipeline that are measured: its denoiser and its autoencoder.
KINDS = ("unet", "transformer", "vae")


def make_pipeline(work: BenchCase, variant: str) -> Any:
    """The pipeline of a work on its device, in the way of a variant."""
    opened = open_device(work.device)
    device = opened.tensor_device
    plain = _make_random(work, device) if work.random else _load(work)
    dtype = getattr(torch, work.dtype) if work.dtype else None
    if variant in (OURS, FAST):
        more = {"speed": "fast"} if variant == FAST else {}
        pipe = place(plain, work.device, **({"dtype": work.dtype} if work.dtype else {}), **work.options, **more)
    else:
        pipe = plain.to(device, dtype) if dtype else plain.to(device)
    if variant == "stock compiled":
        _compile(pipe)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _load(work: BenchCase) -> Any:
    import diffusers

    library: Any = diffusers
    return library.DiffusionPipeline.from_pretrained(work.model)


def _make_random(work: BenchCase, device: torch.device) -> Any:
    """A pipeline from config files, of denoiser and autoencoder alone; one seed gives one model in every process."""
    import diffusers

    library: Any = diffusers
    folder = find_model(work.model)
    parts = [
        replace(part, config={**(part.config or {}), **work.config}) if part.name in KINDS[:2] else part
        for part in folder.components
        if part.name in (*KINDS, "scheduler")
    ]
    torch.manual_seed(0)
    made = build_components(parts, str(device), getattr(torch, work.dtype or "float32"))
    if work.scheduler:
        made["scheduler"] = getattr(library, work.scheduler)()
    kind = getattr(library, folder.pipeline)
    taken = inspect.signature(kind.__init__).parameters
    missing = {name: None for name, one in taken.items() if one.default is one.empty and name not in (*made, "self")}
    switches = {name: False for name in ("requires_safety_checker", "add_watermarker") if name in taken}
    return kind(**made, **missing, **switches)


def _compile(pipe: Any) -> None:
    """As diffusers' documentation has it: the denoiser, and the decoder."""
    for name in KINDS[:2]:
        if getattr(pipe, name, None) is not None:
            setattr(pipe, name, torch.compile(getattr(pipe, name)))
    if getattr(pipe, "vae", None) is not None:
        pipe.vae.decode = torch.compile(pipe.vae.decode)


def make_call(work: BenchCase, pipe: Any) -> dict[str, Any]:
    """The arguments of the call: a prompt, or what stands for one."""
    call: dict[str, Any] = {"output_type": "pt", **work.call}
    if not work.random:
        return {"prompt": _PROMPT, **call}
    generator = torch.Generator().manual_seed(1)
    for name, shape in work.embeds.items():
        drawn = torch.ones(shape) if "mask" in name else torch.randn(shape, generator=generator)
        call[name] = drawn.to(pipe.device, getattr(torch, work.dtype or "float32"))
    return call


@contextmanager
def drawing_alike() -> Iterator[None]:
    """While the block runs, the host draws noise in float32 whatever type is asked for, as anyaccel does anyway.

    In half precision torch draws other numbers from the same seed, and pictures could not be compared.
    """

    def draw_in_float32(real: Any) -> Any:
        def randn(*size: Any, dtype: torch.dtype | None = None, generator: Any = None, **options: Any) -> Any:
            if dtype not in (torch.float16, torch.bfloat16) or generator is None:
                return real(*size, dtype=dtype, generator=generator, **options)
            return real(*size, dtype=torch.float32, generator=generator, **options).to(dtype)

        return randn

    with patched("torch.randn", draw_in_float32, "bench"):
        yield
