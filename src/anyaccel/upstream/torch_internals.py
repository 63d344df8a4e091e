"""Private APIs of torch, as of torch 2.13. File paths are relative to its package."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack as read_function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only, tree_unflatten

from anyaccel.errors import VirtualDeviceError

__all__ = [
    "CONVOLUTION_FORWARD",
    "FORWARD_HOOK_TABLES",
    "HAS_COMPATIBLE_TYPE",
    "MODULE_HOOKS",
    "WEIGHT_TABLES",
    "DeviceContext",
    "FakeTensor",
    "PlainGenerator",
    "TorchDispatchMode",
    "TreeSpec",
    "allow_half_precision_attention",
    "assume_all_nonzero",
    "can_decompose",
    "claim_private_use",
    "count_dispatch_modes",
    "count_function_modes",
    "disable_torch_function",
    "exclude_dispatch_key",
    "find_default_device",
    "find_guard_table",
    "find_property",
    "find_rebuild",
    "find_replaced_function",
    "has_fallback",
    "int_mm",
    "is_autocast_enabled",
    "is_decomposed",
    "is_own_function",
    "is_storage_shared",
    "is_transformed",
    "list_computed_weights",
    "make_guard",
    "make_wrapper_subclass",
    "pad_sequence",
    "pop_function_mode",
    "push_function_mode",
    "read_address",
    "read_child_table",
    "read_device_type",
    "read_dispatch_modes",
    "read_function_modes",
    "read_global_hooks",
    "read_hook_tables",
    "read_parameter_table",
    "read_private_use_name",
    "read_schema",
    "read_timeout",
    "read_version",
    "refresh_factories",
    "register_device_module",
    "scaled_mm",
    "skip_function_modes",
    "skip_subclass_functions",
    "supports_flex_attention",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unwrap_no_grad",
]

# Re-exported classes and functions without a public name:
#   FakeTensor (_subclasses/fake_tensor.py): the tensors that Dynamo and torch.export trace with;
#   TorchDispatchMode (utils/_python_dispatch.py): documented, but only under this private path;
#   tree_* (utils/_pytree.py): nested arguments; torch.utils.pytree does not exist in torch 2.6;
#   read_function_modes, pop_function_mode, push_function_mode (overrides.py): this thread's stack of function modes;
#   DeviceContext (utils/_device.py): the mode behind `with torch.device(…)` and `set_default_device`.

# Attributes of a module that contain its forward hooks (nn/modules/module.py).
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# Tables with the hooks themselves; the other tables contain one flag per hook.
FORWARD_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
# Attributes of a module that contain its own weights (nn/modules/module.py).
WEIGHT_TABLES = ("_parameters", "_buffers")
# `Module.to` calls it with each weight and its copy on the device (nn/modules/module.py, `_apply`).
HAS_COMPATIBLE_TYPE = torch._has_compatible_shallow_copy_type
# Method in which a convolution calls `torch.nn.functional` (nn/modules/conv.py).
CONVOLUTION_FORWARD = "_conv_forward"
_COMPUTING_HOOKS = ("WeightNorm", "SpectralNorm")
# Mangled symbol of `c10::impl::device_guard_impl_registry`.
_GUARD_TABLE = "_ZN3c104impl26device_guard_impl_registryE"


def scaled_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiply scaled float8 matrices with `torch._scaled_mm`, which has no public equivalent."""
    return torch._scaled_mm(*args, **kwargs)


def int_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply int8 matrices with `torch._int_mm`, which has no public equivalent."""
    return torch._int_mm(left, right)


# Function that a function mode receives for `torch.nn.utils.rnn.pad_sequence`.
pad_sequence: Callable[..., torch.Tensor] = torch._C._nn.pad_sequence


def is_own_function(value: Any) -> bool:
    """Return whether a value is a Python function that torch defines."""
    # By its globals: `functools.wraps` copies `__module__`.
    return isinstance(value, FunctionType) and _is_own_module(value.__globals__)


def _is_own_module(variables: dict[str, Any]) -> bool:
    return f"{variables.get('__name__', '')}.".startswith(f"{torch.__name__}.")


def find_replaced_function(replacement: Any) -> Any:
    """Return the function of torch that has called a function mode, if `replacement` was assigned to its name.

    Otherwise, return `replacement`. Only a function mode can call this function (`handle_torch_function` in
    overrides.py).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.overrides.handle_torch_function.__code__:
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    if caller is None or not _is_own_module(caller.f_globals) or caller.f_code.co_freevars:
        return replacement
    code, values = caller.f_code, caller.f_locals
    names = (caller.f_globals.get(code.co_name), getattr(torch.Tensor, code.co_name, None))
    if not any(value is replacement for value in names):
        return replacement
    # The frame does not refer to its function. A function with the same code and this call's arguments as its default
    # values returns the same.
    positional, keywords = code.co_argcount, code.co_kwonlyargcount
    defaults = tuple(values[name] for name in code.co_varnames[:positional])
    function = FunctionType(code, caller.f_globals, code.co_name, defaults)
    function.__kwdefaults__ = {name: values[name] for name in code.co_varnames[positional : positional + keywords]}
    return function


