"""What can be told while a picture is made: which component is loaded, which step is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import diffusers
from diffusers.utils import logging as diffusers_logging
from tqdm import tqdm

from anyaccel.library_logging import no_transformers_bars
from anyaccel.progress import ProgressListener
from anyaccel.upstream.diffusers_internals import COMPONENTS_BAR, use_progress_bars

__all__ = ["counting_components", "counting_steps"]


class _Bar(tqdm):  # type: ignore[misc]
    """What a pipeline takes for its progress bar: it has all that a bar has, shows nothing, and tells the listener."""

    def __init__(self, listener: ProgressListener, iterable: Any = None, total: int | None = None) -> None:
        super().__init__(iterable, total=total, disable=True)
        self.listener, self.done = listener, 0
        self.whole = total if total is not None else len(iterable) if hasattr(iterable, "__len__") else None
        listener.on_step(0, self.whole)

    def update(self, n: float | None = 1) -> None:
        """So many steps more are done."""
        self.done += int(n or 0)
        self.listener.on_step(self.done, self.whole)

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.update()


@contextmanager
def counting_steps(pipe: Any, listener: ProgressListener | None) -> Iterator[None]:
    """While the block runs, tell the listener of a pipeline's steps in place of showing its own bar.

    Every pipeline counts its steps by `progress_bar`, and not all of them by a callback.
    """
    if listener is None:
        yield
        return
    heard = listener

    def begin(iterable: Any = None, total: int | None = None) -> _Bar:
        return _Bar(heard, iterable, total)

    pipes = [pipe, *(part for part in vars(pipe).values() if isinstance(part, diffusers.DiffusionPipeline))]
    for one in pipes:
        vars(one)["progress_bar"] = begin
    try:
        yield
    finally:
        for one in pipes:
            vars(one).pop("progress_bar", None)


@contextmanager
def counting_components(listener: ProgressListener | None) -> Iterator[None]:
    """While the block runs, tell the listener of what diffusers loads in place of showing its own bars."""
    if listener is None:
        yield
        return
    heard = listener

    def begin(*args: Any, **options: Any) -> Any:
        if args and str(options.get("desc")).startswith(COMPONENTS_BAR):
            stack.enter_context(no_transformers_bars())
            return _tell(heard, list(args[0]))
        return diffusers_logging.EmptyTqdm(*args, **options)

    with ExitStack() as stack, use_progress_bars(begin):
        yield


def _tell(listener: ProgressListener, components: list[Any]) -> Iterator[Any]:
    for done, component in enumerate(components):
        listener.on_component(done, len(components), str(component[0]))
        yield component
    listener.on_component(len(components), len(components), "")
