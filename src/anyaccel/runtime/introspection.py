"""What a pipeline consists of: its components, its models, its denoisers, and the facts that a plan needs."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.runtime.placement_state import Placement, find_placement
from anyaccel.upstream.diffusers_internals import read_parallel_plan, read_repeated_blocks
from anyaccel.upstream.torch_internals import unwrap_compiled

__all__ = ["find_components", "find_denoisers", "find_models", "read_facts"]

_TIMES = {"timestep", "timesteps", "timestep_ratio", "t", "r"}
"""Names of timestep arguments: a model that has one runs at every denoising step."""
_DENOISERS = ("unet", "transformer")
"""Component names of denoisers that have no timestep argument."""


def find_components(pipe: Any) -> dict[str, Any]:
    """The components of a pipeline by name, those of pipelines inside it too."""
    return {name: part for name, part in pipe.components.items() if part is not None}


def find_models(pipe: Any) -> dict[str, torch.nn.Module]:
    """The models of a pipeline by name, as they are beneath what was compiled."""
    parts = {name: unwrap_compiled(part) for name, part in find_components(pipe).items()}
    return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}


def find_denoisers(pipe: Any, placement: Placement) -> dict[str, torch.nn.Module]:
    """The models that run at every step, by name; without those that the user removed since."""
    models = find_models(pipe)
    return {name: models[name] for name in placement.denoisers if name in models}


def read_facts(pipe: Any) -> PipelineFacts:
    """What a plan needs to know of a pipeline that is in memory."""
    placement = find_placement(pipe)
    loaded = placement.loaded if placement is not None else {}
    models = [
        _read_component(name, part, loaded.get(name))
        for name, part in find_components(pipe).items()
        if isinstance(part, torch.nn.Module)
    ]
    return PipelineFacts(pipeline=type(pipe).__name__, components=tuple(models))


def _read_component(name: str, module: torch.nn.Module, loaded: str | None) -> ComponentFacts:
    plain = unwrap_compiled(module)
    parameters, layers = list(plain.parameters()), list(plain.modules())
    floating = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
    dtype = "float32" if floating is None else str(floating.dtype).removeprefix("torch.")
    taken = set(inspect.signature(plain.forward).parameters)
    return ComponentFacts(
        name=name,
        kind=type(plain).__name__,
        dtype=loaded or dtype,
        parameters=sum(parameter.numel() for parameter in parameters),
        denoises=bool(taken & _TIMES) or name.startswith(_DENOISERS),
        blocks=_count_blocks(plain, layers),
        convolutions=sum(isinstance(part, torch.nn.Conv2d) for part in layers),
        quantized=bool(getattr(plain, "is_quantized", False) or getattr(plain, "hf_quantizer", None)),
        splits=_find_splits(plain),
        heads=_count_heads(plain),
        sharded=_count_sharded(plain),
    )


def _find_splits(module: torch.nn.Module) -> tuple[str, ...]:
    """What of a model diffusers has a plan to split over devices."""
    return tuple(way for way in ("context", "tensor") if read_parallel_plan(module, way))


def _count_heads(module: torch.nn.Module) -> int:
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def _count_sharded(module: torch.nn.Module) -> int:
    """The parameters of the layers that the model's class names for a tensor split, with a star for any number."""
    layers = read_parallel_plan(module, "tensor")
    if not layers:
        return 0
    named = re.compile("|".join(re.escape(layer).replace(r"\*", "[0-9]+") for layer in layers))
    sizes = {name.rpartition(".")[0]: 0 for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        sizes[name.rpartition(".")[0]] += parameter.numel()
    return sum(size for path, size in sizes.items() if named.fullmatch(path))


def _count_blocks(module: torch.nn.Module, layers: list[torch.nn.Module]) -> int:
    """The blocks that the model's class says are repeated, for compiling one of them alone."""
    kinds = read_repeated_blocks(module)
    return sum(type(part).__name__ in kinds for part in layers) if kinds else 0