def allow_half_precision_attention() -> None:
    """Allow the math backend of scaled dot-product attention to accumulate in half precision."""
    # The public function is in the CUDA part of `torch.backends`, although it applies to every device. Some supported
    # versions of torch do not have it.
    if hasattr(torch._C, "_set_math_sdp_allow_fp16_bf16_reduction"):
        torch._C._set_math_sdp_allow_fp16_bf16_reduction(True)


def find_property(name: str) -> Any:
    """Return the getter of a tensor property, in the form that a `TorchFunctionMode` receives.

    See `torch._C.TensorBase` and _tensor.py.
    """
    descriptor = getattr(torch._C.TensorBase, name, None) or vars(torch.Tensor).get(name)
    return getattr(descriptor, "__get__", None)


def find_default_device() -> torch.device | None:
    """Return the device set by `with torch.device(…)` or `set_default_device`, or None (__init__.py)."""
    # Not `torch.get_default_device()`: it creates a tensor, which would run our own modes and patches.
    for mode in reversed(read_function_modes()):
        if isinstance(mode, DeviceContext):
            return mode.device
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def refresh_factories() -> None:
    """Rebuild torch's cached set of functions that accept a `device` argument (utils/_device.py)."""
    # transformers replaces `torch.linspace` while it loads a model, and the set may contain that replacement.
    _device_constructors.cache_clear()
    _device_constructors()


# Tensors, modules and operations.


