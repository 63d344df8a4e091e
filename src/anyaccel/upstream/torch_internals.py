"""Private details of torch. Seen in torch 2.13. Paths below are relative to the package."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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
    "CACHE_LOGGER",
    "CONVOLUTION_FORWARD",
    "FORWARD_HOOK_TABLES",
    "GRAPH_BREAK_LOGGER",
    "MODULE_HOOKS",
    "WEIGHT_TABLES",
    "DeviceContext",
    "FakeTensor",
    "PlainGenerator",
    "TorchDispatchMode",
    "TreeSpec",
    "allow_half_precision_attention",
    "can_decompose",
    "claim_private_use",
    "count_dispatch_modes",
    "count_function_modes",
    "disable_torch_function",
    "exclude_dispatch_key",
    "find_compiler",
    "find_default_device",
    "find_guard_table",
    "find_inductor_cache",
    "find_property",
    "find_rebuild",
    "forget_compiled_call",
    "has_fallback",
    "int_mm",
    "is_autocast_enabled",
    "is_compiled",
    "is_compiler_error",
    "is_decomposed",
    "is_recompiling",
    "is_tracing",
    "is_transformed",
    "list_computed_weights",
    "load_dynamo",
    "make_guard",
    "make_wrapper_subclass",
    "pad_sequence",
    "parse_graph_break",
    "pause_collection_after_compile",
    "pop_function_mode",
    "push_function_mode",
    "read_address",
    "read_buffer_table",
    "read_child_table",
    "read_compile_times_s",
    "read_device_kind",
    "read_function_modes",
    "read_global_hooks",
    "read_hook_tables",
    "read_parameter_table",
    "read_private_use_name",
    "read_schema",
    "read_timeout",
    "read_version",
    "refresh_factories",
    "register_compiler",
    "register_device_module",
    "restore_compiled_call",
    "scaled_mm",
    "set_triton_assembler",
    "skip_in_graphs",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unwrap_compiled",
]

# Classes and functions that have no public name:
#   FakeTensor (_subclasses/fake_tensor.py): what a tracer passes in place of a tensor;
#   TorchDispatchMode (utils/_python_dispatch.py): documented under this private path;
#   tree_* (utils/_pytree.py): nested arguments; torch.utils.pytree is newer than torch 2.6;
#   read_function_modes, pop_function_mode, push_function_mode (overrides.py): this thread's stack of function modes;
#   DeviceContext (utils/_device.py): the mode behind `with torch.device(…)` and set_default_device.

MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Where a module holds the hooks around its forward (nn/modules/module.py)."""
FORWARD_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
"""Of these, the tables of the hooks themselves; the others say how a hook is called."""
WEIGHT_TABLES = ("_parameters", "_buffers")
"""Where a module holds its own weights (nn/modules/module.py)."""
CONVOLUTION_FORWARD = "_conv_forward"
"""The method in which a convolution calls `torch.nn.functional` (nn/modules/conv.py)."""
_COMPUTING_HOOKS = ("WeightNorm", "SpectralNorm")
_GUARD_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
"""The symbol of `c10::impl::device_guard_impl_registry`."""
GRAPH_BREAK_LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"
"""The only place where Dynamo reports a graph break (_dynamo/symbolic_convert.py)."""
CACHE_LOGGER = "torch.compiler._cache"
"""Where `torch.compiler.load_cache_artifacts` reports what it cannot read (compiler/_cache.py)."""
_BREAK = re.compile(r"Graph break in user code at (?P<file>[^\n]+):(?P<line>\d+)")
_REASON = re.compile(r"(?:Reason|Graph Break Reason): (?P<reason>[^\n]+)")


def parse_graph_break(message: str) -> tuple[str, int, str] | None:
    """Return file, line and reason of a graph break from the log's message; None if it is another message."""
    found = _BREAK.search(message)
    if found is None:
        return None
    reason = _REASON.search(message)
    return found["file"].strip(), int(found["line"]), reason["reason"].strip() if reason else ""


def unwrap_compiled(module: Any) -> Any:
    """Return the module inside of what `torch.compile` made; any other object as it is (_dynamo/eval_frame.py)."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: Any) -> bool:
    """Return whether `torch.compile` made the module (_dynamo/eval_frame.py, `OptimizedModule`)."""
    return hasattr(module, "_orig_mod")


def is_compiler_error(error: BaseException) -> bool:
    """Return whether Dynamo or Inductor raised the error, by the module of its class."""
    return type(error).__module__.startswith(("torch._inductor", "torch._dynamo"))


def read_compile_times_s() -> dict[str, list[float]]:
    """Return the seconds that the compiler's phases took in this process (_dynamo/utils.py)."""
    return dict(getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {}))


