"""Private APIs of torch.compile, as of torch 2.13. File paths are relative to the torch package."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = [
    "CACHE_LOGGER",
    "COMPILER_MODULES",
    "GRAPH_BREAK_LOGGER",
    "draw_like_eager",
    "find_compiled_call",
    "find_compiler",
    "find_dynamo_callback",
    "find_inductor_cache",
    "is_compiled",
    "is_compiler_error",
    "is_recompiling",
    "is_tracing",
    "leave_fake_mode",
    "load_dynamo",
    "parse_graph_break",
    "pause_gc_after_compile",
    "read_compile_times_s",
    "register_compiler",
    "remove_compiled_call",
    "remove_damaged_library",
    "reset_dynamo",
    "restore_compiled_call",
    "set_ptxas_path",
    "skip_in_graphs",
    "unwrap_compiled",
]

# Returns what compiles the functions that this thread calls, or None or False (_dynamo/eval_frame.py). Unlike
# `torch.compiler.is_compiling()`, also in a function that Dynamo cannot trace and runs as it is. A Python function that
# calls this one would be compiled.
find_dynamo_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
# Packages of the compiler.
COMPILER_MODULES = ("torch._dynamo", "torch._functorch", "torch._inductor", "triton")
# Logger for graph breaks, which Dynamo reports nowhere else (_dynamo/symbolic_convert.py).
GRAPH_BREAK_LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"
# Logger for artifacts that `torch.compiler.load_cache_artifacts` cannot read (compiler/_cache.py).
CACHE_LOGGER = "torch.compiler._cache"
# Name of a library that Inductor's C++ compiler writes (_inductor/codecache.py, `code_hash`).
_INDUCTOR_LIBRARY = re.compile(r"c[a-z2-7]{51}(\.main)?\.so")
_BREAK = re.compile(r"Graph break in user code at (?P<file>[^\n]+):(?P<line>\d+)")
_REASON = re.compile(r"(?:Reason|Graph Break Reason): (?P<reason>[^\n]+)")


def parse_graph_break(message: str) -> tuple[str, int, str] | None:
    """Return the file, line and reason of a graph break from a log message, or None for other messages."""
    match = _BREAK.search(message)
    if match is None:
        return None
    reason = _REASON.search(message)
    return match["file"].strip(), int(match["line"]), reason["reason"].strip() if reason else ""


def unwrap_compiled(module: Any) -> Any:
    """Return the module that `torch.compile` wrapped, or the object itself (_dynamo/eval_frame.py)."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: Any) -> bool:
    """Return whether a module is the result of `torch.compile` (_dynamo/eval_frame.py, `OptimizedModule`)."""
    return hasattr(module, "_orig_mod")


def is_compiler_error(error: BaseException) -> bool:
    """Return whether the error's class is defined in Dynamo or Inductor."""
    return type(error).__module__.startswith(("torch._inductor", "torch._dynamo"))


def read_compile_times_s() -> dict[str, list[float]]:
    """Return this process's compile times in seconds, by compiler phase (_dynamo/utils.py)."""
    # Not imported: importing Dynamo takes seconds, and if nothing has imported it yet, nothing was compiled.
    return dict(getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {}))


def is_tracing() -> bool:
    """Return whether Dynamo is tracing in this thread (_guards.py)."""
    return torch._guards.TracingContext.try_get() is not None


def is_recompiling() -> bool:
    """Return whether the current compilation is a recompilation of a frame (_guards.py, `CompileId`)."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return bool(compile_id is not None and compile_id.frame_compile_id)


def remove_compiled_call(module: Any) -> Any:
    """Undo `Module.compile()` and return the compiled call, or None if the module was not compiled.

    See `_compiled_call_impl` in nn/modules/module.py.
    """
    return vars(module).pop("_compiled_call_impl", None)  # the class attribute is None


def find_compiled_call(module: Any) -> Any:
    """Return the compiled call of a module on which `Module.compile()` was called, or None."""
    return vars(module).get("_compiled_call_impl")


def restore_compiled_call(layer: Any, compiled: Any) -> None:
    """Restore the compiled call that `remove_compiled_call` returned."""
    layer._compiled_call_impl = compiled


def pause_gc_after_compile() -> AbstractContextManager[Any]:
    """Return a context manager that disables Dynamo's garbage collection after each compilation.

    See `run_gc_after_compile` in _dynamo/config.py.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    return config.patch(run_gc_after_compile=False) if hasattr(config, "run_gc_after_compile") else nullcontext()


def draw_like_eager() -> AbstractContextManager[Any]:
    """Return a context manager in which Inductor compiles random functions to those of eager mode.

    By default, it has its own random number generator (_inductor/config.py).
    """
    config: Any = importlib.import_module("torch._inductor.config")
    context: AbstractContextManager[Any] = config.patch(fallback_random=True)
    return context


def reset_dynamo() -> None:
    """Forget all code that Dynamo has compiled in this process."""
    importlib.import_module("torch._dynamo").reset()


def leave_fake_mode() -> AbstractContextManager[Any]:
    """Return a context manager in which operations compute real values although a compiler is tracing."""
    fake_tensor: Any = importlib.import_module("torch._subclasses.fake_tensor")
    context: AbstractContextManager[Any] = fake_tensor.unset_fake_temporarily()
    return context


def find_compiler(name: str) -> Callable[..., Any]:
    """Return a `torch.compile` backend by name (_dynamo/backends/registry.py)."""
    compiler: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return compiler


def set_ptxas_path() -> None:
    """Set Triton's `ptxas` path as Inductor's compile workers do, so that kernel cache keys match.

    See _inductor/runtime/compile_tasks.py.
    """
    # The version of ptxas is part of the cache key of every Triton kernel. Workers set the path before they compute a
    # key, this process only later. Without this call it would not find the kernels of the workers (torch 2.13).
    tasks = importlib.import_module("torch._inductor.runtime.compile_tasks")
    set_path = getattr(tasks, "_set_triton_ptxas_path", None)
    if set_path is not None:
        set_path()


def find_inductor_cache() -> str:
    """Return Inductor's default cache directory (_inductor/runtime/cache_dir_utils.py)."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())


def remove_damaged_library(error: BaseException) -> bool:
    """Remove the library that could not be imported because Inductor's C++ compiler was killed while writing it.

    Return whether there was one. Inductor never compiles a library again if its file exists
    (_inductor/codecache.py, `CppCodeCache`; torch 2.13).
    """
    cause: BaseException | None = error
    while cause is not None:
        path = getattr(cause, "path", None)
        if isinstance(cause, ImportError) and path and _INDUCTOR_LIBRARY.fullmatch(os.path.basename(path)):
            try:
                os.unlink(path)
            except OSError:
                return False
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def load_dynamo() -> None:
    """Import Dynamo. This must be done before `torch.Tensor.__new__` is patched."""
    # On import, Dynamo compares its polyfill with the signature of `Tensor.__new__` (_dynamo/polyfills/tensor.py).
    importlib.import_module("torch._dynamo")


def register_compiler(compile_graph: Callable[..., Any], name: str) -> None:
    """Register a `torch.compile` backend under `name` (`torch._dynamo.register_backend`)."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.register_backend(compile_graph, name=name)


def skip_in_graphs(package: str) -> None:
    """Exclude a package's functions from Dynamo tracing (_dynamo/trace_rules.py)."""
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rules.add(package)
