"""Tiny denoisers whose weights the real libraries have quantized."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers as typed_diffusers
import pytest
import torch

from anyaccel.recipes import recipes

diffusers: Any = typed_diffusers

__all__ = ["FORMATS", "MODELS", "RECIPE", "Model", "Quantizer", "find_denoiser", "make_pipeline"]

RECIPE = recipes()["flux"]
# Takes the folder of a saved pipeline, and a folder for temporary files.
Quantizer = Callable[[Path, Path], Any]


@dataclass(frozen=True)
class Model:
    """A recipe, with a denoiser that is wide enough for blocks of 32 weights."""

    recipe: str
    config: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """Return the pipeline."""
        pipe: Any = recipes()[self.recipe].make()
        if self.config:
            name = find_denoiser(pipe)
            denoiser = getattr(pipe, name)
            torch.manual_seed(0)
            wide = type(denoiser).from_config({**denoiser.config, **self.config})
            setattr(pipe, name, wide.eval().requires_grad_(False))
        return pipe


MODELS = {
    "FLUX": Model("flux"),
    "SDXL": Model("stable-diffusion-xl", {"block_out_channels": (32, 64)}),
    "Wan": Model("wan", {"attention_head_dim": 16, "ffn_dim": 64}),
}


def find_denoiser(pipe: Any) -> str:
    """Return the name of the pipeline's denoiser."""
    return "unet" if hasattr(pipe, "unet") else "transformer"


def make_pipeline(quantizer: Quantizer, saved: Path, temporary: Path, model: Model = MODELS["FLUX"]) -> Any:
    """Return a pipeline with a quantized denoiser; `saved` is the folder of the plain one."""
    pipe = model.make()
    setattr(pipe, find_denoiser(pipe), quantizer(saved, temporary))
    return pipe


def _find_class(saved: Path) -> tuple[Any, str]:
    """Return the class of the denoiser in a folder, and its subfolder."""
    folder = next(folder for folder in (saved / "transformer", saved / "unet") if folder.is_dir())
    return getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"]), folder.name


def _load(saved: Path, **options: Any) -> Any:
    denoiser_class, subfolder = _find_class(saved)
    return denoiser_class.from_pretrained(saved, subfolder=subfolder, **options)


def _gguf(kind: str, saved: Path, temporary: Path) -> Any:
    gguf = pytest.importorskip("gguf")
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(str(temporary / "model.gguf"), "flux")
    for name, weight in _load(saved).state_dict().items():
        array = weight.numpy()
        is_inner = weight.ndim == 2 and weight.shape[1] % 32 == 0 and "blocks." in name and "norm" not in name
        if is_inner:
            writer.add_tensor(name, gguf.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, array)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    denoiser_class, subfolder = _find_class(saved)
    return denoiser_class.from_single_file(
        str(temporary / "model.gguf"),
        config=str(saved),
        subfolder=subfolder,
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )


def _bitsandbytes(kind: str, saved: Path, temporary: Path) -> Any:
    # Not with diffusers' quantizer, which requires a GPU.
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = _load(saved)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear and layer.in_features % 32 == 0:
                setattr(parent, name, _make_bitsandbytes_layer(bitsandbytes, kind, layer))
    return model


def _make_bitsandbytes_layer(bitsandbytes: Any, kind: str, layer: torch.nn.Linear) -> Any:
    sizes, nn = (layer.in_features, layer.out_features, layer.bias is not None), bitsandbytes.nn
    weight = layer.weight.detach()
    if kind == "int8":
        new = nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        new.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)._quantize("cpu")
    else:
        new = nn.Linear4bit(*sizes, quant_type=kind, compute_dtype=torch.float32)
        new.weight = nn.Params4bit(weight, requires_grad=False, quant_type=kind)._quantize("cpu")
    if layer.bias is not None:
        new.bias = layer.bias
    return new


def _torchao(kind: str, saved: Path, temporary: Path) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    config = {
        "int8": functools.partial(quantization.Int8WeightOnlyConfig, version=2),
        "float8": quantization.Float8WeightOnlyConfig,
    }[kind]()
    return _load(saved, quantization_config=diffusers.TorchAoConfig(config), torch_dtype=torch.float32)


def _quanto(kind: str, saved: Path, temporary: Path) -> Any:
    pytest.importorskip("optimum.quanto")
    return _load(saved, quantization_config=diffusers.QuantoConfig(weights_dtype=kind))


def _layerwise_casting(dtype: torch.dtype, saved: Path, temporary: Path) -> Any:
    model = _load(saved)
    model.enable_layerwise_casting(storage_dtype=dtype, compute_dtype=torch.float32)
    return model


FORMATS: dict[str, Quantizer] = {
    **{f"gguf-{kind}": functools.partial(_gguf, kind) for kind in ("Q8_0", "Q5_1", "Q4_0", "BF16")},
    **{f"bitsandbytes-{kind}": functools.partial(_bitsandbytes, kind) for kind in ("nf4", "fp4", "int8")},
    **{f"torchao-{kind}": functools.partial(_torchao, kind) for kind in ("int8", "float8")},
    **{f"quanto-{kind}": functools.partial(_quanto, kind) for kind in ("int8", "int4", "int2", "float8")},
    "float8_e4m3fn": functools.partial(_layerwise_casting, torch.float8_e4m3fn),
    "float8_e5m2": functools.partial(_layerwise_casting, torch.float8_e5m2),
}
