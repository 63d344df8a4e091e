"""Loading of 8-bit weights and GGUF weights, and of components from single files of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from safetensors import safe_open

from anyaccel.errors import ModelError, ModelFileError
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.file_quantizer import FileQuantizer, FileWeightsConfig, assign_weight
from anyaccel.quantized_weights.replace_layers import set_replaced_quantizer
from anyaccel.quantized_weights.scaled_files import has_scales, mark_scaled_weights
from anyaccel.quantized_weights.scaled_weight import ScaledWeight
from anyaccel.runtime.weight_files.checks import WEIGHTS, check_weight_file
from anyaccel.runtime.weight_files.safetensors_header import read_safetensors_header
from anyaccel.upstream.diffusers_internals import read_dtype_argument
from anyaccel.upstream.diffusers_quantizers import forget_quantization_config, use_file_weights

__all__ = ["find_component_files", "find_denoiser", "keep_file_weights", "load_component"]

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_DTYPE = read_dtype_argument()
# Options of `from_pretrained` that also say where the config of a component is.
_HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "local_files_only")
# Names of weights other than those of the denoiser, in files with all models of a pipeline.
_OTHER_MODELS = ("first_stage_model.", "cond_stage_model.", "conditioner.", "text_encoders.", "vae.", "te.", "te1.")
_DENOISERS = ("transformer", "unet", "prior")


def find_component_files(options: Mapping[str, Any]) -> dict[str, Path]:
    """Return the options that name a file of weights for a component: `transformer="flux1-dev-Q4_0.gguf"`."""
    return {
        name: Path(value).expanduser()
        for name, value in options.items()
        if isinstance(value, str | Path) and str(value).endswith(WEIGHTS)
    }


def find_denoiser(file: Path, config: Mapping[str, Any]) -> str:
    """Return the name of the denoiser if a file contains only this model of the pipeline, and else an empty string."""
    if file.suffix == ".safetensors":
        names = list(read_safetensors_header(file)[0])
        if any(name.startswith(_OTHER_MODELS) for name in names):
            return ""
    elif file.suffix != ".gguf":
        return ""
    return next((name for name in _DENOISERS if isinstance(config.get(name), list)), "")


def load_component(source: str, *, name: str, model: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Load a component of a pipeline from a file of weights, with the config from the folder or Hub ID `model`."""
    file = Path(source)
    entry = config.get(name)
    if not isinstance(entry, list) or entry[0] not in ("diffusers", "transformers"):
        raise ModelError(
            f"{name}={str(file)!r}: the pipeline has no model of this name",
            hint=f"use one of {', '.join(key for key, value in config.items() if isinstance(value, list))}",
        )
    check_weight_file(file, pickles=options.get("use_safetensors") is False)
    dtype = options.get(_DTYPE)
    dtype = dtype.get(name, dtype.get("default")) if isinstance(dtype, dict) else dtype
    if entry[0] == "transformers":
        return _load_text_encoder(entry[1], name, file, model, dtype)
    kind = getattr(diffusers, entry[1])
    if not hasattr(kind, "from_single_file"):
        raise ModelError(
            f"{name}={str(file)!r}: diffusers cannot load {entry[1]} from a single file",
            hint=f"load it with diffusers.{entry[1]}.from_pretrained and pass the model",
        )
    hub = {key: options[key] for key in _HUB_OPTIONS if key in options}
    revision = {"config_revision": options["revision"]} if "revision" in options else {}
    arguments = {_DTYPE: dtype, "config": str(model), "subfolder": name, **hub, **revision}
    with _reading_files(dtype, file) as quantization:
        loaded = kind.from_single_file(str(file), **arguments, **quantization)
    _finish(loaded)
    lacking = [key for key, value in loaded.state_dict(keep_vars=True).items() if value.is_meta]
    if lacking:
        raise ModelFileError(
            f"{file} lacks {len(lacking)} weights of {entry[1]}, such as {lacking[0]}",
            hint=f"use a file for {model}, or pass the folder of the model that the file belongs to",
        )
    return loaded


@contextmanager
def keep_file_weights(
    model: Any, config: Mapping[str, Any], options: dict[str, Any]
) -> Iterator[tuple[Callable[[Any], None], frozenset[str]]]:
    """Keep 8-bit weights and scales of a folder or file in their format while diffusers loads it.

    Yield a function to call with the loaded pipeline, and the components with such weights. `options` of diffusers are
    changed.
    """
    path = Path(str(model)).expanduser()
    found = _find_8bit_components(path, config) if path.is_dir() else {}
    dtype = options.get(_DTYPE)
    with _reading_files(dtype, path, options.get("quantization_config")) as quantization:
        if path.is_file():
            options.update(quantization)
        elif quantization and options.get("low_cpu_mem_usage", True):
            chosen: Any = {
                name: FileWeightsConfig()
                for name, library in found.items()
                if library == "diffusers" and options.get(name) is None
            }
            if chosen:
                options["quantization_config"] = PipelineQuantizationConfig(quant_mapping=chosen)

        def finish(pipe: Any) -> None:
            for name, component in pipe.components.items():
                if isinstance(component, torch.nn.Module):
                    if found.get(name) == "transformers" and options.get(name) is None:
                        _assign_weights(component, sorted((path / name).glob("*.safetensors")))
                    _finish(component)

        yield finish, frozenset(found)


