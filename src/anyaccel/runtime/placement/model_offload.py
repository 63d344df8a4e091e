"""Model offloading: a model's weights move to the device when it runs, and back when other models run.

On the CPU, the weights are ordinary tensors, which can be read and changed. diffusers' own model
offloading copies all weights back to the CPU, and replaces `forward`, which discards patches of users.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import ModelHook

from anyaccel.backends.device_type_checks import is_host
from anyaccel.forward_overrides import Override
from anyaccel.runtime.placement.checksums import choose_chunk_size, compute_checksums
from anyaccel.runtime.placement.weight_moves import has_own_move
from anyaccel.upstream.accelerate_internals import find_hook_of_class
from anyaccel.upstream.torch_internals import read_version

__all__ = ["LoadHook", "ModelLoader"]


class ModelLoader:
    """A manager that moves a pipeline's models to the device and back to the CPU.

    `replaces(name, other)` returns whether a model that is loaded replaces another model on the device. While
    gradients are enabled, models that ran with gradients are not replaced.
    """

    def __init__(self, device: torch.device, replaces: Callable[[str, str], bool]) -> None:
        self.device, self.replaces = device, replaces
        self._loaded: dict[str, _LoadedModel] = {}

    def load(self, name: str, model: torch.nn.Module) -> None:
        """Move a model's weights to the device, after releasing the models that it replaces."""
        records = torch.is_grad_enabled()
        for other, loaded in list(self._loaded.items()):
            # A backward pass through several models needs the weights of all of them.
            if self.replaces(name, other) and not (records and loaded.ran_with_gradients):
                self.release(other)
        loaded = self._loaded.setdefault(name, _LoadedModel(model, self.device))
        loaded.ran_with_gradients |= records
        loaded.load()  # also if the model is loaded: the user may have replaced parameters since

    def release(self, name: str) -> None:
        """Move a model's weights back to the CPU; do nothing if it is not loaded."""
        if name in self._loaded:
            self._loaded[name].release()
            del self._loaded[name]  # not before: an interrupted release is repeated

    def release_all(self) -> None:
        """Move the weights of all loaded models back to the CPU."""
        for name in list(self._loaded):
            self.release(name)


class LoadHook(ModelHook):  # type: ignore[misc]
    """An accelerate hook that moves a model's weights to the device when the model runs.

    Autoencoders call `pre_forward` in `encode` and `decode`; in `forward`, an override calls it. It stays
    in use if the user replaces or deletes the model's `forward`.
    """

    def __init__(self, loader: ModelLoader, name: str) -> None:
        self.loader, self.name = loader, name
        self.execution_device = loader.device

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move the model's weights to the device."""
        self.loader.load(self.name, module)
        return args, kwargs

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the model's weights back to the CPU when the hook is removed."""
        self.loader.release(self.name)
        return module

    def make_override(self, model: torch.nn.Module) -> Override:
        """Return a forward override that loads the model."""
        reference = weakref.ref(model)  # the model references the override

        def load_weights(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            module = reference()
            # Another pipeline that has the model may have a hook of its own, and a hook of the user may replace it.
            if module is not None and find_hook_of_class(module, LoadHook) in (self, None):
                self.pre_forward(module)
            return forward(*args, **kwargs)

        return load_weights

    # A copy of the model is not part of the pipeline, so its hook does nothing.
    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return ModelHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelHook, ()


@dataclass
class _MovedTensor:
    """A parameter or buffer on the device, and the CPU tensor that it came from."""

    tensor: torch.Tensor
    host: torch.Tensor
    address: int
    version: int
    sums: list[int]
    """Checksums of the values: changes through `.data` do not increment the version counter."""


class _LoadedModel:
    """A model with weights on the device."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model, self._device = weakref.ref(model), device
        self.ran_with_gradients = False
        self._moved: list[_MovedTensor] = []
        self._chunk_size = choose_chunk_size(sum(tensor.nbytes for tensor in self._list_tensors()))
        self._whole = [module for module in model.modules() if _is_quantized(module) or has_own_move([module])]
        """Layers that move as a whole, because they have data in addition to the `.data` of their weights."""

    def load(self) -> None:
        """Move the parameters and buffers that are on the CPU to the device."""
        # Inference tensors have no version counter: https://github.com/pytorch/pytorch/pull/54403
        with torch.inference_mode(False), torch.no_grad():
            for module in self._whole:
                module.to(self._device)
            tensors = [tensor for tensor in self._list_tensors() if is_host(tensor.device)]
            first = len(self._moved)
            for tensor in tensors:
                host = tensor.data
                moved = host.to(self._device)
                self._moved.append(_MovedTensor(tensor, host, moved.data_ptr(), 0, []))
                _set_data(tensor, moved)
            entries = self._moved[first:]
            for entry, sums in zip(entries, self._compute_sums(entries), strict=True):
                entry.version, entry.sums = read_version(entry.tensor), sums

    def release(self) -> None:
        """Restore the CPU tensors, after copying values that were changed on the device to them."""
        with torch.inference_mode(False), torch.no_grad():
            entries = [entry for entry in self._moved if not is_host(entry.tensor.device)]
            for entry, sums in zip(entries, self._compute_sums(entries), strict=True):
                _restore(entry, sums)
            for module in self._whole:
                module.to("cpu")
            # Tensors that were created on the device, for example parameters that the user replaced.
            for tensor in self._list_tensors():
                if not is_host(tensor.device):
                    _set_data(tensor, tensor.data.to("cpu"))
            self._moved = []

    def _compute_sums(self, entries: list[_MovedTensor]) -> list[list[int]]:
        return compute_checksums([entry.tensor for entry in entries], self._chunk_size)

    def _list_tensors(self) -> Iterator[torch.Tensor]:
        model = self._model()
        if model is not None:
            yield from model.parameters()
            yield from model.buffers()


def _is_quantized(module: torch.nn.Module) -> bool:
    """Return whether a layer's own parameters, or the tensors in them, are of a class that torch does not define."""
    parameters = list(module.parameters(recurse=False))
    kinds = {type(value) for parameter in parameters for value in (parameter, parameter.data)}
    return not {kind.__module__.split(".")[0] for kind in kinds} <= {"torch", __name__.split(".")[0]}


def _restore(entry: _MovedTensor, sums: list[int]) -> None:
    tensor, value = entry.tensor, entry.tensor.data
    if value.data_ptr() != entry.address or (value.shape, value.dtype) != (entry.host.shape, entry.host.dtype):
        _set_data(tensor, value.to("cpu"))  # the user assigned `.data`
        return
    if read_version(tensor) != entry.version or sums != entry.sums:
        entry.host.copy_(value.to("cpu"))
    _set_data(tensor, entry.host)


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Replace a tensor's data, and move its gradient to the same device."""
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None:
        tensor.grad = None  # torch rejects a gradient on another device
    tensor.data = value
    if grad is not None:
        tensor.grad = grad.to(value.device)
