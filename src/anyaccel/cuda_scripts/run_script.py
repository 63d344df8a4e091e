"""`anyaccel run`: runs an unmodified CUDA script on any device.

    open the device → create a Migration → patch torch, and libraries at import → run the script

The script runs as it would with `python SCRIPT`. The patches remain in effect until the process ends.
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

# Packages that support only CUDA, with the description for the summary.
_FOR_CUDA_ONLY = {
    "apex": "a library of CUDA kernels",
    "bitsandbytes": "a library of CUDA kernels",
    "cupy": "NumPy for CUDA",
    "flash_attn": "a library of CUDA attention kernels",
    "pycuda": "an interface to NVIDIA's driver",
    "sageattention": "a library of CUDA attention kernels",
    "tensorrt": "NVIDIA's compiler",
    "torch_tensorrt": "NVIDIA's compiler",
    "triton": "a compiler for CUDA kernels",
    "xformers": "a library of CUDA attention kernels",
}
_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def start_migration(device: str) -> Any:
    """Open the device, map `cuda` to it in this process, and return the `Migration`."""
    from anyaccel.planning.options import PlacementOptions
    from anyaccel.runtime.placement.place import resolve_device

    # Gaudi's own migration (PT_HPU_GPU_MIGRATION) would map the same calls a second time.
    opened = resolve_device(device, PlacementOptions(hpu_migration=False))

    # After the device is open: these modules import torch, and some devices need settings before that.
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
    """Run a CUDA script on a device and return its exit status; SystemExit propagates to the caller."""
    code = _read_code(path)
    migration = start_migration(device)
    sys.argv = [path, *arguments]
    # Like `python SCRIPT`: modules next to the script can be imported.
    sys.path[:1] = [str(Path(path).resolve().parent)]
    try:
        _execute(code, path)
        status = 0
    except KeyboardInterrupt as error:
        _print_traceback(error, path)
        status = _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever a script raises ends it, as Python would
        _print_traceback(error, path)
        _note_cause(error, migration)
        status = 1
    finally:
        _wait_for_threads()
        for line in migration.summarize(verbose):
            print(f"anyaccel: {line}", file=sys.stderr)
    return status


def _read_code(path: str) -> bytes:
    if os.path.isdir(path) or not os.path.exists(path):
        reason = "is a folder" if os.path.isdir(path) else "does not exist"
        raise UsageError(
            f"{path} {reason}",
            hint="pass the path of a Python script: anyaccel run [--device NAME] SCRIPT.py [ARGUMENT]…",
        )
    try:
        # Not `open`: audit hooks must see that the file is code, as with `python SCRIPT`.
        with io.open_code(str(Path(path).absolute())) as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the permissions of the file") from error


def _execute(source: bytes, path: str) -> None:
    """Run the script as `__main__`, and keep that module alive for threads, pickle and atexit handlers."""
    module = ModuleType("__main__")
    file = os.path.abspath(path)
    vars(module).update({"__file__": file, "__builtins__": __builtins__, "__cached__": None})
    sys.modules["__main__"] = module
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))


def _print_traceback(error: BaseException, path: str) -> None:
    """Print the traceback as `python SCRIPT` would, without anyaccel's frames."""
    file = os.path.abspath(path)
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _wait_for_threads() -> None:
    """Wait for the script's threads, as Python does at exit, so that the summary includes their calls."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _note_cause(error: Exception, migration: Any) -> None:
    """If an error was caused by a CUDA-only feature, add the script line and the reason to the summary."""
    reason = _find_reason(error, migration.source_type)
    if reason and not isinstance(error, AnyaccelError):
        line = _find_script_line(error.__traceback__)
        migration.notes[f"cannot be mapped to {migration.title}: {reason}"] = line


def _find_reason(error: Exception, source_type: str) -> str:
    root = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ImportError) and root in _FOR_CUDA_ONLY:
        return f"{root} is {_FOR_CUDA_ONLY[root]}"
    for frame in _list_frames(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.utils.cpp_extension"):
            return "it builds an extension from CUDA kernels"
        if module.partition(".")[0] in _FOR_CUDA_ONLY:
            return f"{module.partition('.')[0]} is {_FOR_CUDA_ONLY[module.partition('.')[0]]}"
    # Last, because a word in the error text is the weakest evidence.
    if source_type in str(error).lower() or "nvidia" in str(error).lower():
        return "this call uses CUDA and is not mapped; please open an issue that quotes this line"
    return ""


def _list_frames(trace: TracebackType | None) -> list[Any]:
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _find_script_line(trace: TracebackType | None) -> Any:
    """Return the innermost script line in a traceback, or None if there is none."""
    from anyaccel.cuda_scripts.migration import ScriptLine, is_device_aware_library

    site = None
    while trace is not None:
        if not is_device_aware_library(trace.tb_frame):
            site = ScriptLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return site
