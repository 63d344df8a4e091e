"""Checks on local files of LoRA, IP-Adapter and textual inversion weights, before diffusers reads them."""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelFileError, first_line
from anyaccel.runtime.weight_files.checks import check_weight_file

__all__ = ["checking_adapter_files", "reads_adapter_files"]

_METHODS = ("load_lora_weights", "load_ip_adapter", "load_textual_inversion")


def reads_adapter_files(name: str) -> bool:
    """Return whether a method of a pipeline loads weights from files of adapters."""
    return name in _METHODS


@contextmanager
def checking_adapter_files(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Raise `ModelFileError`, with the name of the file, for a damaged or mislabelled file and for a pickle with code.

    Most textual inversions and IP-Adapters are pickles. diffusers loads them with `weights_only=True`, which rejects
    code, so a pickle is allowed unless `use_safetensors=True` is passed.
    """
    files = list(_find_files(method, args, kwargs))
    for file in files:
        check_weight_file(file, pickles=not kwargs.get("use_safetensors"))
    try:
        yield
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        # diffusers tries the pickle's loader last, and its message does not always have the name of the file.
        unsafe = _find_cause(error, pickle.UnpicklingError)
        if unsafe is None or not files:
            raise
        names = ", ".join(map(str, files))
        raise ModelFileError(
            f"{names} contains objects other than weights, which loading would run as code: {first_line(unsafe)}",
            hint="convert it to safetensors, or download another file",
        ) from error


def _find_files(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Path]:
    """Yield the local files that the arguments of a method name."""
    try:
        arguments = inspect.signature(method).bind(*args, **kwargs).arguments
    except TypeError:  # the method itself reports wrong arguments
        return
    options = {**arguments, **arguments.get("kwargs", {})}
    sources = _as_list(list(arguments.values())[1])  # after `self`
    names, folders = _as_list(options.get("weight_name")), _as_list(options.get("subfolder"))
    for source in sources:
        if not isinstance(source, str | Path):  # tensors
            continue
        path = Path(source).expanduser()
        if path.is_file():
            yield path
        for folder, name in itertools.product(folders or [""], names):
            file = path / (folder or "") / str(name)
            if name and file.is_file():
                yield file


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []


def _find_cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error