def scaled_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiply 8-bit matrices with scales; torch has no public function for it (`torch._scaled_mm`)."""
    return torch._scaled_mm(*args, **kwargs)


def int_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply int8 matrices; torch has no public function for it (`torch._int_mm`)."""
    return torch._int_mm(left, right)


pad_sequence: Callable[..., torch.Tensor] = torch._C._nn.pad_sequence
"""What a function mode sees when `torch.nn.utils.rnn.pad_sequence` is called."""


def allow_half_precision_attention() -> None:
    """Let the plain attention kernel add up in half precision; there is no public switch in every supported torch."""
    if hasattr(torch._C, "_set_math_sdp_allow_fp16_bf16_reduction"):
        torch._C._set_math_sdp_allow_fp16_bf16_reduction(True)


def find_property(name: str) -> Any:
    """Return the getter of a tensor's property, as a function mode sees it (`torch._C.TensorBase`, _tensor.py)."""
    found = getattr(torch._C.TensorBase, name, None) or vars(torch.Tensor).get(name)
    return getattr(found, "__get__", None)


def find_default_device() -> torch.device | None:
    """Return the device of `with torch.device(…)` or `set_default_device`, without building a tensor (__init__.py)."""
    for mode in reversed(read_function_modes()):
        if isinstance(mode, DeviceContext):
            return mode.device
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def refresh_factories() -> None:
    """Fill torch's cached set of functions that take a device again (utils/_device.py).

    transformers replaces `torch.linspace` while it loads, and the set may hold that one.
    """
    _device_constructors.cache_clear()
    _device_constructors()


# Tensors, modules and operations.


def read_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place; inference tensors raise (_C/__init__.pyi)."""
    return tensor._version


def read_address(owner: Any) -> int:
    """Return the address of a storage or a generator in C++, which its Python objects share (`_cdata`, storage.py)."""
    return int(owner._cdata)


def read_parameter_table(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the table of a module's own parameters; writing to it registers nothing (nn/modules/module.py)."""
    return module._parameters


