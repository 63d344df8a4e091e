"""Quantization of the linear layers of a loaded model, for the option `weights=`."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from anyaccel.errors import MissingLibraryError, ModelError, UsageError
from anyaccel.planning.facts import WeightError
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.formats import Blocks, Gguf, Parts, WeightFormat
from anyaccel.quantized_weights.library_layers import QuantizedWeight, make_float8, make_int8
from anyaccel.quantized_weights.replace_layers import set_replaced_quantizer
from anyaccel.upstream import diffusers_internals, transformers_internals
from anyaccel.upstream.gguf_internals import is_installed, quantize_blocks

__all__ = ["QUANTIZATION_BAR", "find_layers", "is_partly_quantized", "quantize_model", "quantize_weight", "read_error"]

# Start of the progress-bar description. The commands show a display of their own instead of the bar.
QUANTIZATION_BAR = "Quantizing"
# In seconds. Shorter quantizations show no bar.
_BAR_DELAY_S = 2
# Attribute of a model while its layers are quantized, which stays if this is interrupted.
_UNFINISHED = "_anyaccel_unfinished_quantization"

# QLoRA (https://arxiv.org/abs/2305.14314), appendix E.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_NF4_BLOCK, _GGUF_BLOCK = 64, 32
_FLOAT8_MAX, _INT8_MAX = 448.0, 127.0
# The names of the formats, where they differ from those of the option.
_NAMES = {"fp8-e4m3": "fp8"}
_GGUF = "gguf:"


def quantize_model(model: torch.nn.Module, weights: str) -> None:
    """Quantize the linear layers of a model, one at a time, and measure their errors. This is permanent.

    Weights on the CPU need no memory beyond that of one layer in float32. Those on `meta` get an error of NaN.

    If this is interrupted, the model works with the layers that are quantized already. Calling it again with the same
    format quantizes the others.
    """
    if weights.startswith(_GGUF) and not is_installed():
        raise MissingLibraryError(f"weights={weights!r} requires the package gguf", hint="pip install gguf")
    named = find_layers(model, weights)
    _check_finite(model, named)
    layers = list(named.values())
    vars(model)[_UNFINISHED] = True
    try:
        with torch.no_grad():
            for layer in _show_progress(layers, f"{QUANTIZATION_BAR} {type(model).__name__} to {weights}"):
                weight = layer.weight.detach()
                quantize = _quantize_on_meta if weight.is_meta else _quantize
                form, parts, error = quantize(weight, weights)
                DequantizedLinear.convert(layer, form, parts, weight.dtype).error = error
    finally:
        set_replaced_quantizer(model)
    del vars(model)[_UNFINISHED]


def _check_finite(model: torch.nn.Module, layers: Mapping[str, torch.nn.Linear]) -> None:
    """Raise `ModelError` for NaN or Inf: the rounding of some formats would turn them into finite numbers."""
    for name, layer in layers.items():
        # The sum needs no memory, and is finite only if all values are, unless it overflows.
        if not layer.weight.is_meta and not bool(layer.weight.sum(dtype=torch.float32).isfinite()):
            if bool(layer.weight.isfinite().all()):
                continue
            raise ModelError(
                f"the weight of {name} in {type(model).__name__} has NaN or Inf values, which cannot be quantized",
                hint="copy or download the model again",
            )


def is_partly_quantized(model: torch.nn.Module) -> bool:
    """Return whether `quantize_model` was interrupted and has not been repeated since."""
    return _UNFINISHED in vars(model)


def _show_progress(layers: list[torch.nn.Linear], text: str) -> Iterable[torch.nn.Linear]:
    if all(layer.weight.is_meta for layer in layers):
        return layers
    # Imported here: `anyaccel run` imports this module before the script, which may set variables for diffusers.
    from diffusers.utils import logging as diffusers_logging

    make_bar: Any = diffusers_logging.tqdm
    # disable=None: only on a terminal or in a notebook.
    return make_bar(layers, desc=text, unit="layer", delay=_BAR_DELAY_S, disable=None)  # type: ignore[no-any-return]


def _quantize(weight: torch.Tensor, weights: str) -> tuple[WeightFormat, Parts, float]:
    """Return a quantized weight, on the device of the weight, and its error."""
    # On the CPU: the codes are then the same for every device.
    values = weight.to("cpu", torch.float32)
    form, parts = quantize_weight(values, weights)
    error = _measure_error(values, form.dequantize(parts))
    return form, {name: part.to(weight.device) for name, part in parts.items()}, error


def _quantize_on_meta(weight: torch.Tensor, weights: str) -> tuple[WeightFormat, Parts, float]:
    form, parts = _quantize_shape(weight.shape, weights)
    return form, {name: torch.empty_like(part) for name, part in parts.items()}, float("nan")


@functools.cache
def _quantize_shape(shape: torch.Size, weights: str) -> QuantizedWeight:
    # Models have hundreds of layers, but few shapes.
    return quantize_weight(torch.empty(shape, device="meta"), weights)


def quantize_weight(values: torch.Tensor, weights: str) -> QuantizedWeight:
    """Return a matrix in float32 in a format of the option `weights=`."""
    return _QUANTIZERS[weights](values)


def find_layers(model: torch.nn.Module, weights: str) -> dict[str, torch.nn.Linear]:
    """Return the layers of a model that `weights=` quantizes, by name.

    These are its linear layers, except

    - embeddings, and layers that diffusers and transformers keep in their dtype: those in `_keep_in_fp32_modules`, and
      those that layerwise casting skips. Modulations of adaptive norms are quantized: they are a quarter of FLUX.
    - layers that share their weight with another one,
    - layers whose sizes are not multiples of the block size,
    - LoRA adapters.
    """
    kept = {
        *diffusers_internals.read_float32_modules(model),
        *transformers_internals.read_float32_modules(model, "float16"),
    }
    patterns = [pattern for pattern in diffusers_internals.read_uncast_layers(model) if "norm" not in pattern]
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    adapters = _find_adapters(model)
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear
        and layer not in adapters
        and _is_plain(layer, uses)
        and _has_whole_blocks(layer, weights)
        and kept.isdisjoint(name.split("."))
        and "embed" not in name
        and not any(re.search(pattern, name) for pattern in patterns)
    }


def read_error(model: torch.nn.Module) -> WeightError | None:
    """Return the errors of the layers that `quantize_model` has quantized, or None if there are none."""
    errors: dict[str, float] = {}
    form = ""
    for name, layer in model.named_modules():
        if isinstance(layer, DequantizedLinear) and layer.error is not None:
            errors[name.removesuffix(".base_layer")] = layer.error
            form = _NAMES.get(layer.format.name, layer.format.name)
    if not errors:
        return None
    worst = max(errors, key=lambda name: errors[name])
    return WeightError(
        format=form,
        layers=len(errors),
        mean=sum(errors.values()) / len(errors),
        worst=errors[worst],
        worst_layer=worst,
    )


def _find_adapters(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the layers of LoRA adapters. Raise `UsageError` if adapters are fused into the weights."""
    found: set[torch.nn.Module] = set()
    for name, parent in model.named_modules():
        base = getattr(parent, "base_layer", None)
        if not isinstance(base, torch.nn.Module):
            continue
        if getattr(parent, "merged", False):
            raise UsageError(
                f"weights= cannot quantize {name}, into which adapters are fused",
                hint="call unfuse_lora() before: without fusing, adapters give the same image",
            )
        found |= set(parent.modules()) - set(base.modules())
    return found


