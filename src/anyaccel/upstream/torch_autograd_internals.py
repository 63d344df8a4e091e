"""Private APIs of torch's autograd engine, as of torch 2.13. File paths are relative to its package.

Why the virtual tables of torch's C++ classes are replaced: docs/decisions/0019-gradients-on-virtual-devices.md.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from anyaccel.errors import VirtualDeviceError
from anyaccel.upstream.torch_internals import exclude_dispatch_key

__all__ = [
    "ReportedAccelerator",
    "attention_in_parts",
    "ignore_stream_changes",
    "record_below_wrapper",
    "resume_autograd",
    "skip_autograd",
    "swap_referenced_tensors",
]

# Positions of two methods in the virtual table of `at::AcceleratorHooksInterface`, after its two destructors
# (include/ATen/detail/AcceleratorHooksInterface.h).
_IS_BUILT, _HAS_PRIMARY_CONTEXT = 2, 4
# The same for `c10::impl::DeviceGuardImplInterface` (include/c10/core/impl/DeviceGuardImplInterface.h).
_UNCHECKED_SET_DEVICE, _EXCHANGE_STREAM = 4, 9
# The pointers before the first method: the offset to the top of the object and the type information.
_TABLE_HEADER = 2
# More than the longest of these tables (43 pointers, the hooks of mps), so that the copy is complete.
_TABLE_LENGTH = 64


def skip_autograd() -> AbstractContextManager[Any]:
    """Return a context manager that skips the autograd kernels of operators (_library/autograd.py)."""
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


class _WrapperState(threading.local):
    """Dispatch keys of this thread at each nested call of `record_below_wrapper`."""

    def __init__(self) -> None:
        self.outer: list[tuple[Any, Any]] = []


_wrapper = _WrapperState()


@contextmanager
def record_below_wrapper() -> Iterator[None]:
    """Skip the autograd kernels for a wrapper tensor, so that `resume_autograd` can run them for its parts."""
    _wrapper.outer.append((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))
    try:
        with skip_autograd(), exclude_dispatch_key("ADInplaceOrView"):  # views have autograd kernels of their own
            yield
    finally:
        _wrapper.outer.pop()


def resume_autograd() -> AbstractContextManager[Any]:
    """Return a context manager for `__torch_dispatch__` that runs autograd kernels as before `record_below_wrapper`."""
    # Not `torch.overrides.enable_reentrant_dispatch`: it restores the state inside `record_below_wrapper`.
    return torch._C._ForceDispatchKeyGuard(*_wrapper.outer[-1]) if _wrapper.outer else nullcontext()


def swap_referenced_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
    """Swap two tensors like `torch.utils.swap_tensors`, even if an autograd graph references them.

    The graph keeps the values that it saved. A backward pass that would add to the gradient of one of the tensors
    raises RuntimeError, because the gradient would belong to the other one (utils/__init__.py).
    """
    for tensor in (first, second):
        if tensor.is_leaf and tensor.requires_grad:
            torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_reject_backward)
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)


def _reject_backward(gradients: Any) -> None:
    raise RuntimeError(
        "cannot compute the gradient of a weight that was moved to another device or cast to another dtype after the "
        "forward pass; call backward() first"
    )


# Attention as matrix products and a softmax; it also returns the scores (nn/functional.py).
attention_in_parts: Any = torch.ops.aten._scaled_dot_product_attention_math.default


class ReportedAccelerator:
    """Context manager in which torch's C++ code reports a built-in device type as this process's accelerator.

    It is for the virtual devices with a built-in type: mps, hpu and xpu. The autograd engine asks for the accelerator
    when it reaches a tensor on such a device type. Creating the object raises VirtualDeviceError if this torch has an
    unknown layout or supports the real device.
    """

    def __init__(self, name: str) -> None:
        self._lock, self._depth = threading.Lock(), 0
        try:
            self._tables = self._replace_methods(name)
        except (OSError, AttributeError, ValueError) as error:
            raise _make_error(name, str(error)) from error
        with self:
            reported = torch._C._accelerator_getAccelerator()
        if reported is None or reported.type != name:
            raise _make_error(name, "its hooks for accelerators have another layout")

    def _replace_methods(self, name: str) -> list[tuple[ctypes.c_void_p, int | None, int]]:
        """Return, for each changed object, the pointer to its virtual table and the original and replaced tables."""
        hooks, interface = _find_hooks(name)
        # Without the device, `at::detail::getMPSHooks` returns an object of the interface class itself.
        if hooks.value != interface:
            raise ValueError(f"its hooks for {name} devices are not those of a build without {name} support")
        # A C function that returns 1 and requires no GIL.
        returns_true = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
        tables = [(hooks, {_IS_BUILT: returns_true, _HAS_PRIMARY_CONTEXT: returns_true})]
        built = torch._C._accelerator_getAccelerator()
        if built is not None:  # torch reports an error if two accelerators are built
            is_not_built = (ctypes.c_void_p * _TABLE_LENGTH).from_address(interface)[_IS_BUILT]
            tables.append((_find_hooks(built.type)[0], {_IS_BUILT: is_not_built}))
        return [(pointer, pointer.value, _copy_table(pointer.value or 0, new)) for pointer, new in tables]

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            for pointer, _, replacement in self._tables:
                pointer.value = replacement

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                for pointer, original, _ in self._tables:
                    pointer.value = original


def _find_hooks(name: str) -> tuple[ctypes.c_void_p, int]:
    """Return the pointer to the virtual table of a device type's hooks, and the table of their interface class."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    find = getattr(library, f"_ZN2at6detail11get{name.upper()}HooksEv")
    interface = ctypes.c_void_p.in_dll(library, f"_ZTVN2at{len(name) + 14}{name.upper()}HooksInterfaceE")
    find.restype = ctypes.c_void_p
    methods = ctypes.addressof(interface) + _TABLE_HEADER * ctypes.sizeof(ctypes.c_void_p)
    return ctypes.c_void_p.from_address(find()), methods


def ignore_stream_changes(guard: int) -> None:
    """Make a Python device guard ignore changes of the current stream; `guard` is its address in the registry.

    A virtual device has no streams. When an exception ends a backward pass, the engine restores the stream with the
    exception still set; the guard then calls Python, which fails, and the process aborts (csrc/acc/Module.cpp).
    """
    table_pointer = ctypes.c_void_p.from_address(guard)
    original = table_pointer.value or 0
    does_nothing = (ctypes.c_void_p * _TABLE_LENGTH).from_address(original)[_UNCHECKED_SET_DEVICE]
    table_pointer.value = _copy_table(original, {_EXCHANGE_STREAM: does_nothing})


def _copy_table(address: int, replacements: dict[int, int | None]) -> int:
    """Return the address of a copy of a virtual table in which the methods at some positions are replaced."""
    header_bytes = _TABLE_HEADER * ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * _TABLE_LENGTH)()
    ctypes.memmove(table, address - header_bytes, ctypes.sizeof(table))
    for position, function in replacements.items():
        table[_TABLE_HEADER + position] = function
    # Never freed: C++ destructors run after the interpreter has freed its objects.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
    return ctypes.addressof(table) + header_bytes


def _make_error(name: str, problem: str) -> VirtualDeviceError:
    return VirtualDeviceError(
        f"torch {torch.__version__} cannot compute gradients on a virtual {name} device: {problem}",
        hint="use torch 2.13 for Linux, or a virtual neuron, npu or mlu device",
    )
