"""Loading of 8-bit weights and GGUF weights, and of components from single files of weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig

from anyaccel.errors import ModelError, ModelFileError, first_line
from anyaccel.quantized_weights.file_quantizer import FileQuantizer, FileWeightsConfig
from anyaccel.quantized_weights.replace_layers import set_replaced_quantizer
from anyaccel.quantized_weights.scaled_weight import ScaledWeight
from anyaccel.runtime.weight_files.checks import WEIGHTS, check_weight_file
from anyaccel.runtime.weight_files.encoders import keep_encoder_weights, load_text_encoder, make_incomplete_error
from anyaccel.runtime.weight_files.safetensors_header import read_safetensors_header
from anyaccel.runtime.weight_files.sizes import find_weight_files
from anyaccel.runtime.weight_files.tensors import has_8bit_weights, has_quantization_config, mark_tensors
from anyaccel.upstream.diffusers_internals import read_dtype_argument
from anyaccel.upstream.diffusers_loading import calling_after_each_component
from anyaccel.upstream.diffusers_quantizers import forget_quantization_config, use_file_weights

__all__ = ["check_component_options", "find_component_files", "find_denoiser", "keep_file_weights", "load_component"]

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


def check_component_options(options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise `ModelError` if an option names a component, but its value is neither a model nor a file of weights."""
    for name, value in options.items():
        if isinstance(value, str | Path) and isinstance(config.get(name), list) and not str(value).endswith(WEIGHTS):
            raise ModelError(
                f"{name}={str(value)!r} is not a file of weights: its suffix is not one of {', '.join(WEIGHTS)}",
                hint=f"pass such a file, or load the component with its class {config[name][1]} and pass the object",
            )


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
    if not isinstance(entry, list) or not _is_model(entry):
        models = [key for key, value in config.items() if isinstance(value, list) and _is_model(value)]
        raise ModelError(
            f"{name}={str(file)!r}: the pipeline has no model of this name", hint=f"use one of {', '.join(models)}"
        )
    check_weight_file(file, pickles=options.get("use_safetensors") is False)
    dtype = options.get(_DTYPE)
    dtype = dtype.get(name, dtype.get("default")) if isinstance(dtype, dict) else dtype
    if entry[0] == "transformers":
        return load_text_encoder(entry[1], name, file, model, dtype)
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
        try:
            loaded = kind.from_single_file(str(file), **arguments, **quantization)
        except (LookupError, AttributeError) as error:  # from functions that convert the names of another model
            raise ModelFileError(
                f"{file} does not contain the weights of {entry[1]}: {first_line(error)}",
                hint=f"pass a file with the weights of the component {name}",
            ) from error
    _finish(loaded)
    _check_complete(loaded, str(file))
    return loaded


def _is_model(entry: list[Any]) -> bool:
    """Return whether an entry of a pipeline's config, [library, class], is a model, rather than a tokenizer."""
    if entry[0] not in ("diffusers", "transformers"):
        return False
    kind = getattr(importlib.import_module(entry[0]), str(entry[1]), None)
    return isinstance(kind, type) and issubclass(kind, torch.nn.Module)


@contextmanager
def keep_file_weights(
    model: Any, config: Mapping[str, Any], options: dict[str, Any]
) -> Iterator[tuple[Callable[[Any], None], frozenset[str]]]:
    """Keep 8-bit weights and scales of a folder or file in their format while diffusers loads it.

    Yield a function to call with the loaded pipeline, and the components with such weights. `options` of diffusers are
    changed.
    """
    path = Path(str(model)).expanduser()
    variant = options.get("variant")
    found = _find_8bit_components(path, config, variant) if path.is_dir() else {}
    dtype = options.get(_DTYPE)
    with (
        _reading_files(dtype, path, options.get("quantization_config")) as quantization,
        calling_after_each_component(keep_encoder_weights),
    ):
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
                if isinstance(getattr(component, "hf_quantizer", None), FileQuantizer):
                    _finish(component)
                    _check_complete(component, f"{model}: {name}")

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
    elif requested is None and not is_float8 and (path.is_dir() or has_8bit_weights([path])):
        quantization["quantization_config"] = FileWeightsConfig()

    def convert(tensors: Any, file: Any) -> Any:
        source = Path(str(file))
        # The config next to a file that is loaded on its own is that of another model.
        if source != path and has_quantization_config(source.parent):
            return tensors
        marked = mark_tensors(tensors, source)
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


def _find_8bit_components(folder: Path, config: Mapping[str, Any], variant: str | None) -> dict[str, str]:
    """Return the components of a local pipeline that have 8-bit weights, with the library of each."""
    return {
        name: entry[0]
        for name, entry in config.items()
        if isinstance(entry, list)
        and (folder / name).is_dir()
        and not has_quantization_config(folder / name)
        and has_8bit_weights(find_weight_files(folder / name, variant))
    }


def _finish(model: Any) -> None:
    if isinstance(getattr(model, "hf_quantizer", None), FileQuantizer):
        set_replaced_quantizer(model)
        forget_quantization_config(model)


def _check_complete(model: Any, source: str) -> None:
    """Raise `ModelFileError` if files have no values for some weights of a model."""
    lacking = [key for key, value in model.state_dict(keep_vars=True).items() if value.is_meta]
    if lacking:
        raise make_incomplete_error(source, type(model).__name__, lacking)
