"""Loading of quantized weights with diffusers: bitsandbytes on machines without a GPU, and weights of single files."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["allow_bitsandbytes_on_cpu", "find_single_file_error", "forget_quantization_config", "use_file_weights"]

# `DiffusersAutoQuantizer` looks quantizers up in this table (quantizers/auto.py).
_METHODS = ("bitsandbytes_4bit", "bitsandbytes_8bit")
_LOCK = threading.RLock()


@contextmanager
def allow_bitsandbytes_on_cpu() -> Iterator[None]:
    """Let diffusers load bitsandbytes weights to the CPU, in this block, if it finds no GPU.

    The quantizers of diffusers then raise `No GPU found. A GPU is needed for quantization.`, although bitsandbytes
    itself supports the CPU (quantizers/bitsandbytes/bnb_quantizer.py).
    """
    from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    with _LOCK:
        before = {name: AUTO_QUANTIZER_MAPPING[name] for name in _METHODS if name in AUTO_QUANTIZER_MAPPING}
        AUTO_QUANTIZER_MAPPING.update({name: _make_cpu_quantizer(quantizer) for name, quantizer in before.items()})
        try:
            yield
        finally:
            AUTO_QUANTIZER_MAPPING.update(before)


def _make_cpu_quantizer(quantizer: Any) -> Any:
    class CpuQuantizer(quantizer):  # type: ignore[misc]
        has_gpu = True

        def validate_environment(self, *args: Any, **kwargs: Any) -> None:
            if not self.has_gpu:
                return  # the second check rejects models on the CPU
            try:
                super().validate_environment(*args, **kwargs)
            except RuntimeError:
                self.has_gpu = False

        def update_device_map(self, device_map: Any) -> Any:
            if device_map is None and self.has_gpu:
                device_map = super().update_device_map(None)
                # The tensors of a virtual device have a class of their own, which bitsandbytes does not accept.
                self.has_gpu = type(torch.empty(0, device=device_map[""])) is torch.Tensor
            return device_map if self.has_gpu else {"": "cpu"}

    CpuQuantizer.__name__ = quantizer.__name__
    return CpuQuantizer


# The modules of diffusers that read weight files with `load_state_dict` (models/model_loading_utils.py).
_READERS = ("models.modeling_utils", "models.model_loading_utils", "loaders.single_file_utils")


@contextmanager
def use_file_weights(convert: Callable[[Any, Any], Any], quantizer: Any, config: Any) -> Iterator[None]:
    """Call `convert` with each state dict that diffusers reads from a file, in this block.

    It takes the state dict and the path, and returns the state dict to load. `quantizer` is the class that loads models
    with a quantization config of the class `config`.
    """
    from diffusers.quantizers import auto

    modules = [importlib.import_module(f"diffusers.{name}") for name in _READERS]
    method = config().quant_method.value
    with _LOCK:
        readers = [module.load_state_dict for module in modules]
        for module, read in zip(modules, readers, strict=True):
            module.load_state_dict = _convert_after(read, convert)  # type: ignore[attr-defined]
        auto.AUTO_QUANTIZER_MAPPING[method] = quantizer
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config
        try:
            yield
        finally:
            for module, read in zip(modules, readers, strict=True):
                module.load_state_dict = read  # type: ignore[attr-defined]
            del auto.AUTO_QUANTIZER_MAPPING[method], auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method]


def _convert_after(read: Callable[..., Any], convert: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def read_and_convert(checkpoint_file: Any, *args: Any, **kwargs: Any) -> Any:
        state_dict = read(checkpoint_file, *args, **kwargs)
        # A dict has been converted before.
        return state_dict if isinstance(checkpoint_file, dict) else convert(state_dict, checkpoint_file)

    return read_and_convert


def forget_quantization_config(model: Any) -> None:
    """Remove the quantization config from the config of a model, which `save_pretrained` would write."""
    config = {name: value for name, value in dict(model.config).items() if "quantization" not in name}
    model._internal_dict = type(model.config)(config)


def find_single_file_error() -> type[Exception]:
    """Return the error of `from_single_file` for a file without the weights of a model, which has no public name."""
    kind: type[Exception] = importlib.import_module("diffusers.loaders.single_file_utils").SingleFileComponentError
    return kind
