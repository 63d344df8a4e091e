"""What reaches a device before torch dispatches, answered in Python: each is one function of torch's or a library's."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.tensor import VirtualTensor
from anyaccel.emulator.torch_patches import apply_patch, replace_by
from anyaccel.upstream.torch_internals import (
    FakeTensor,
    find_default_device,
    list_computed_weights,
    read_parameter_table,
    refresh_factories,
    tree_map_only,
)

__all__ = ["install_device_patches"]


def install_device_patches(accelerator: VirtualAccelerator) -> None:
    """Apply the emulator's patches; they leave other devices alone."""
    refresh_factories()  # before some of them are replaced here
    for name in ("tensor", "as_tensor", "asarray", "kaiser_window"):
        apply_patch(f"torch.{name}", lambda build: _build_on_host(build, accelerator), "emulator")
    apply_patch("torch.random.manual_seed", lambda seed: _seed_too(seed, accelerator), "emulator")
    apply_patch("torch.Tensor.__new__", _build_from_device_numbers, "emulator")
    apply_patch("torch.nn.Module._apply", _move_modules, "emulator")
    apply_patch("torch.Tensor.data", _replace_data, "emulator")
    apply_patch("torch.load", lambda load: _load_to_device(load, accelerator), "emulator")
    apply_patch("safetensors.safe_open", lambda safe_open: _load_safetensors(safe_open, accelerator), "emulator")
    for name, answer in _answer_for_accelerator(accelerator).items():
        apply_patch(f"torch.accelerator.{name}", replace_by(answer), "emulator")
    pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    apply_patch("torch.Tensor.pin_memory", lambda plain: _pin_memory(pinned), "emulator")
    apply_patch("torch.Tensor.is_pinned", lambda plain: _is_pinned(pinned), "emulator")


def _is_ours(device: Any, accelerator: VirtualAccelerator) -> bool:
    return isinstance(device, str | torch.device) and is_on(device, accelerator.name)


def _build_on_host(build: Callable[..., torch.Tensor], accelerator: VirtualAccelerator) -> Callable[..., torch.Tensor]:
    """`torch.tensor([1], device=…)` writes the data before it dispatches: build it here and move it."""

    @functools.wraps(build)
    def build_and_move(*args: Any, **kwargs: Any) -> torch.Tensor:
        data = args[0] if args else kwargs.get("data")
        device = kwargs.get("device")
        if isinstance(data, VirtualTensor):
            copied = data if build.__name__ != "tensor" else data.detach().clone()
            return copied.to(device=device or data.device, dtype=kwargs.get("dtype") or data.dtype)
        if args and isinstance(data, list | tuple):
            args = (_read_numbers(data), *args[1:])
        if device is None:
            device = find_default_device()
        if not _is_ours(device, accelerator):
            return build(*args, **kwargs)
        wants_gradient = kwargs.pop("requires_grad", False)
        kwargs["device"] = torch.device("cpu")
        host = build(*args, **kwargs)
        if isinstance(host, FakeTensor):  # while a graph is traced its values do not matter
            return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        moved = host.to(device)
        return moved.requires_grad_() if wants_gradient else moved

    return build_and_move


def _read_numbers(data: Any) -> Any:
    """A list with single numbers of the device in it: each is read by the host, as on hardware."""
    if isinstance(data, VirtualTensor):
        return data.item() if data.numel() == 1 else data.tolist()
    return [_read_numbers(item) for item in data] if isinstance(data, list | tuple) else data


