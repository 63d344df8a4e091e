"""Reading the weights of layers that bitsandbytes, torchao, quanto and diffusers' quantizers create."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyaccel.errors import ModelError
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.formats import FLOAT8, Blocks, Gguf, WeightFormat, make_float8_table, pack_bits
from anyaccel.upstream.gguf_internals import name_kind, read_kinds
from anyaccel.upstream.quanto_internals import read_quanto_tensors

__all__ = ["QuantizedWeight", "make_float8", "make_int8", "read_library", "read_weight"]

_LIBRARIES = frozenset(("bitsandbytes", "diffusers", "optimum", "torchao"))
QuantizedWeight = tuple[WeightFormat, dict[str, torch.Tensor]]
# bitsandbytes stores int8 rows as multiples of their largest absolute value divided by 127.
_INT8_MAX = 127.0


def read_library(layer: torch.nn.Module) -> str:
    """Return the library whose kernels a quantized linear layer needs, or its dtype if that is a float8 one.

    Return the format of a `DequantizedLinear`, and an empty string if the layer is not quantized.
    """
    if isinstance(layer, DequantizedLinear):
        return layer.format.name
    weight = dict(layer.named_parameters(recurse=False)).get("weight") if isinstance(layer, torch.nn.Linear) else None
    if weight is None:
        return ""
    for cls in (*type(layer).__mro__, *type(weight).__mro__):
        library = cls.__module__.partition(".")[0]
        if library in _LIBRARIES and (library != "diffusers" or (library, cls.__name__) in _READERS):
            return library
    return str(weight.dtype).removeprefix("torch.") if weight.dtype in FLOAT8 else ""


def read_weight(layer: Any) -> QuantizedWeight | None:
    """Return the quantized weight of a linear layer as plain tensors, or None if it is not quantized yet.

    Raise `ModelError` if the format is not known.
    """
    weight = layer.weight
    for cls in (*type(layer).__mro__, *type(weight).__mro__):
        reader = _READERS.get((cls.__module__.partition(".")[0], cls.__name__))
        if reader is not None:
            return reader(layer, weight)
    if weight.dtype in FLOAT8 and type(weight) is torch.nn.Parameter:
        return make_float8(weight.detach(), torch.ones(1))
    raise ModelError(
        f"weights of type {type(weight).__name__} can only run with the kernels of {read_library(layer)}",
        hint="load the model with int8 or float8 weights, or in another format",
    )


def make_float8(data: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """Return a float8 weight with one scale, or one scale for each row or for each block of a row."""
    scales = scales.detach().to(torch.float32).reshape(-1)
    form = Blocks(name=FLOAT8[data.dtype], shape=tuple(data.shape), block=data.numel() // len(scales))
    table = make_float8_table(data.dtype).to(data.device)
    return form, {"codes": data.contiguous().view(torch.uint8), "scales": scales.to(data.device), "table": table}


def make_int8(
    name: str, data: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None = None
) -> QuantizedWeight:
    """Return an int8 weight with one scale, or one scale for each row or for each block of a row."""
    scales = scales.detach().to(torch.float32).reshape(-1)
    form = Blocks(name=name, shape=tuple(data.shape), block=data.numel() // len(scales))
    parts = {"codes": data.detach().contiguous(), "scales": scales}
    if zero_points is not None and bool(zero_points.any()):
        parts["offsets"] = -zero_points.detach().to(torch.float32).reshape(-1) * scales
    return form, parts


def _read_gguf(layer: Any, weight: Any) -> QuantizedWeight:
    kind = int(weight.quant_type)
    if kind not in read_kinds():
        raise ModelError(
            f"diffusers cannot dequantize the GGUF quantization {name_kind(kind)}",
            hint="use a file with Q8_0 or Q4_K weights",
        )
    data = weight.as_tensor().detach()
    return Gguf(name=f"gguf:{name_kind(kind)}", shape=tuple(weight.quant_shape), kind=kind), {"codes": data}


def _read_bitsandbytes_4bit(layer: Any, weight: Any) -> QuantizedWeight | None:
    state = weight.quant_state
    return None if state is None else read_bitsandbytes_state(weight.detach(), state)


def read_bitsandbytes_state(data: torch.Tensor, state: Any) -> QuantizedWeight:
    """Return the weight that a `QuantState` of bitsandbytes describes."""
    form = Blocks(
        name=state.quant_type,
        shape=tuple(state.shape),
        block=state.blocksize,
        bits=4,
        high_first=True,
        scale_block=state.state2.blocksize if state.nested else 1,
    )
    parts = {"codes": data.view(torch.uint8).reshape(-1), "scales": state.absmax, "table": state.code.to(torch.float32)}
    if state.nested:
        parts |= {
            "scale_table": state.state2.code.to(torch.float32),
            "scale_factors": state.state2.absmax.to(torch.float32),
            "scale_offset": state.offset.to(torch.float32).reshape(1),
        }
    return _pad(form, parts)


def _pad(form: Blocks, parts: dict[str, torch.Tensor]) -> QuantizedWeight:
    """Fill the last block of a weight whose size is not a multiple of the block size."""
    per_byte = 8 // form.bits
    missing = len(parts["scales"]) * form.block // per_byte - len(parts["codes"])
    if missing > 0:
        parts["codes"] = torch.nn.functional.pad(parts["codes"], (0, missing))
    return form, parts


def _read_bitsandbytes_8bit(layer: Any, weight: Any) -> QuantizedWeight | None:
    data, scales = (getattr(weight, name, None) for name in ("CB", "SCB"))
    if scales is None:  # after the first call they are in the layer's state
        data, scales = layer.state.CB, layer.state.SCB
    if scales is None:
        return None
    data = weight.detach() if data is None else data
    return make_int8("int8", data, scales / _INT8_MAX)


def _read_quanto(layer: Any, weight: Any) -> QuantizedWeight | None:
    tensors = read_quanto_tensors(weight)
    if tensors is None:
        return None  # not frozen: the weight is not quantized yet
    data, scales, offsets, bits = tensors
    if weight.axis != 0:
        raise ModelError("quanto weights with axis=-1 are not supported", hint="quantize the weights with axis=0")
    if data.dtype in FLOAT8:
        return make_float8(data, scales)
    if bits == 8:
        return make_int8("int8", data, scales)
    scales = scales.detach().to(torch.float32).reshape(-1)
    form = Blocks(name=f"int{bits}", shape=tuple(weight.shape), block=data.numel() // len(scales), bits=bits)
    parts = {"codes": pack_bits(data, bits), "scales": scales}
    return form, parts if offsets is None else parts | {"offsets": offsets}


def _read_torchao_int8(layer: Any, weight: Any) -> QuantizedWeight:
    return make_int8("int8", weight.qdata, weight.scale, weight.zero_point)


def _read_torchao_float8(layer: Any, weight: Any) -> QuantizedWeight:
    return make_float8(weight.qdata, weight.scale)


def _read_bfl_float8(layer: Any, weight: Any) -> QuantizedWeight:
    return make_float8(weight.detach(), layer.weight_scale)


def _read_bfl_nvfp4(layer: Any, weight: Any) -> QuantizedWeight:
    from diffusers.quantizers.bfl.utils import E2M1_LUT, NVFP4_BLOCK

    scale_dtype = layer.weight_scale.dtype
    form = Blocks(
        name="nvfp4",
        shape=(layer.out_features, layer.in_features),
        block=NVFP4_BLOCK,
        bits=4,
        scale_block=layer.weight_scale.numel(),
    )
    return form, {
        "codes": weight.detach().reshape(-1),
        "scales": layer.weight_scale.detach().contiguous().view(torch.uint8).reshape(-1),
        "table": E2M1_LUT.to(weight.device),
        "scale_table": make_float8_table(scale_dtype).to(weight.device),
        "scale_factors": layer.weight_scale_2.detach().to(torch.float32).reshape(1),
        "scale_offset": torch.zeros(1, device=weight.device),
    }


# By library and class name, so that no library needs to be imported.
_READERS: dict[tuple[str, str], Callable[[Any, Any], QuantizedWeight | None]] = {
    ("diffusers", "GGUFLinear"): _read_gguf,
    ("diffusers", "BFLFP8RLinear"): _read_bfl_float8,
    ("diffusers", "BFLNVFP4Linear"): _read_bfl_nvfp4,
    ("bitsandbytes", "Linear4bit"): _read_bitsandbytes_4bit,
    ("bitsandbytes", "Linear8bitLt"): _read_bitsandbytes_8bit,
    ("optimum", "QLinear"): _read_quanto,
    ("torchao", "Int8Tensor"): _read_torchao_int8,
    ("torchao", "Float8Tensor"): _read_torchao_float8,
}