def read_buffer_table(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the table of a module's own buffers (nn/modules/module.py)."""
    return module._buffers


def read_child_table(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the table of the modules directly inside a module (nn/modules/module.py)."""
    return module._modules


def read_hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the tables of hooks after and before a module's forward; filled in place (nn/modules/module.py)."""
    return module._forward_hooks, module._forward_pre_hooks


def list_computed_weights(module: torch.nn.Module) -> list[str]:
    """Return the names of weights that `weight_norm` and `spectral_norm` compute before each forward.

    They are attributes that a hook of the class `WeightNorm` or `SpectralNorm` sets (nn/utils/weight_norm.py,
    nn/utils/spectral_norm.py).
    """
    hooks: list[Any] = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ in _COMPUTING_HOOKS]
    return [hook.name for hook in hooks]


def read_schema(func: Any) -> Any:
    """Return the schema of an operation: its name, arguments and results (_ops.py, `OpOverload`)."""
    return func._schema


def can_decompose(func: Any) -> bool:
    """Return whether `func.decompose` takes an operation apart (_ops.py, `OpOverload._can_decompose`)."""
    return bool(func._can_decompose())


make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Make a tensor of a subclass that has a shape and a device, and no memory (csrc/autograd/python_variable.cpp)."""


def read_timeout(options: Any) -> Any:
    """Return the timeout in the options of a distributed backend (distributed/distributed_c10d.py)."""
    return options._timeout


# For the emulator: device names, dispatch keys and pickling.

PlainGenerator = torch._C.Generator
"""The class `torch.Generator`, also while that name is replaced (csrc/Generator.cpp)."""
disable_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that is seen in dispatch only (documented under this name)."""


def find_rebuild(is_parameter: bool) -> Callable[..., Any]:
    """Return what unpickles a parameter, or a tensor of a device that has no storages (_utils.py)."""
    utils: Any = torch._utils
    name = "_rebuild_parameter" if is_parameter else "_rebuild_device_tensor_from_cpu_tensor"
    rebuild: Callable[..., Any] = getattr(utils, name)
    return rebuild


def is_tracing() -> bool:
    """Return whether the compiler traces a graph in this thread (_guards.py)."""
    return torch._guards.TracingContext.try_get() is not None


def is_recompiling() -> bool:
    """Return whether the graph being compiled replaces one for other inputs (_guards.py, `CompileId`)."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return bool(compile_id is not None and compile_id.frame_compile_id)


def is_transformed() -> bool:
    """Return whether `torch.jit.trace` or a functorch transform such as `vmap` runs in this thread."""
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


def is_autocast_enabled() -> bool:
    """Return whether autocast is on for any device type (amp/autocast_mode.py)."""
    return torch._C._is_any_autocast_enabled()


def count_dispatch_modes() -> int:
    """Return how many `TorchDispatchMode`s are active in this thread (utils/_python_dispatch.py)."""
    return torch._C._len_torch_dispatch_stack()


def count_function_modes() -> int:
    """Return how many `TorchFunctionMode`s are active in this thread, without listing them (overrides.py)."""
    return torch._C._len_torch_function_stack()


def forget_compiled_call(module: Any) -> Any:
    """Undo `Module.compile()` for a module (nn/modules/module.py, `_compiled_call_impl`); return what was removed."""
    return vars(module).pop("_compiled_call_impl", None)  # the class's own is None


def restore_compiled_call(layer: Any, compiled: Any) -> None:
    """Undo `forget_compiled_call`."""
    layer._compiled_call_impl = compiled


def pause_collection_after_compile() -> AbstractContextManager[Any]:
    """Keep Dynamo from running the garbage collector after each graph (_dynamo/config.py, since torch 2.8)."""
    config: Any = importlib.import_module("torch._dynamo.config")
    return config.patch(run_gc_after_compile=False) if hasattr(config, "run_gc_after_compile") else nullcontext()


def find_compiler(name: str) -> Callable[..., Any]:
    """Return a compiler backend by its name (_dynamo/backends/registry.py)."""
    compiler: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return compiler


def set_triton_assembler() -> None:
    """Name Triton's assembler, whose version is in every kernel's key, as torch's compile workers do.

    torch sets the path in its workers, and in this process only after the version was read: kernels that the workers
    compiled would not be found again (_inductor/runtime/compile_tasks.py).
    """
    tasks = importlib.import_module("torch._inductor.runtime.compile_tasks")
    set_path = getattr(tasks, "_set_triton_ptxas_path", None)
    if set_path is not None:
        set_path()


def find_inductor_cache() -> str:
    """Return the directory that inductor caches in by default (_inductor/runtime/cache_dir_utils.py)."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())


def read_global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the tables of hooks around every module's forward; they are filled in place (nn/modules/module.py)."""
    from torch.nn.modules import module

    return module._global_forward_hooks, module._global_forward_pre_hooks


def load_dynamo() -> None:
    """Import Dynamo, which compares `torch.Tensor.__new__` with its own version of it (_dynamo/polyfills/tensor.py).

    It has to be imported before that function is replaced.
    """
    importlib.import_module("torch._dynamo")


def register_compiler(compile_graph: Callable[..., Any], name: str) -> None:
    """Register a backend of `torch.compile` (`torch._dynamo.register_backend`, documented under this name)."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.register_backend(compile_graph, name=name)


def skip_in_graphs(package: str) -> None:
    """Let Dynamo never trace a package's functions (_dynamo/trace_rules.py)."""
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.add(package)


def read_private_use_name() -> str:
    """Return the name of the device that holds `PrivateUse1`; "privateuseone" while it is free."""
    return str(torch._C._get_privateuse1_backend_name())


def claim_private_use(name: str, module: Any) -> None:
    """Give `PrivateUse1` a name and a device written in Python (utils/backend_registration.py)."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename=name, backend_module=module)


def register_device_module(name: str, module: Any) -> None:
    """Make a module `torch.NAME` (`torch._register_device_module`, documented for backends)."""
    torch._register_device_module(name, module)


def read_device_kind(name: str) -> Any:
    """Return torch's `DeviceType` of a name; None if torch has no such type (csrc/autograd/init.cpp)."""
    kinds: Any = torch._C._autograd.DeviceType
    return getattr(kinds, name, None)


def make_guard(kind: Any) -> Any:
    """Return a device guard written in Python, registered for `PrivateUse1` (csrc/acc/Module.cpp)."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return kind

    guard = Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    return guard


def find_guard_table(length: int) -> Any:
    """Return libc10's table of device guards, which C++ reads before it touches a device (c10/core/impl)."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return (ctypes.c_void_p * length).in_dll(ctypes.CDLL(str(library)), _GUARD_TABLE)
    except (OSError, ValueError) as error:
        raise VirtualDeviceError(
            f"this build of torch ({torch.__version__}) does not export its table of device guards: {error}",
            hint="virtual mps, hpu and xpu need torch for Linux; neuron, npu and mlu work everywhere",
        ) from error


def is_decomposed(func: Any) -> bool:
    """Return whether torch takes an operation apart before a device sees it; TorchScript's own overloads are not."""
    name = func.name()
    return name in _list_operations() and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    )


@functools.cache
def _list_operations() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def has_fallback(key: str) -> bool:
    """Return whether a dispatch key has a fallback (csrc/utils/python_dispatch.cpp)."""
    return bool(torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key)))


def exclude_dispatch_key(key: str) -> AbstractContextManager[Any]:
    """Return a context that leaves a dispatch key out (csrc/utils/python_dispatch.cpp)."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    )
    return guard
