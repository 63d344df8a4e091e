"""The layouts of model files with 8-bit weights, as ComfyUI and vendors publish them.

A weight of the dtype float8_e4m3fn, float8_e5m2 or int8 may have a scale next to it: `<layer>.scale_weight` or
`<layer>.weight_scale` (https://github.com/Comfy-Org/ComfyUI/blob/master/QUANTIZATION.md), or `<layer>.weight_scale_inv`
(https://huggingface.co/docs/transformers/quantization/finegrained_fp8), for the whole weight, for each row or for each
block. In all of them, the weight is the code times the scale. Scales of inputs (`scale_input`, `input_scale`) only
matter to kernels that quantize the activations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from anyaccel.errors import ModelError
from anyaccel.quantized_weights.scaled_weight import ScaledWeight

__all__ = ["find_scaled_weight", "has_scales", "mark_scaled_weights"]

_SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
_IGNORED = ("scale_input", "input_scale", "comfy_quant", "scaled_fp8")
# Tensors of formats whose weights are more than a code times a scale.
_UNSUPPORTED = ("weight_scale_2", "pre_quant_scale", "weight_scalar", "weight_zero_point")
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Values of `format` in the metadata of ComfyUI.
_COMFY_FORMATS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fn_rowwise",
    "float8_e4m3fn_blockwise",
    "int8_tensorwise",
    "int8_blockwise",
)


def has_scales(names: Iterable[str]) -> bool:
    """Return whether tensors with these names are scales of weights, which a loader must apply."""
    return any(_split(name)[1] in (*_SCALES, *_UNSUPPORTED, "comfy_quant", "scaled_fp8") for name in names)


def find_scaled_weight(name: str) -> str:
    """Return the name of the weight to which a scale belongs, and an empty string for other tensors."""
    layer, kind = _split(name)
    return f"{layer}.weight" if kind in (*_SCALES, *_IGNORED, *_UNSUPPORTED) else ""


def mark_scaled_weights(
    tensors: Mapping[str, torch.Tensor], source: str, metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the tensors of a file, with 8-bit weights as `ScaledWeight` and without their scales.

    `source` names the file in errors, and `metadata` is that of its header.
    """
    _check_formats(tensors, source, metadata or {})
    scales = {layer: name for name in tensors for layer, kind in [_split(name)] if kind in _SCALES}
    scaled = {layer for layer in scales if f"{layer}.weight" in tensors}
    marked: dict[str, Any] = {}
    for name, tensor in tensors.items():
        layer, kind = _split(name)
        if (layer in scaled and kind in (*_SCALES, *_IGNORED)) or kind in ("scaled_fp8", "comfy_quant"):
            continue
        if kind == "weight" and layer in scaled:
            marked[name] = _apply_scale(tensor, tensors[scales[layer]], f"{source}: the weight of {layer}")
        elif type(tensor) is torch.Tensor and tensor.dtype in _CODES[:2]:
            marked[name] = ScaledWeight.make(tensor, None) if tensor.ndim > 1 else tensor.to(torch.float32)
        elif kind == "weight" and type(tensor) is torch.Tensor and tensor.dtype is torch.int8:
            raise _make_error(source, layer, "int8 without a scale,")
        else:
            marked[name] = tensor
    return marked


def _split(name: str) -> tuple[str, str]:
    layer, _, kind = name.rpartition(".")
    return layer, kind


def _check_formats(tensors: Mapping[str, torch.Tensor], source: str, metadata: Mapping[str, str]) -> None:
    """Raise `ModelError` if a weight has a format that cannot be read."""
    formats = _read_formats(tensors, source, metadata)
    for name in tensors:
        layer, kind = _split(name)
        if kind in _UNSUPPORTED and f"{layer}.weight" in tensors:
            raise _make_error(source, layer, f"with `{kind}`, such as NVFP4,")
    for layer, config in formats.items():
        name = str(config.get("format"))
        if name not in _COMFY_FORMATS or config.get("convrot"):
            raise _make_error(source, layer, f"{name}{' with rotated activations' * bool(config.get('convrot'))}")


def _read_formats(
    tensors: Mapping[str, torch.Tensor], source: str, metadata: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return what the metadata and the tensors `comfy_quant` say about layers. Raise `ModelError` if it is damaged."""
    try:
        content = json.loads(metadata.get("_quantization_metadata", "{}"))
        formats = {layer: dict(config) for layer, config in content.get("layers", {}).items()}
        for name, tensor in tensors.items():
            layer, kind = _split(name)
            if kind == "comfy_quant":
                formats[layer] = dict(json.loads(bytes(tensor.tolist())))
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ModelError(
            f"{source}: the description of the quantization cannot be read: {error}",
            hint="copy or download the file again",
        ) from error
    return formats


def _make_error(source: str, layer: str, form: str) -> ModelError:
    return ModelError(
        f"{source}: the weights of {layer} have the format {form} which anyaccel cannot read",
        hint="use a file with fp8 or int8 weights and one scale per weight, row or block, or a GGUF file",
    )


def _apply_scale(weight: torch.Tensor, scale: torch.Tensor, subject: str) -> Any:
    """Return a weight with the scale of the file, or without one if the scale is 1."""
    if not scale.is_floating_point() or scale.numel() == 0:
        raise ModelError(
            f"{subject} has scales of the dtype {scale.dtype} and the shape {tuple(scale.shape)}, which cannot be read",
            hint="use a file with floating-point scales, or a GGUF file",
        )
    is_one = bool((scale.to(torch.float32) == 1).all())
    if weight.dtype not in _CODES:
        if is_one and weight.dtype.is_floating_point:
            return weight  # ComfyUI also writes scales of layers that are not quantized
        raise ModelError(f"{subject} has a scale and the dtype {weight.dtype}", hint="use a file with fp8 weights")
    if is_one and weight.dtype is not torch.int8:
        return ScaledWeight.make(weight, None)
    rows, columns = weight.shape[0], weight[0].numel()
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        blocks = scale.reshape(1, 1).expand(rows, 1)
    elif scale.shape in ((rows,), (rows, 1)):
        blocks = scale.reshape(rows, 1)
    elif scale.ndim == 2 and rows % scale.shape[0] == 0 and columns % scale.shape[1] == 0:
        blocks = scale.repeat_interleave(rows // scale.shape[0], 0)
    else:
        raise ModelError(
            f"{subject} has the shape {tuple(weight.shape)}, which {tuple(scale.shape)} scales do not divide",
            hint="use a file with one scale per weight or per row",
        )
    return ScaledWeight.make(weight, blocks.contiguous())