def read_version(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter; raise for inference tensors (_C/__init__.pyi)."""
    return tensor._version


def is_storage_shared(tensor: torch.Tensor) -> bool:
    """Return whether other tensors, or arrays of NumPy, use the same memory (csrc/StorageMethods.cpp)."""
    # The tensor itself, and the Python object of the storage, which this function creates.
    own = 2
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > own


def read_address(owner: Any) -> int:
    """Return the address of the C++ object behind a storage or generator (`_cdata`, storage.py).

    Several Python objects can share one C++ object.
    """
    return int(owner._cdata)


def read_parameter_table(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dict of a module's own parameters (nn/modules/module.py).

    Writing to the dict bypasses parameter registration.
    """
    return module._parameters


def read_child_table(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dict of a module's child modules (nn/modules/module.py)."""
    return module._modules


def read_hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a module's dicts of forward hooks and forward pre-hooks (nn/modules/module.py).

    torch modifies these dicts in place.
    """
    return module._forward_hooks, module._forward_pre_hooks


def list_computed_weights(module: torch.nn.Module) -> list[str]:
    """Return the names of weights that `weight_norm` or `spectral_norm` recomputes in each forward pass.

    A `WeightNorm` or `SpectralNorm` hook sets these attributes (nn/utils/weight_norm.py,
    nn/utils/spectral_norm.py).
    """
    hooks: list[Any] = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ in _COMPUTING_HOOKS]
    return [hook.name for hook in hooks]


def read_schema(func: Any) -> Any:
    """Return an operator's schema (_ops.py, `OpOverload`)."""
    return func._schema


def assume_all_nonzero() -> AbstractContextManager[None]:
    """Let boolean indexing on `meta` select every element inside the `with` block; otherwise it raises."""
    # torch/fx/experimental/_config.py
    from torch.fx.experimental import _config

    config: Any = _config  # `patch` is added to the module when it is imported
    context: AbstractContextManager[None] = config.patch(meta_nonzero_assume_all_nonzero=True)
    return context


def can_decompose(func: Any) -> bool:
    """Return whether an operator can be decomposed with `decompose` (_ops.py, `_can_decompose`)."""
    return bool(func._can_decompose())


# Creates a tensor subclass that has a shape and a device but no storage (csrc/autograd/python_variable.cpp).
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


def read_timeout(options: Any) -> Any:
    """Return the timeout from a distributed backend's options (distributed/distributed_c10d.py)."""
    return options._timeout


# For the emulator: device names, dispatch keys and pickling.

# The original `torch.Generator`, even while the emulator replaces that name (csrc/Generator.cpp).
PlainGenerator = torch._C.Generator
# `__torch_function__` for a subclass that only implements `__torch_dispatch__` (documented under this name).
disable_torch_function: Any = torch._C._disabled_torch_function_impl
# Context manager in which `__torch_function__` of tensor subclasses does not run (documented under this name).
skip_subclass_functions: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
# The same, in which function modes do not run either (documented in torch/overrides.py).
skip_function_modes: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction


def find_rebuild(is_parameter: bool) -> Callable[..., Any]:
    """Return the function that torch uses to unpickle a parameter or a tensor (_utils.py).

    For tensors, it is the function that copies a CPU tensor to the original device.
    """
    utils: Any = torch._utils
    name = "_rebuild_parameter" if is_parameter else "_rebuild_device_tensor_from_cpu_tensor"
    rebuild: Callable[..., Any] = getattr(utils, name)
    return rebuild


def is_transformed() -> bool:
    """Return whether `torch.jit.trace` or a functorch transform such as `vmap` is active in this thread."""
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


def is_autocast_enabled() -> bool:
    """Return whether autocast is enabled for any device type (amp/autocast_mode.py)."""
    return torch._C._is_any_autocast_enabled()


def count_dispatch_modes() -> int:
    """Return the number of active `TorchDispatchMode`s in this thread (utils/_python_dispatch.py)."""
    return torch._C._len_torch_dispatch_stack()


def read_dispatch_modes() -> list[Any]:
    """Return the active `TorchDispatchMode`s of this thread (utils/_python_dispatch.py)."""
    return [torch._C._get_dispatch_stack_at(index) for index in range(count_dispatch_modes())]


def count_function_modes() -> int:
    """Return the number of active `TorchFunctionMode`s in this thread (overrides.py)."""
    return torch._C._len_torch_function_stack()


def read_global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dicts of global forward hooks and forward pre-hooks (nn/modules/module.py).

    torch modifies these dicts in place.
    """
    from torch.nn.modules import module

    return module._global_forward_hooks, module._global_forward_pre_hooks


def read_private_use_name() -> str:
    """Return the name of the `PrivateUse1` backend, or "privateuseone" if it has not been renamed."""
    return str(torch._C._get_privateuse1_backend_name())


def claim_private_use(name: str, module: Any) -> None:
    """Rename the `PrivateUse1` backend and register its Python module (utils/backend_registration.py)."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename=name, backend_module=module)


def register_device_module(name: str, module: Any) -> None:
    """Register a device module as `torch.NAME` (`torch._register_device_module`)."""
    torch._register_device_module(name, module)


def read_device_type(name: str) -> Any:
    """Return the torch `DeviceType` with this name, or None if there is none (csrc/autograd/init.cpp)."""
    device_types: Any = torch._C._autograd.DeviceType
    return getattr(device_types, name, None)


def make_guard(device_type: Any) -> Any:
    """Register and return a Python device guard for `PrivateUse1` (csrc/acc/Module.cpp)."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return device_type

    guard = Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    return guard


def find_guard_table(length: int) -> Any:
    """Return libc10's device guard registry, an array indexed by device type (c10/core/impl).

    Raises `VirtualDeviceError` if libc10 does not export the registry.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return (ctypes.c_void_p * length).in_dll(ctypes.CDLL(str(library)), _GUARD_TABLE)
    except (OSError, ValueError) as error:
        raise VirtualDeviceError(
            f"torch {torch.__version__} does not export its device guard registry: {error}",
            hint="virtual mps, hpu and xpu devices require torch for Linux; virtual neuron, npu and mlu devices work "
            "everywhere",
        ) from error


def is_decomposed(func: Any) -> bool:
    """Return whether torch decomposes an operator before dispatching it to a device.

    This is the case for operators with a `CompositeImplicitAutograd` kernel.
    """
    name = func.name()
    # TorchScript has overloads that the dispatcher does not know, and looking up their kernels raises.
    return name in _list_operations() and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    )


@functools.cache
def _list_operations() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def has_fallback(key: str) -> bool:
    """Return whether a fallback is registered for a dispatch key (csrc/utils/python_dispatch.cpp)."""
    return bool(torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key)))


def exclude_dispatch_key(key: str) -> AbstractContextManager[Any]:
    """Return a context manager that excludes a dispatch key (csrc/utils/python_dispatch.cpp)."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    )
    return guard


def unwrap_no_grad(function: Any) -> Any:
    """Return the function that `@torch.no_grad()` has wrapped, or the function itself (utils/_contextlib.py)."""
    while getattr(function, "__globals__", {}).get("__name__") == "torch.utils._contextlib":
        function = function.__wrapped__
    return function


def supports_flex_attention(query: torch.Tensor) -> bool:
    """Return whether torch accepts flex attention on the device of a tensor (nn/attention/flex_attention.py)."""
    from torch.nn.attention import flex_attention

    try:
        flex_attention._validate_device(query, query, query)
    except (NotImplementedError, ValueError):
        return False
    return True
