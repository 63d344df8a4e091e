"""Tensors on a virtual accelerator: wrappers around CPU tensors that report the virtual device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.upstream.torch_compile_internals import is_tracing
from anyaccel.upstream.torch_internals import disable_torch_function, find_rebuild, make_wrapper_subclass

__all__ = ["VirtualTensor", "activate", "active", "wrap"]

# Set by `activate`. This module cannot import `dispatch`, because dispatch.py imports this module.
_ACTIVE: list[VirtualAccelerator] = []
_DISPATCH: list[Callable[[Any, Any, dict[str, Any]], Any]] = []


def active() -> VirtualAccelerator:
    """Return this process's virtual accelerator."""
    return _ACTIVE[0]


def activate(accelerator: VirtualAccelerator, dispatch: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """Set this process's virtual accelerator and the function that runs operations on its tensors."""
    _ACTIVE[:] = [accelerator]
    _DISPATCH[:] = [dispatch]


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual device: a wrapper subclass around a CPU tensor."""

    _inner: torch.Tensor
    # Methods that access the data before dispatch are overridden below; everything else goes through dispatch.
    __torch_function__ = disable_torch_function

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        """Wrap a CPU tensor and share its storage, so that views still alias each other."""
        # accelerate's offload calls `type(parameter)(data, requires_grad=…)`, without a device.
        if device is None:
            return torch.nn.Parameter(inner, requires_grad)
        # In inference mode, a view of a normal tensor is still a normal tensor with a version counter. Its wrapper
        # must be a normal tensor too.
        needs_normal_tensor = torch.is_inference_mode_enabled() and not inner.is_inference()
        with torch.inference_mode(False) if needs_normal_tensor else nullcontext():
            wrapper: VirtualTensor = make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=device,
                requires_grad=requires_grad,
            )
        wrapper._inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if len(types) > 1 and any(map(_wraps_tensors, types)):
            return NotImplemented  # torch asks the other class next
        return _DISPATCH[0](func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["_inner"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], device: torch.device, outer_size: Any, outer_stride: Any
    ) -> VirtualTensor:
        rebuilt: VirtualTensor = VirtualTensor(inner_tensors["_inner"], device)
        return rebuilt

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError, as on real devices; with `force`, copy the tensor to the CPU and convert it."""
        if force:
            return self.detach().cpu().numpy()
        if torch.overrides.has_torch_function_unary(self):  # a function mode, which gets torch's own method
            return torch.overrides.handle_torch_function(torch.Tensor.numpy, (self,), self)
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        """Return the values as a nested list; this counts as a device-to-CPU read."""
        if torch.overrides.has_torch_function_unary(self):  # a function mode; torch's own method rejects subclasses
            return self.cpu().tolist()
        active().record_host_read("aten::tolist")
        return self._inner.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        active().record_host_read("aten::print")
        text = repr(self._inner.detach())
        return f"{text[:-1]}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        """Return a tensor with the given data, by default with this tensor's dtype and device."""
        defaults: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return torch.tensor(data, **defaults | {name: value for name, value in options.items() if value is not None})

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_convert_list_indices(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_convert_list_indices(key), value)

    def data_ptr(self) -> int:
        """Return the address of the wrapped CPU tensor's data; use it only to compare tensors."""
        return self._inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the wrapped CPU tensor's storage, which is the same for tensors that share memory."""
        if is_tracing():  # a tracer expects the wrapper's own storage, which is empty
            return super().untyped_storage()
        return self._inner.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the CPU data and the device, as torch does for tensors on other devices."""
        values = (self._inner.detach(), self.dtype, str(self.device), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            plain = VirtualTensor(self._inner.detach(), self.device)
            return find_rebuild(is_parameter=True), (plain, self.requires_grad, OrderedDict())
        return find_rebuild(is_parameter=False), values

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy: torch.Tensor = wrap(self._inner.detach().clone(), self.device)
            if isinstance(self, torch.nn.Parameter):  # torch does not copy the gradient of a parameter
                copy = torch.nn.Parameter(copy, self.requires_grad)
            else:
                copy.requires_grad_(self.requires_grad)
                copy.grad = None if self.grad is None else deepcopy(self.grad, memo)
            memo[id(self)] = copy
        return memo[id(self)]


def _convert_list_indices(key: Any) -> Any:
    """Convert list indices to CPU tensors, and tuples inside of a tuple, which torch treats as lists.

    For `x[[0, 2]]`, torch would otherwise create the index tensor on the device before dispatch.
    """
    if isinstance(key, list | range):
        return torch.tensor(list(key)) if len(key) else list(key)
    if isinstance(key, tuple):
        return tuple(_convert_list_indices(list(item) if isinstance(item, tuple) else item) for item in key)
    return key


def wrap(inner: torch.Tensor, device: torch.device) -> VirtualTensor:
    """Wrap a CPU tensor as a tensor on a virtual device, and count its storage as device memory."""
    # A wrapper cannot have the lazy conjugate and negative bits.
    if inner.is_conj() or inner.is_neg():
        inner = inner.resolve_conj().resolve_neg()
    if inner.layout is torch.strided and type(inner) is torch.Tensor:
        active().memory.add(inner, device.index or 0)
    wrapper: VirtualTensor = VirtualTensor(inner, device)
    return wrapper


def _wraps_tensors(kind: type) -> bool:
    """Return whether a tensor subclass of another library may contain virtual tensors, and not the other way round."""
    return not issubclass(kind, VirtualTensor) and kind.__module__.partition(".")[0] != "torch"
