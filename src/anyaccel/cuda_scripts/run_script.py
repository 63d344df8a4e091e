"""Running a script that was written for CUDA on the device that is here.

    anyaccel run → open the device → make a Migration → change torch, and libraries as they come → run the script

The script is not edited, and is run as `python SCRIPT` would run it. The changes stay until the process ends.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from anyaccel.errors import AnyaccelError, UsageError

__all__ = ["run_script", "start_migration"]

_FOR_CUDA_ONLY = {
    "apex": "NVIDIA's kernels",
    "bitsandbytes": "kernels for CUDA",
    "cupy": "NumPy for CUDA",
    "flash_attn": "attention kernels for CUDA",
    "pycuda": "NVIDIA's driver",
    "sageattention": "attention kernels for CUDA",
    "tensorrt": "NVIDIA's compiler",
    "torch_tensorrt": "NVIDIA's compiler",
    "triton": "kernels that are compiled for CUDA",
    "xformers": "attention kernels for CUDA",
}
_INTERRUPTED = 130


def start_migration(device: str) -> Any:
    """Open the device, and let `cuda` mean it in this process from now on; gives the migration."""
    from anyaccel.planning.options import PlacementOptions
    from anyaccel.runtime.placement.place import resolve_device

    # A vendor's own switch of this kind would map the same calls a second time.
    opened = resolve_device(device, PlacementOptions(hpu_migration=False))

    from anyaccel.cuda_scripts.cuda_module_proxy import install_cuda_proxy
    from anyaccel.cuda_scripts.library_patches import install_library_patches
    from anyaccel.cuda_scripts.migration import Migration
    from anyaccel.cuda_scripts.script_function_mode import install_function_mode
    from anyaccel.cuda_scripts.torch_patches import install_torch_patches

    migration = Migration(opened)
    if not migration.is_native:
        install_cuda_proxy(migration)
        install_torch_patches(migration)
        install_function_mode(migration)
    install_library_patches(migration)
    return migration


def run_script(path: str, arguments: Sequence[str], device: str = "auto", verbose: bool = False) -> int:
    """Run a script to its end and give its exit status; a SystemExit of the script's is left to the caller."""
    code = _read_code(path)
    migration = start_migration(device)
    sys.argv = [path, *arguments]
    sys.path[:1] = [str(Path(path).resolve().parent)]
    try:
        _execute(code, path)
        status = 0
    except KeyboardInterrupt as error:
        _show(error, path)
        status = _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever a script raises ends it, as Python would
        _show(error, path)
        _explain(error, migration)
        status = 1
    finally:
        _wait_for_threads()
        for line in migration.summarize(verbose):
            print(f"anyaccel: {line}", file=sys.stderr)
    return status


def _read_code(path: str) -> bytes:
    if os.path.isdir(path) or not os.path.exists(path):
        reason = "is a folder" if os.path.isdir(path) else "is not there"
        raise UsageError(f"{path} {reason}", hint="anyaccel run [--device NAME] SCRIPT.py [ARGUMENT]…")
    try:
        with io.open_code(str(Path(path).absolute())) as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="look at its permissions") from error


def _execute(source: bytes, path: str) -> None:
    """Run the script as the main module, which it stays: threads, pickles and what runs at exit look for it there."""
    module = ModuleType("__main__")
    file = os.path.abspath(path)
    vars(module).update({"__file__": file, "__builtins__": __builtins__, "__cached__": None})
    sys.modules["__main__"] = module
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))


def _show(error: BaseException, path: str) -> None:
    """The traceback that `python SCRIPT` would print: from the script's own first line on."""
    file = os.path.abspath(path)
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _wait_for_threads() -> None:
    """Python waits for a script's threads before it ends; what they ask for belongs to the summary."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _explain(error: Exception, migration: Any) -> None:
    """Name the line where a script reached what cannot be mapped, and say why."""
    reason = _find_reason(error, migration.foreign)
    if reason and not isinstance(error, AnyaccelError):
        line = _find_line(error.__traceback__)
        migration.notes[f"cannot be mapped to {migration.title}: {reason}"] = line


def _find_reason(error: Exception, foreign: str) -> str:
    root = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ImportError) and root in _FOR_CUDA_ONLY:
        return f"{root} is {_FOR_CUDA_ONLY[root]}"
    for frame in _frames(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.utils.cpp_extension"):
            return "an extension is built from kernels that are written for CUDA"
        if module.partition(".")[0] in _FOR_CUDA_ONLY:
            return f"{module.partition('.')[0]} is {_FOR_CUDA_ONLY[module.partition('.')[0]]}"
    if foreign in str(error).lower() or "nvidia" in str(error).lower():
        return "a call reached CUDA by a way that is not mapped; please open an issue with this line"
    return ""


def _frames(trace: TracebackType | None) -> list[Any]:
    found = []
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found


def _find_line(trace: TracebackType | None) -> Any:
    """The last line on the way to an error that is the script's."""
    from anyaccel.cuda_scripts.migration import ScriptLine, is_device_aware_library

    site = None
    while trace is not None:
        if not is_device_aware_library(trace.tb_frame):
            site = ScriptLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return site
