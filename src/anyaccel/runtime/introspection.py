"""Functions that find a pipeline's components, models and denoisers, and the facts for its plan."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from typing import Any

import torch

from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.library_layers import read_library
from anyaccel.quantized_weights.packed_size import count_packed
from anyaccel.quantized_weights.quantize import read_error
from anyaccel.quantized_weights.replace_layers import ReplacedQuantizer
from anyaccel.runtime.placement_state import Placement, find_placement
from anyaccel.upstream.diffusers_internals import read_layerwise_dtype, read_parallel_plan, read_repeated_blocks
from anyaccel.upstream.torch_compile_internals import unwrap_compiled
from anyaccel.upstream.transformers_internals import is_transformers_model

__all__ = [
    "find_components", "find_denoisers", "find_models", "is_denoiser", "is_quantized", "list_denoisers",
    "list_forward_arguments", "plain_class", "read_dtype", "read_facts",
]  # fmt: skip

# Names of timestep arguments: a model that has one runs at every denoising step.
_TIMESTEP_ARGUMENTS = {"timestep", "timesteps", "timestep_ratio", "t", "r"}
# Component names of denoisers that have no timestep argument.
_DENOISERS = ("unet", "transformer")


def plain_class(pipe: Any) -> type:
    """Return the diffusers class of a pipeline, even if anyaccel has replaced the pipeline's class."""
    # The portable class is created at run time from the diffusers class and names it; see `portable_class`.
    kind: type = getattr(type(pipe), "_plain_class", type(pipe))
    return kind


def find_components(pipe: Any) -> dict[str, Any]:
    """Return the components of a pipeline by name, without those that are None."""
    return {name: component for name, component in pipe.components.items() if component is not None}


def find_models(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the models of a pipeline by name, unwrapping those wrapped by `torch.compile`."""
    components = {name: unwrap_compiled(component) for name, component in find_components(pipe).items()}
    return {name: component for name, component in components.items() if isinstance(component, torch.nn.Module)}


def find_denoisers(pipe: Any, placement: Placement) -> dict[str, torch.nn.Module]:
    """Return the models that run at every denoising step, without models removed since placement."""
    models = find_models(pipe)
    return {name: models[name] for name in placement.denoisers if name in models}


def list_denoisers(pipe: Any) -> tuple[str, ...]:
    """Return the names of the models that run at every denoising step, as `PipelineFacts.denoisers` does."""
    return tuple(name for name, model in find_models(pipe).items() if is_denoiser(name, model))


def read_facts(pipe: Any) -> PipelineFacts:
    """Return the facts about a pipeline's models that the planner needs, such as dtypes and sizes."""
    placement = find_placement(pipe)
    # A placed pipeline may have been cast; a new plan must start from the dtypes of the checkpoint.
    loaded = placement.loaded if placement is not None else {}
    models = [
        _read_component(name, component, loaded.get(name))
        for name, component in find_components(pipe).items()
        if isinstance(component, torch.nn.Module)
    ]
    return PipelineFacts(pipeline=type(pipe).__name__, components=tuple(models))


def read_dtype(model: torch.nn.Module) -> str:
    """Return the dtype of most of a model's floating-point weights; `float32` if it has none.

    That of weights with layerwise casting is the dtype in which they compute.
    """
    # Some models keep a few weights in float32, such as Wan's `scale_shift_table`, which is also its first parameter.
    sizes = Counter[torch.dtype]()
    computed: dict[torch.Tensor, torch.dtype] = {}
    for layer in model.modules():
        dtype = read_layerwise_dtype(layer)
        if dtype is not None:
            computed |= dict.fromkeys(layer.parameters(), dtype)
        if isinstance(layer, DequantizedLinear):
            sizes[layer.dtype] += layer.count_weights()
    for weight in model.parameters():
        if weight.is_floating_point():
            sizes[computed.get(weight, weight.dtype) if computed else weight.dtype] += weight.numel()
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.") if sizes else "float32"


def list_forward_arguments(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters of a module's `forward`; none if it is a built-in function."""
    try:
        return list(inspect.signature(module.forward).parameters)
    except ValueError:  # a built-in function without a signature, such as `torch.sin`
        return []


def _read_component(name: str, module: torch.nn.Module, loaded: str | None) -> ComponentFacts:
    plain = unwrap_compiled(module)
    layers, packed = list(plain.modules()), count_packed(plain)
    return ComponentFacts(
        name=name,
        kind=type(plain).__name__,
        dtype=loaded or read_dtype(plain),
        parameters=packed.plain + packed.quantized,
        packed_parameters=packed.quantized,
        packed_bytes=packed.quantized_bytes,
        weight_error=read_error(plain),
        denoises=is_denoiser(name, plain),
        blocks=_count_blocks(plain, layers),
        convolutions=sum(isinstance(layer, torch.nn.Conv2d) for layer in layers),
        # diffusers models have is_quantized, transformers models have hf_quantizer.
        weight_libraries=tuple(sorted({read_library(layer) for layer in layers} - {""})),
        quantized=is_quantized(plain),
        has_own_dtype=is_transformers_model(plain),
        splits=_find_splits(plain),
        heads=_count_heads(plain),
        sharded=_count_sharded(plain),
    )


def is_denoiser(name: str, module: torch.nn.Module) -> bool:
    """Return whether a component runs at every denoising step."""
    return bool(set(list_forward_arguments(module)) & _TIMESTEP_ARGUMENTS) or name.startswith(_DENOISERS)


def is_quantized(module: torch.nn.Module) -> bool:
    """Return whether a model is not cast, because its weights are quantized."""
    quantizer = getattr(module, "hf_quantizer", None)
    # A cast would undo layerwise casting until the first call.
    if any(read_layerwise_dtype(layer) is not None for layer in module.modules()):
        return True
    return bool(getattr(module, "is_quantized", False) or quantizer) and not isinstance(quantizer, ReplacedQuantizer)


def _find_splits(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the parallel strategies (`context`, `tensor`) that diffusers supports for a model."""
    return tuple(strategy for strategy in ("context", "tensor") if read_parallel_plan(module, strategy))


def _count_heads(module: torch.nn.Module) -> int:
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def _count_sharded(module: torch.nn.Module) -> int:
    """Return the number of parameters that the model's tensor-parallel plan shards."""
    layers = read_parallel_plan(module, "tensor")
    if not layers:
        return 0
    # The plan names layers such as `transformer_blocks.*.attn.to_q`; the star is a block index.
    pattern = re.compile("|".join(re.escape(layer).replace(r"\*", "[0-9]+") for layer in layers))
    sizes = {name.rpartition(".")[0]: 0 for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        sizes[name.rpartition(".")[0]] += parameter.numel()
    return sum(size for path, size in sizes.items() if pattern.fullmatch(path))


def _count_blocks(module: torch.nn.Module, layers: list[torch.nn.Module]) -> int:
    """Return the number of repeated blocks, which share compiled code under regional compilation."""
    kinds = read_repeated_blocks(module)
    return sum(type(layer).__name__ in kinds for layer in layers) if kinds else 0