def _is_plain(layer: torch.nn.Linear, uses: Counter[int]) -> bool:
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    if not isinstance(weight, torch.nn.Parameter) or uses[id(weight)] > 1:
        return False
    # Not the classes of other libraries. Weights on a virtual device have one of anyaccel.
    is_own = type(weight) is torch.nn.Parameter or type(weight).__module__.startswith("anyaccel.")
    return is_own and weight.is_floating_point() and weight.dtype.itemsize > 1


def _has_whole_blocks(layer: torch.nn.Linear, weights: str) -> bool:
    if weights == "nf4":  # blocks may continue in the next row, as in bitsandbytes
        return layer.weight.numel() % _NF4_BLOCK == 0
    return not weights.startswith("gguf:") or layer.in_features % _GGUF_BLOCK == 0


def _measure_error(values: torch.Tensor, quantized: torch.Tensor) -> float:
    norm = float(values.norm())
    return float((quantized - values).norm()) / norm if norm else 0.0


def _scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Return one scale for each row, with which its largest absolute value has the code `largest`."""
    scales = values.abs().amax(1, keepdim=True) / largest
    return torch.where(scales > 0, scales, 1.0)


def _quantize_int8(values: torch.Tensor) -> QuantizedWeight:
    scales = _scale(values, _INT8_MAX)
    return make_int8("int8", (values / scales).round_().to(torch.int8), scales)


def _quantize_float8(values: torch.Tensor) -> QuantizedWeight:
    scales = _scale(values, _FLOAT8_MAX)
    return make_float8((values / scales).to(torch.float8_e4m3fn), scales)


def _quantize_nf4(values: torch.Tensor) -> QuantizedWeight:
    table = torch.tensor(_NF4, device=values.device)
    blocks = values.reshape(-1, _NF4_BLOCK)
    scales = _scale(blocks, 1.0)
    codes = (
        torch.bucketize(blocks / scales, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8).reshape(-1, 2)
    )
    packed = (codes[:, 0] << 4) | codes[:, 1]
    form = Blocks(name="nf4", shape=tuple(values.shape), block=_NF4_BLOCK, bits=4, high_first=True)
    return form, {"codes": packed, "scales": scales.reshape(-1), "table": table}


def _quantize_gguf(values: torch.Tensor, name: str) -> QuantizedWeight:
    codes, kind = quantize_blocks(values, name)
    return Gguf(name=f"gguf:{name}", shape=tuple(values.shape), kind=kind), {"codes": codes}


_QUANTIZERS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "int8": _quantize_int8,
    "fp8": _quantize_float8,
    "nf4": _quantize_nf4,
    "gguf:Q8_0": lambda values: _quantize_gguf(values, "Q8_0"),
    "gguf:Q4_0": lambda values: _quantize_gguf(values, "Q4_0"),
}
