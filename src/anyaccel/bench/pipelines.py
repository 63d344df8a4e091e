"""Pipelines for the benchmark variants: stock diffusers, compiled stock diffusers, and anyaccel."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anyaccel.backends.device import open_device
from anyaccel.bench.case import ANYACCEL, FAST, OFFLOADED, BenchCase
from anyaccel.embedded.motion import is_motion_module, load_video_pipeline
from anyaccel.explanation.model_configs import find_model
from anyaccel.generation.call_validation import check_outputs, list_missing, map_call
from anyaccel.generation.inputs import INPUT_PARAMETERS
from anyaccel.generation.pipeline_interface import read_interface
from anyaccel.runtime.call_parameters import list_block_outputs, read_blocks
from anyaccel.runtime.pipeline import DiffusionPipeline, place
from anyaccel.tracing.meta_pipeline import build_components
from anyaccel.upstream.diffusers_internals import read_dtype_argument
from anyaccel.upstream.modular_blocks import disable_progress_bars
from anyaccel.upstream.modular_index import is_modular_folder

__all__ = ["is_left_out", "make_call", "make_pipeline"]

_PROMPT = "a red apple on a table"
# Components that a random pipeline does not have: the call passes embeddings, and needs no check of the result.
_LEFT_OUT = ("text_encoder", "safety_checker", "image_encoder")
_OUTPUTS = ("images", "videos", "audios", "audio")
# Width and height of a required input image if the call has none.
_INPUT_SIDE = 512
_DENOISERS = ("unet", "transformer", "transformer_2")


def make_pipeline(case: BenchCase, variant: str) -> Any:
    """Create the pipeline for a case and a variant, and place it on the case's device."""
    pipe = _make_portable(case, variant) if variant in ANYACCEL else _make_stock(case)
    if variant == "stock compiled":
        _compile(pipe, case.stock_compile)
    disable_progress_bars(pipe)
    return pipe


def _make_portable(case: BenchCase, variant: str) -> Any:
    options = {**({"dtype": case.dtype} if case.dtype else {}), **case.options}
    options |= {"speed": "fast"} if variant == FAST else {}
    # Offloaded weights move in every call, so compiling would only make the first one slower.
    options |= {"memory": case.offload, "compile": False} if variant == OFFLOADED else {}
    if case.random:
        return place(_make_random(case, open_device(case.device).tensor_device), case.device, **options)
    return DiffusionPipeline.from_pretrained(case.model, device=case.device, **options)


def _make_stock(case: BenchCase) -> Any:
    import diffusers

    device = open_device(case.device).tensor_device
    dtype = getattr(torch, case.dtype) if case.dtype else None
    if case.random:
        pipe = _make_random(case, device)
        return pipe.to(device, dtype) if dtype else pipe.to(device)
    library: Any = diffusers
    options = {read_dtype_argument(): dtype} if dtype else {}
    if is_modular_folder(Path(case.model).expanduser()):
        pipe = library.ModularPipeline.from_pretrained(case.model)
        pipe.load_components(**options)
        return pipe.to(device)
    if is_motion_module(case.model):
        return load_video_pipeline(Path(case.model), **options).to(device)
    return library.DiffusionPipeline.from_pretrained(case.model, **options).to(device)


def _make_random(case: BenchCase, device: torch.device) -> Any:
    """Create a pipeline with random weights from config files, without text encoders."""
    import diffusers

    library: Any = diffusers
    folder = find_model(case.model)
    descriptions = [
        replace(component, config={**component.config, **case.config.get(component.name, {})})
        for component in folder.components
        if component.config is not None and not is_left_out(component.name)
    ]
    # Every process must get the same weights, since the images are compared.
    torch.manual_seed(0)
    components = build_components(descriptions, str(device), getattr(torch, case.dtype or "float32"))
    if case.scheduler:
        components["scheduler"] = getattr(library, case.scheduler)()
    pipeline_class = getattr(library, case.pipeline or folder.pipeline)
    parameters = inspect.signature(pipeline_class.__init__).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    # Pipelines accept None for the tokenizers and text encoders, because the call passes embeddings.
    missing = {name: None for name in required if name not in (*components, "self")}
    flags = {name: False for name in ("requires_safety_checker", "add_watermarker") if name in parameters}
    return pipeline_class(**components, **missing, **flags)


def is_left_out(component: str) -> bool:
    """Return whether pipelines with random weights do not have this component."""
    return component.startswith(_LEFT_OUT)


def _compile(pipe: Any, parts: tuple[str, ...]) -> None:
    """Compile the denoiser and the VAE decoder, as the diffusers documentation recommends."""
    for name in _DENOISERS:
        denoiser = getattr(pipe, name, None)
        if denoiser is not None and "blocks" in parts:
            denoiser.compile_repeated_blocks()
        elif denoiser is not None and "denoiser" in parts:
            setattr(pipe, name, torch.compile(denoiser))
    if getattr(pipe, "vae", None) is not None and "vae" in parts:
        pipe.vae.decode = torch.compile(pipe.vae.decode)


def make_call(case: BenchCase, pipe: Any) -> dict[str, Any]:
    """Return the arguments for the pipeline call: a prompt or, for random weights, random embeddings."""
    images = {name: _make_image(name, size) for name, size in case.images.items()}
    if not case.random:
        return _make_model_call(case, pipe, images)
    call: dict[str, Any] = {"output_type": "pt", **case.call, **images}
    generator, device = torch.Generator().manual_seed(1), open_device(case.device).tensor_device
    for name, shape in case.embeds.items():
        if "mask" in name:  # as tokenizers return them
            call[name] = torch.ones(shape, dtype=torch.int64, device=device)
        else:
            call[name] = torch.randn(shape, generator=generator).to(device, getattr(torch, case.dtype or "float32"))
    return call


def _make_model_call(case: BenchCase, pipe: Any, images: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a model with text encoders; images that its pipeline requires are color gradients."""
    interface = read_interface(pipe)
    check_outputs(interface)
    prompt = {"prompt": _PROMPT} if "prompt" in interface.parameters else {}
    output = {"output_type": "pt"} if "output_type" in interface.parameters else {}
    call = {**output, **case.call, **images}
    size = (call.get("width") or _INPUT_SIDE, call.get("height") or _INPUT_SIDE)
    for name in list_missing(interface, call, prompt=bool(prompt)):
        if INPUT_PARAMETERS.get(name) == "image":
            call[name] = _make_image(name, size)
    return {**prompt, **map_call(interface, call, prompt=bool(prompt)), **_select_output(pipe)}


def _select_output(pipe: Any) -> dict[str, str]:
    """Return the argument that makes a modular pipeline return its result instead of all values of its blocks."""
    outputs = [] if read_blocks(pipe) is None else list_block_outputs(pipe)
    selected = next((name for name in _OUTPUTS if name in outputs), None)
    return {} if selected is None else {"output": selected}


def _make_image(name: str, size: tuple[int, int]) -> Any:
    """Return an input image with a color gradient or, for a mask, one whose right half is to be replaced."""
    from PIL import Image

    if "mask" in name:
        mask = Image.new("L", size, 0)
        mask.paste(255, (size[0] // 2, 0, *size))
        return mask
    horizontal = Image.linear_gradient("L").resize(size)
    vertical = horizontal.transpose(Image.Transpose.TRANSPOSE).resize(size)
    return Image.merge("RGB", (horizontal, vertical, Image.new("L", size, 128)))
