"""Patches for torch and safetensors functions that access a device before they reach the dispatcher."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.tensor import VirtualTensor
from anyaccel.emulator.torch_patch_registry import apply_patch, replace_by, replace_class
from anyaccel.upstream.torch_autograd_internals import swap_referenced_tensors
from anyaccel.upstream.torch_internals import (
    FakeTensor,
    find_default_device,
    list_computed_weights,
    read_parameter_table,
    refresh_factories,
    skip_function_modes,
    tree_map_only,
)

__all__ = ["install_device_patches"]


def install_device_patches(accelerator: VirtualAccelerator) -> None:
    """Apply the emulator's patches, which leave calls for other devices unchanged."""
    refresh_factories()  # before the patches: torch caches its factory functions by identity
    for name in ("tensor", "as_tensor", "asarray", "kaiser_window"):
        apply_patch(f"torch.{name}", lambda build: _build_on_cpu(build, accelerator), "emulator")
    apply_patch("torch.random.manual_seed", lambda seed: _seed_all_devices(seed, accelerator), "emulator")
    apply_patch("torch.Tensor.__new__", _build_from_device_scalars, "emulator")
    apply_patch("torch.nn.Module._apply", _swap_parameters, "emulator")
    apply_patch("torch.utils.swap_tensors", _swap_referenced, "emulator")
    apply_patch("torch.Tensor.data", _replace_data, "emulator")
    apply_patch("torch.load", lambda load: _load_to_device(load, accelerator), "emulator")
    apply_patch("safetensors.safe_open", lambda safe_open: _load_safetensors(safe_open, accelerator), "emulator")
    apply_patch("torch.Event", lambda event: _replace_event(event, accelerator), "emulator")
    for name, function in _make_accelerator_functions(accelerator).items():
        apply_patch(f"torch.accelerator.{name}", replace_by(function), "emulator")
    # Pinning is only recorded: CPU memory behaves the same, but programs check is_pinned().
    pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    apply_patch("torch.Tensor.pin_memory", lambda plain: _pin_memory(pinned), "emulator")
    apply_patch("torch.Tensor.is_pinned", lambda plain: _is_pinned(pinned), "emulator")


def _is_virtual(device: Any, accelerator: VirtualAccelerator) -> bool:
    return isinstance(device, str | torch.device) and is_on(device, accelerator.name)


def _replace_event(original: Any, accelerator: VirtualAccelerator) -> Any:
    """Make `torch.Event` return an event of the virtual device, which is also the default device."""

    def build(device: Any = None, **options: Any) -> Any:
        if device is None or _is_virtual(device, accelerator):
            return torch.get_device_module(accelerator.name).Event()
        return original(device, **options)

    return replace_class(original, build)