def _build_from_device_numbers(build: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.Tensor([x, y])` with numbers of the device in the list: each is read by the host, as on hardware."""

    def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kind is torch.Tensor and args and isinstance(args[0], list | tuple):
            args = (_read_numbers(args[0]), *args[1:])
        return build(kind, *args, **kwargs)

    return new


def _move_modules(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Let modules come and go: a parameter keeps its identity, so that tied weights stay tied.

    torch would put the data of a host tensor into the wrapper of a device's, where it takes the two for alike; they
    are swapped instead. A weight that `weight_norm` computed holds its sources in a graph, and lets go of them first.
    """

    @functools.wraps(apply)
    def apply_to_all(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        _drop_computed_weights(self)
        before = torch.__future__.get_swap_module_params_on_conversion()
        ours = any(isinstance(parameter, VirtualTensor) for parameter in read_parameter_table(self).values())
        torch.__future__.set_swap_module_params_on_conversion(before or ours)
        try:
            return apply(self, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply_to_all


def _drop_computed_weights(module: torch.nn.Module) -> None:
    for name in list_computed_weights(module):
        computed = getattr(module, name, None)
        if isinstance(computed, torch.Tensor):
            setattr(module, name, computed.detach())


def _seed_too(seed_host: Callable[[Any], Any], accelerator: VirtualAccelerator) -> Callable[[Any], Any]:
    """`torch.manual_seed` seeds the host and every device; of some it learns from the vendor's package alone."""

    @functools.wraps(seed_host)
    def seed_all(seed: Any) -> Any:
        for generator in accelerator.generators:
            generator.manual_seed(int(seed))
        return seed_host(seed)

    return seed_all


def _replace_data(plain: Any) -> property:
    """`parameter.data = …` gives a virtual tensor other data inside, and takes a tensor of the host to the device."""

    def write(self: torch.Tensor, value: torch.Tensor) -> None:
        here, there = isinstance(self, VirtualTensor), isinstance(value, VirtualTensor)
        if isinstance(self, VirtualTensor) and isinstance(value, VirtualTensor):
            plain.__set__(self, value)
            self._inner = value._inner.detach()
        elif here or there:
            fresh = value.detach()
            if isinstance(self, torch.nn.Parameter):
                fresh = torch.nn.Parameter(fresh, self.requires_grad)
            torch.utils.swap_tensors(self, fresh)
        else:
            plain.__set__(self, value)

    return property(plain.__get__, write)


def _pin_memory(pinned: weakref.WeakSet[torch.UntypedStorage]) -> Callable[..., torch.Tensor]:
    """`tensor.pin_memory()`: torch's own requires a driver that is not there."""

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if has_torch_function_unary(self):
            result: torch.Tensor = handle_torch_function(pin_memory, (self,), self, device=device)
            return result
        if not is_host(self.device):
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        if self.untyped_storage() in pinned:
            return self
        copied = self.detach().clone()
        pinned.add(copied.untyped_storage())
        return copied

    return pin_memory


def _is_pinned(pinned: weakref.WeakSet[torch.UntypedStorage]) -> Callable[..., bool]:
    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return is_host(self.device) and self.untyped_storage() in pinned

    return is_pinned


def _load_to_device(original: Callable[..., Any], accelerator: VirtualAccelerator) -> Callable[..., Any]:
    """`torch.load(…, map_location=device)`: there is no storage on such a device, so read to the host and move."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, str | torch.device) or not _is_ours(map_location, accelerator):
            return original(f, map_location, *args, **kwargs)
        moved: dict[int, Any] = {}

        def move(value: Any) -> Any:
            if id(value) not in moved:
                there = value.to(map_location)
                moved[id(value)] = (
                    torch.nn.Parameter(there, value.requires_grad) if isinstance(value, torch.nn.Parameter) else there
                )
            return moved[id(value)]

        loaded = original(f, "cpu", *args, **kwargs)
        return tree_map_only((torch.Tensor, torch.nn.Module), move, loaded)

    return load


def _answer_for_accelerator(accelerator: VirtualAccelerator) -> dict[str, Any]:
    """`torch.accelerator` speaks of the virtual device."""
    module = torch.get_device_module(accelerator.name)
    return {
        "current_accelerator": lambda check_available=False: torch.device(accelerator.name),
        "is_available": lambda: True,
        "device_count": lambda: accelerator.count,
        "current_device_index": lambda: accelerator.current_index,
        "set_device_index": module.set_device,
        "device_index": module.device,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": module.current_stream,
        "get_memory_info": module.mem_get_info,
        "memory_allocated": module.memory_allocated,
        "max_memory_allocated": module.max_memory_allocated,
        "memory_reserved": module.memory_reserved,
        "max_memory_reserved": module.max_memory_reserved,
        "memory_stats": module.memory_stats,
        "reset_peak_memory_stats": module.reset_peak_memory_stats,
    }


def _load_safetensors(original: Any, accelerator: VirtualAccelerator) -> type:
    """The library safetensors knows a fixed list of devices: read to the host, then move."""

    class SafeOpen:
        """safetensors.safe_open, which reads to the host where the device is virtual."""

        def __init__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> None:
            self._target = device if _is_ours(device, accelerator) else None
            self._file = original(filename, framework=framework, device="cpu" if self._target else device, **options)

        def __enter__(self) -> SafeOpen:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_tensor(self, name: str) -> Any:
            tensor = self._file.get_tensor(name)
            return tensor.to(self._target) if self._target else tensor

        def get_tensors(self) -> dict[str, Any]:
            return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118 - it is no mapping

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    return SafeOpen
