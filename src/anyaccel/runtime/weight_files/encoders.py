"""Text and image encoders of transformers with 8-bit weights, and encoders from single files of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from anyaccel.errors import ModelError, ModelFileError
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.file_quantizer import assign_weight
from anyaccel.quantized_weights.replace_layers import set_replaced_quantizer
from anyaccel.quantized_weights.scaled_weight import ScaledWeight
from anyaccel.runtime.weight_files.sizes import find_weight_files
from anyaccel.runtime.weight_files.tensors import has_8bit_weights, has_quantization_config, read_tensors

__all__ = ["keep_encoder_weights", "load_text_encoder", "make_incomplete_error"]


def keep_encoder_weights(name: str, component: Any, folder: str, variant: str | None) -> None:
    """Give a model of transformers the 8-bit weights of its files. It has loaded the codes without the scales."""
    import transformers

    if not isinstance(component, transformers.PreTrainedModel) or has_quantization_config(Path(folder, name)):
        return
    files = find_weight_files(Path(folder, name), variant)
    if has_8bit_weights(files):
        _assign_weights(component, files)


def load_text_encoder(class_name: str, name: str, file: Path, model: str, dtype: Any) -> Any:
    """Load a model of transformers from a file of weights, with the config from the folder or Hub ID `model`."""
    import transformers

    if file.suffix != ".safetensors":
        raise ModelError(
            f"{name}={str(file)!r}: text encoders can only be loaded from safetensors files",
            hint="load the text encoder from the folder of the pipeline",
        )
    kind = getattr(transformers, class_name)
    config = kind.config_class.from_pretrained(str(model), subfolder=name)
    plain = {
        key: value.dequantize(dtype or torch.float32) if isinstance(value, ScaledWeight) else value
        for key, value in read_tensors(file).items()
    }
    loaded, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=plain,
        torch_dtype=dtype or torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    # transformers initializes these weights with random numbers.
    lacking = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if lacking:
        raise make_incomplete_error(str(file), class_name, lacking)
    if has_8bit_weights([file]):
        _assign_weights(loaded, [file])
    return loaded


def _assign_weights(model: torch.nn.Module, files: list[Path]) -> None:
    """Give the layers of a model of transformers the 8-bit weights of its files; it has loaded codes without scales."""
    dtype = next(weight.dtype for weight in model.parameters())
    layers = dict(model.named_modules())
    for file in files:
        for key, value in read_tensors(file).items():
            if isinstance(value, ScaledWeight):
                layer, _, name = key.rpartition(".")
                assign_weight(_find_layer(layers, layer, file), name, value, dtype)
    if any(isinstance(layer, DequantizedLinear) for layer in layers.values()):
        set_replaced_quantizer(model)


def _find_layer(layers: Mapping[str, torch.nn.Module], name: str, file: Path) -> torch.nn.Module:
    """Return the layer for a weight; transformers adds and drops prefixes such as `model.`."""
    found = [layers[name]] if name in layers else []
    found = found or [layer for key, layer in layers.items() if f".{name}".endswith(f".{key}") and key]
    found = found or [layer for key, layer in layers.items() if key.endswith(f".{name}")]
    if len(found) != 1:
        raise ModelFileError(f"{file}: the model has no layer {name}", hint="use a file for this model")
    return found[0]


def make_incomplete_error(source: str, model: str, lacking: list[str]) -> ModelFileError:
    """Return the error for files without values for some weights of a model."""
    return ModelFileError(
        f"{source} lacks {len(lacking)} weights of {model}, such as {lacking[0]}",
        hint=f"use a file with all weights of {model}, for the same config",
    )
