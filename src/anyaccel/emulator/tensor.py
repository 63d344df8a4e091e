"""Tensors of a virtual accelerator: their data lies in a CPU tensor inside, their device is the virtual one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.upstream.torch_internals import disable_torch_function, find_rebuild, is_tracing, make_wrapper_subclass

__all__ = ["VirtualTensor", "activate", "active", "wrap"]

_ACTIVE: list[VirtualAccelerator] = []
_DISPATCH: list[Callable[[Any, Any, dict[str, Any]], Any]] = []


def active() -> VirtualAccelerator:
    """The virtual accelerator of this process; there is one as soon as there is a tensor of its."""
    return _ACTIVE[0]


def activate(accelerator: VirtualAccelerator, dispatch: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """Set the virtual accelerator of this process, and the function that runs an operation on its tensors."""
    _ACTIVE[:] = [accelerator]
    _DISPATCH[:] = [dispatch]


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual device."""

    _inner: torch.Tensor
    # What a real device's tensor does before dispatch, by type alone, is answered below; the rest needs no seam.
    __torch_function__ = disable_torch_function

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        """Wrap a CPU tensor; its storage is shared, so that views alias.

        Without a device it is somebody who makes a parameter of the class of another one, as accelerate's offload does.
        """
        if device is None:
            return torch.nn.Parameter(inner, requires_grad)
        # A view that is made in inference mode of a tensor from outside is a tensor like that one, and counts versions.
        outlives = torch.is_inference_mode_enabled() and not inner.is_inference()
        with torch.inference_mode(False) if outlives else nullcontext():
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
        """Refused, as on hardware: the data is not where NumPy could read it."""
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        """The values, by way of the host."""
        active().read_on_host("aten::tolist")
        return self._inner.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        active().read_on_host("aten::print")
        shown = repr(self._inner.detach())
        return f"{shown[:-1]}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        """A tensor from data, by default of this one's type and on its device."""
        chosen: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return torch.tensor(data, **chosen | {name: value for name, value in options.items() if value is not None})

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_index_on_host(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_index_on_host(key), value)

    def data_ptr(self) -> int:
        """The address of the data; only good for telling tensors apart."""
        return self._inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage; tensors that share memory share it. A tracer gets the wrapper's own, which is empty."""
        if is_tracing():
            return super().untyped_storage()
        return self._inner.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as torch pickles other devices' tensors: the data on the host, and where it belongs."""
        values = (self._inner.detach(), self.dtype, str(self.device), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            plain = VirtualTensor(self._inner.detach(), self.device)
            return find_rebuild(is_parameter=True), (plain, self.requires_grad, OrderedDict())
        return find_rebuild(is_parameter=False), values

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = wrap(self._inner.detach().clone(), self.device)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = (
                torch.nn.Parameter(copy, self.requires_grad)
                if is_parameter
                else copy.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]


def _index_on_host(key: Any) -> Any:
    """`x[[0, 2]]` makes an index tensor before it dispatches: make it on the host, which every device takes."""
    if isinstance(key, list | range):
        return torch.tensor(list(key)) if len(key) else list(key)
    if isinstance(key, tuple) and any(isinstance(part, list | range) for part in key):
        return tuple(_index_on_host(part) if isinstance(part, list | range) else part for part in key)
    return key


def wrap(inner: torch.Tensor, device: torch.device) -> VirtualTensor:
    """A CPU tensor's data as a tensor of the device, its memory counted.

    A wrapper cannot carry the bits that say "conjugate me later" and "negate me later": it is done now.
    """
    if inner.is_conj() or inner.is_neg():
        inner = inner.resolve_conj().resolve_neg()
    if inner.layout is torch.strided and type(inner) is torch.Tensor:
        active().book.add(inner, device.index or 0)
    wrapper: VirtualTensor = VirtualTensor(inner, device)
    return wrapper