def _build_on_cpu(build: Callable[..., torch.Tensor], accelerator: VirtualAccelerator) -> Callable[..., torch.Tensor]:
    """Make `torch.tensor` and similar functions build the tensor on the CPU and then move it.

    The original functions write the data before the call is dispatched to the virtual device.
    """

    @functools.wraps(build)
    def build_and_move(*args: Any, **kwargs: Any) -> torch.Tensor:
        data = args[0] if args else kwargs.get("data")
        device = kwargs.get("device")
        if isinstance(data, VirtualTensor):
            # torch.tensor copies its argument; as_tensor and asarray do not.
            copied = data if build.__name__ != "tensor" else data.detach().clone()
            return copied.to(device=device or data.device, dtype=kwargs.get("dtype") or data.dtype)
        if args and isinstance(data, list | tuple):
            args = (_read_scalars(data), *args[1:])
        if device is None:
            device = find_default_device()
        if not _is_virtual(device, accelerator):
            return build(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        kwargs["device"] = torch.device("cpu")
        cpu_tensor = build(*args, **kwargs)
        if isinstance(cpu_tensor, FakeTensor):  # dynamo is tracing: only shapes matter
            return torch.empty_strided(cpu_tensor.shape, cpu_tensor.stride(), dtype=cpu_tensor.dtype, device=device)
        moved = cpu_tensor.to(device)
        # After the move: a moved tensor would not be a leaf.
        return moved.requires_grad_() if requires_grad else moved

    return build_and_move


def _read_scalars(data: Any) -> Any:
    """Replace device tensors in nested lists with their values; each one counts as a device-to-CPU read."""
    if isinstance(data, VirtualTensor):
        return data.item() if data.numel() == 1 else data.tolist()
    return [_read_scalars(item) for item in data] if isinstance(data, list | tuple) else data


def _build_from_device_scalars(build: Callable[..., Any]) -> Callable[..., Any]:
    """Make `torch.Tensor([x, y])` accept scalars on the device; each counts as a device-to-CPU read."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor and args and isinstance(args[0], list | tuple):
            args = (_read_scalars(args[0]), *args[1:])
        return build(cls, *args, **kwargs)

    return new


def _swap_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Make `nn.Module._apply` swap parameters when a module moves to or from the virtual device.

    Swapping keeps the parameter objects, so tied weights stay tied. By default, torch assigns `.data`,
    which would put CPU data into a virtual tensor.
    """

    @functools.wraps(apply)
    def apply_to_all(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        _detach_computed_weights(self)  # swap_tensors rejects parameters that an autograd graph references
        before = torch.__future__.get_swap_module_params_on_conversion()
        # torch swaps by itself if the result is a wrapper tensor; the flag is for moves from the device to the CPU.
        on_device = any(isinstance(parameter, VirtualTensor) for parameter in read_parameter_table(self).values())
        torch.__future__.set_swap_module_params_on_conversion(before or on_device)
        try:
            return apply(self, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply_to_all


def _swap_referenced(swap: Callable[..., None]) -> Callable[..., None]:
    """Make `torch.utils.swap_tensors` accept virtual tensors that an autograd graph or a weak reference refers to.

    On real devices, a module can be moved while a graph or a weak reference refers to its parameters.
    """

    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        try:
            swap(t1, t2)
        except RuntimeError as error:
            # Raised before any change to the tensors. torch asks for the gradient edge of a referenced tensor, which
            # fails for a tensor that does not require a gradient.
            is_referenced = any(cause in str(error) for cause in ("use_count", "gradient edge", "weakref"))
            if not is_referenced or not (isinstance(t1, VirtualTensor) or isinstance(t2, VirtualTensor)):
                raise
            swap_referenced_tensors(t1, t2)

    return swap_tensors


def _detach_computed_weights(module: torch.nn.Module) -> None:
    """Detach weights computed by `weight_norm` and `spectral_norm`, so that parameters can be swapped."""
    for name in list_computed_weights(module):
        computed = getattr(module, name, None)
        if isinstance(computed, torch.Tensor):
            setattr(module, name, computed.detach())


def _seed_all_devices(seed_cpu: Callable[[Any], Any], accelerator: VirtualAccelerator) -> Callable[[Any], Any]:
    """Make `torch.manual_seed` also seed the virtual devices.

    Torch itself seeds only devices that it was built for or that a vendor package registered.
    """

    @functools.wraps(seed_cpu)
    def seed_all(seed: Any) -> Any:
        for generator in accelerator.generators:
            generator.manual_seed(int(seed))
        return seed_cpu(seed)

    return seed_all


def _replace_data(plain: Any) -> property:
    """Make `tensor.data = value` work if one or both tensors are on the virtual device.

    If both are, the inner CPU tensor is replaced. If only one is, the two tensors are swapped.
    """

    def write(self: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(self, VirtualTensor) and isinstance(value, VirtualTensor):
            # The setter changes only the wrapper; the data is in the inner tensor.
            plain.__set__(self, value)
            self._inner = value._inner.detach()
        elif isinstance(self, VirtualTensor) or isinstance(value, VirtualTensor):
            # A function mode may keep weak references to results, and torch cannot swap tensors with weak references.
            with skip_function_modes():
                replacement = value.detach()
                if isinstance(self, torch.nn.Parameter):
                    replacement = torch.nn.Parameter(replacement, self.requires_grad)
            torch.utils.swap_tensors(self, replacement)
            vars(self).update({name: value for name, value in vars(replacement).items() if name != "_inner"})
        else:
            plain.__set__(self, value)

    return property(plain.__get__, write)


def _pin_memory(pinned: weakref.WeakSet[torch.UntypedStorage]) -> Callable[..., torch.Tensor]:
    """Return a `Tensor.pin_memory` that copies the tensor and records its storage as pinned.

    The original method requires a device driver.
    """

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        # A Python function must call the active function modes itself; torch's C++ method does it implicitly.
        if has_torch_function_unary(self):
            result: torch.Tensor = handle_torch_function(pin_memory, (self,), self, device=device)
            return result
        if not is_host(self.device):
            # The text of torch's own error.
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
    """Make `torch.load` load to the CPU and then move the tensors if `map_location` is virtual.

    Virtual devices have no storages of their own.
    """

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(map_location, str | torch.device) or not _is_virtual(map_location, accelerator):
            return original(f, map_location, *args, **kwargs)
        moved: dict[int, Any] = {}  # by identity: tensors that occur twice in the file stay shared

        def move(value: Any) -> Any:
            if id(value) not in moved:
                result = value.to(map_location)
                moved[id(value)] = (
                    torch.nn.Parameter(result, value.requires_grad) if isinstance(value, torch.nn.Parameter) else result
                )
            return moved[id(value)]

        loaded = original(f, "cpu", *args, **kwargs)
        return tree_map_only((torch.Tensor, torch.nn.Module), move, loaded)

    return load


def _make_accelerator_functions(accelerator: VirtualAccelerator) -> dict[str, Any]:
    """Return replacements for the `torch.accelerator` functions, keyed by name, for the virtual device."""
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
        # Not `module.current_stream` itself: Dynamo has a table with both functions and rejects duplicates.
        "current_stream": lambda device=None: module.current_stream(device),
        "get_memory_info": module.mem_get_info,
        "memory_allocated": module.memory_allocated,
        "max_memory_allocated": module.max_memory_allocated,
        "memory_reserved": module.memory_reserved,
        "max_memory_reserved": module.max_memory_reserved,
        "memory_stats": module.memory_stats,
        "reset_peak_memory_stats": module.reset_peak_memory_stats,
    }


def _load_safetensors(original: Any, accelerator: VirtualAccelerator) -> type:
    """Return a `safe_open` class that loads tensors to the CPU and then moves them to the virtual device.

    The original class accepts only devices that safetensors knows.
    """

    class SafeOpen:
        """`safetensors.safe_open` with support for the virtual device."""

        def __init__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> None:
            self._target = device if _is_virtual(device, accelerator) else None
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
            return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118 - not a mapping

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    return SafeOpen
