"""Private APIs of torch's autograd engine, as of torch 2.13. File paths are relative to its package."""

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
    "attention_in_parts",
    "record_below_wrapper",
    "report_as_accelerator",
    "resume_autograd",
    "skip_autograd",
]

# Positions of two methods in the virtual table of `at::AcceleratorHooksInterface`, after its two destructors
# (include/ATen/detail/AcceleratorHooksInterface.h).
_IS_BUILT, _HAS_PRIMARY_CONTEXT = 2, 4
# The pointers before the first method: the offset to the top of the object and the type information.
_TABLE_HEADER = 2
# More than the longest of these tables has (43, that of mps), so that the copy is complete.
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


# Attention as matrix products and a softmax; it also returns the scores (nn/functional.py).
attention_in_parts: Any = torch.ops.aten._scaled_dot_product_attention_math.default


def report_as_accelerator(name: str) -> None:
    """Make torch's C++ code return the built-in device type `name` as this process's accelerator.

    The autograd engine requires one for tensors on these device types. Raises VirtualDeviceError if this torch
    has an unknown layout, or supports the real device.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        find_hooks = getattr(library, f"_ZN2at6detail11get{name.upper()}HooksEv")
        # Without the device, `at::detail::getMPSHooks` returns an object of the interface class itself.
        interface = ctypes.c_void_p.in_dll(library, f"_ZTVN2at17{name.upper()}HooksInterfaceE")
    except (OSError, AttributeError, ValueError) as error:
        raise _make_error(name, str(error)) from error
    find_hooks.restype = ctypes.c_void_p
    table_pointer = ctypes.c_void_p.from_address(find_hooks())
    original = table_pointer.value
    if original is None or original != ctypes.addressof(interface) + _TABLE_HEADER * ctypes.sizeof(ctypes.c_void_p):
        raise _make_error(name, f"its hooks for {name} devices are not those of a build without {name} support")
    table_pointer.value = _copy_table(original)
    if str(torch._C._accelerator_getAccelerator()) != name:
        table_pointer.value = original
        raise _make_error(name, "its hooks for accelerators have another layout")


def _copy_table(address: int) -> int:
    """Return the address of a copy of a virtual table in which `isBuilt` and `hasPrimaryContext` return true."""
    header_bytes = _TABLE_HEADER * ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * _TABLE_LENGTH)()
    ctypes.memmove(table, address - header_bytes, ctypes.sizeof(table))
    # A C function that returns 1 and requires no GIL: the engine calls these methods from its own threads.
    returns_true = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    for position in (_IS_BUILT, _HAS_PRIMARY_CONTEXT):
        table[_TABLE_HEADER + position] = returns_true
    # Never freed: C++ destructors run after the interpreter has freed its objects.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
    return ctypes.addressof(table) + header_bytes


def _make_error(name: str, problem: str) -> VirtualDeviceError:
    return VirtualDeviceError(
        f"torch {torch.__version__} cannot compute gradients on a virtual {name} device: {problem}",
        hint="use torch 2.13 for Linux, or a virtual neuron, npu or mlu device",
    )