@contextmanager
def _reading_files(dtype: Any, path: Path, requested: Any = None) -> Iterator[dict[str, Any]]:
    """Mark 8-bit weights in files that diffusers reads; yield the quantization config to pass to diffusers."""
    if requested is not None and _has_own_layout(requested):
        yield {}
        return
    quantization: dict[str, Any] = {}
    is_float8 = isinstance(dtype, torch.dtype) and dtype.itemsize == 1
    if requested is None and path.suffix == ".gguf":
        compute = dtype if isinstance(dtype, torch.dtype) else torch.float32
        quantization["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=compute)
    elif requested is None and not is_float8 and (path.is_dir() or _has_8bit_weights([path])):
        quantization["quantization_config"] = FileWeightsConfig()

    def convert(tensors: Any, file: Any) -> Any:
        marked = _mark(tensors, Path(str(file)))
        if requested is None:
            return marked
        # Another quantizer reads plain values.
        return {
            name: value.dequantize() if isinstance(value, ScaledWeight) else value for name, value in marked.items()
        }

    with use_file_weights(convert, FileQuantizer, FileWeightsConfig):
        yield quantization


def _has_own_layout(config: Any) -> bool:
    """Return whether a quantization config is for files with a layout of their own, rather than for plain weights."""
    method = str(getattr(getattr(config, "quant_method", ""), "value", ""))
    return method in ("bfl", "modelopt", "sdnq", "auto-round", "nunchaku_lite")


def _mark(tensors: Any, file: Path) -> Any:
    is_plain = not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    if file.suffix == ".gguf" or is_plain or _has_quantization_config(file.parent):
        return tensors
    metadata: dict[str, str] = {}
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
    return mark_scaled_weights(tensors, str(file), metadata)


def _has_quantization_config(folder: Path) -> bool:
    """Return whether the config of a model names a library that has quantized its weights."""
    file = folder / "config.json"
    return file.is_file() and '"quantization_config"' in file.read_text()


def _has_8bit_weights(files: list[Path]) -> bool:
    """Return whether files have float8 weights, or weights with scales."""
    for file in files:
        header = read_safetensors_header(file)[0] if file.suffix == ".safetensors" else {}
        if has_scales(header) or any(entry.get("dtype") in _FLOAT8 for entry in header.values()):
            return True
    return False


def _find_8bit_components(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the components of a local pipeline that have 8-bit weights, with the library of each."""
    return {
        name: entry[0]
        for name, entry in config.items()
        if isinstance(entry, list)
        and (folder / name).is_dir()
        and not _has_quantization_config(folder / name)
        and _has_8bit_weights(sorted((folder / name).glob("*.safetensors")))
    }


def _finish(model: Any) -> None:
    if isinstance(getattr(model, "hf_quantizer", None), FileQuantizer):
        set_replaced_quantizer(model)
        forget_quantization_config(model)


def _load_text_encoder(class_name: str, name: str, file: Path, model: str, dtype: Any) -> Any:
    import transformers

    if file.suffix != ".safetensors":
        raise ModelError(
            f"{name}={str(file)!r}: text encoders can only be loaded from safetensors files",
            hint="load the text encoder from the folder of the pipeline",
        )
    kind = getattr(transformers, class_name)
    config = kind.config_class.from_pretrained(str(model), subfolder=name)
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
    plain = {
        key: value.dequantize(dtype or torch.float32) if isinstance(value, ScaledWeight) else value
        for key, value in _mark(tensors, file).items()
    }
    loaded = kind.from_pretrained(None, config=config, state_dict=plain, torch_dtype=dtype or torch.float32)
    if _has_8bit_weights([file]):
        _assign_weights(loaded, [file])
    return loaded


def _assign_weights(model: torch.nn.Module, files: list[Path]) -> None:
    """Give the layers of a model of transformers the 8-bit weights of its files; it has loaded codes without scales."""
    dtype = next(weight.dtype for weight in model.parameters())
    layers = dict(model.named_modules())
    for file in files:
        with safe_open(file, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        for key, value in _mark(tensors, file).items():
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
