"""Hooks into the pipeline classes of diffusers 0.42.1: creation of a pipeline, `from_pipe` and progress bars.

Users import pipeline classes from diffusers, so a pipeline that is created from placed components must be
noticed there. The hooks are installed with the first portable pipeline. They do not change pipelines
without placed components. File paths are relative to the package of diffusers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

__all__ = ["PipelineHooks", "install_pipeline_hooks", "is_created_by_pipeline", "list_calls", "remove_pipeline_hooks"]

_VAR_KEYWORDS = 0x08  # inspect.CO_VARKEYWORDS
_AUTO_PIPELINES = ("Text2Image", "Image2Image", "Inpainting", "Text2Audio")


@dataclass(frozen=True)
class PipelineHooks:
    """Functions that the hooks call."""

    on_components: Callable[[Any, dict[str, Any]], None]
    """Called with a pipeline and the components that were registered with it, usually in its `__init__`.

    Also called with a model that replaces a component.
    """
    from_pipe: Callable[[Any, Any, Any, dict[str, Any]], Any]
    """Called instead of `from_pipe` with the original method, the class, the pipeline and the keyword arguments."""
    on_progress_bar: Callable[[], None]
    """Called when a pipeline creates a progress bar, which nearly every pipeline call does."""


# The original attributes by class and name; empty if the hooks are not installed.
_ORIGINALS: dict[tuple[Any, str], Any] = {}


def install_pipeline_hooks(hooks: PipelineHooks) -> None:
    """Install the hooks; do nothing if they are already installed."""
    if _ORIGINALS:
        return
    import diffusers

    # pipelines/pipeline_utils.py: every pipeline calls `register_modules` in `__init__`.
    _wrap(diffusers.DiffusionPipeline, "register_modules", lambda before: _wrap_registration(before, hooks))
    _wrap(diffusers.DiffusionPipeline, "__setattr__", lambda before: _wrap_assignment(before, hooks))
    _wrap(diffusers.DiffusionPipeline, "progress_bar", lambda before: _wrap_progress_bar(before, hooks))
    _wrap(diffusers.DiffusionPipeline, "from_pipe", lambda before: _wrap_from_pipe(before, hooks))
    # pipelines/auto_pipeline.py
    for task in _AUTO_PIPELINES:
        auto = _find_class(diffusers, f"AutoPipelineFor{task}")
        if auto is not None:
            _wrap(auto, "from_pipe", lambda before: _wrap_from_pipe(before, hooks))
    # modular_pipelines/modular_pipeline.py: called by `update_components` and `load_components`.
    _wrap(diffusers.ModularPipeline, "register_components", lambda before: _wrap_registration(before, hooks))


def remove_pipeline_hooks() -> None:
    """Restore the original methods of diffusers, unless another library has replaced them since."""
    for (owner, name), (original, replacement) in _ORIGINALS.items():
        if vars(owner)[name] is replacement:
            setattr(owner, name, original)
    _ORIGINALS.clear()


def _find_class(library: Any, name: str) -> Any | None:
    try:
        return getattr(library, name, None)
    except RuntimeError:
        # With transformers 5, diffusers 0.35 and 0.36 cannot import their AutoPipeline classes, so no program uses
        # them: "cannot import name 'MT5Tokenizer' from 'transformers'".
        return None


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = vars(owner).get(name)
    if original is None:  # inherited from a class that is wrapped itself, or not in this version of diffusers
        return
    is_classmethod = isinstance(original, classmethod)
    function = original.__func__ if is_classmethod else original
    wrapped = functools.wraps(function)(make(function))
    replacement = classmethod(wrapped) if is_classmethod else wrapped
    _ORIGINALS[owner, name] = (original, replacement)
    setattr(owner, name, replacement)


def _wrap_registration(before: Callable[..., Any], hooks: PipelineHooks) -> Callable[..., Any]:
    def register(self: Any, **kwargs: Any) -> Any:
        result = before(self, **kwargs)
        hooks.on_components(self, kwargs)
        return result

    return register


def _wrap_assignment(before: Callable[..., Any], hooks: PipelineHooks) -> Callable[..., Any]:
    def assign(self: Any, name: str, value: Any) -> None:
        replaces = isinstance(value, torch.nn.Module) and name in vars(self)
        before(self, name, value)
        if replaces:
            hooks.on_components(self, {name: value})

    return assign


def _wrap_from_pipe(before: Callable[..., Any], hooks: PipelineHooks) -> Callable[..., Any]:
    def from_pipe(cls: Any, pipeline: Any, **kwargs: Any) -> Any:
        return hooks.from_pipe(before, cls, pipeline, kwargs)

    return from_pipe


def _wrap_progress_bar(before: Callable[..., Any], hooks: PipelineHooks) -> Callable[..., Any]:
    def progress_bar(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.on_progress_bar()
        return before(self, *args, **kwargs)

    return progress_bar


def is_created_by_pipeline(pipe: Any) -> bool:
    """Return whether the `__init__` of another pipeline is running, which creates `pipe` as a part of itself.

    Combined pipelines do this (pipelines/kandinsky/pipeline_kandinsky_combined.py).
    """
    return any(
        frame.f_code.co_name == "__init__" and owner is not pipe
        for frame, owner in _list_pipeline_frames(sys._getframe(1))
    )


def list_calls() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the pipelines whose `__call__` is running in this thread, with the values of its `**kwargs`."""
    for frame, pipe in _list_pipeline_frames(sys._getframe(1)):
        code = frame.f_code
        if code.co_name == "__call__" and code.co_flags & _VAR_KEYWORDS:
            index = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)
            yield pipe, frame.f_locals.get(code.co_varnames[index]) or {}


def _list_pipeline_frames(start: FrameType | None) -> Iterator[tuple[FrameType, Any]]:
    """Yield the frames of this thread's `__init__` and `__call__` methods of pipelines, with the pipelines."""
    import diffusers

    frame = start
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("__init__", "__call__") and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, diffusers.DiffusionPipeline):
                yield frame, owner
        frame = frame.f_back
