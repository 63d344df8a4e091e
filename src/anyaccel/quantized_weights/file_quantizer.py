"""A quantizer for diffusers that keeps the 8-bit weights of model files in their format."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.scaled_weight import ScaledWeight

__all__ = ["FileQuantizer", "FileWeightsConfig", "assign_weight"]


class _Method(str, Enum):
    FILE = "anyaccel_file"


class FileWeightsConfig(QuantizationConfigMixin):
    """The quantization config with which diffusers calls `FileQuantizer`."""

    def __init__(self) -> None:
        self.quant_method: Any = _Method.FILE

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what the text of a config shows."""
        return {"quant_method": self.quant_method.value}


class FileQuantizer(DiffusersQuantizer):
    """Replaces the linear layers whose weights are `ScaledWeight`, and dequantizes those of other layers."""

    use_keep_in_fp32_modules = True
    is_serializable = False
    is_trainable = False

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.dtype = torch.float32

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of the other weights, and remember it for the replaced layers."""
        self.dtype = torch_dtype or torch.float32
        return self.dtype

    def check_if_quantized_param(self, model: Any, param_value: Any, *args: Any, **kwargs: Any) -> bool:
        """Return whether a tensor of the file is a `ScaledWeight`."""
        return isinstance(param_value, ScaledWeight)

    def create_quantized_param(  # type: ignore[override]
        self, model: Any, param_value: Any, param_name: str, target_device: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Assign a `ScaledWeight` to its layer."""
        weight: Any = param_value.to(target_device)
        layer, _, name = param_name.rpartition(".")
        assign_weight(model.get_submodule(layer), name, weight, self.dtype)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None: ...

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None: ...


def assign_weight(layer: torch.nn.Module, name: str, weight: ScaledWeight, dtype: torch.dtype) -> None:
    """Make `weight` the weight of a layer: a linear layer keeps the codes, others get the values."""
    if type(layer) is torch.nn.Linear and name == "weight":
        form, parts = weight.quantized()
        DequantizedLinear.convert(layer, form, {key: part.to(weight.device) for key, part in parts.items()}, dtype)
    else:
        values = weight.dequantize(dtype)
        setattr(layer, name, torch.nn.Parameter(values, requires_grad=False))
