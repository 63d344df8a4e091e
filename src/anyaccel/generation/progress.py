"""Progress events for component loading and denoising steps, based on the diffusers progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import diffusers
from diffusers.utils import logging as diffusers_logging
from tqdm import tqdm

from anyaccel.library_logging import no_transformers_bars
from anyaccel.progress import ProgressListener
from anyaccel.quantized_weights.quantize import QUANTIZATION_BAR
from anyaccel.upstream.diffusers_internals import COMPONENTS_BAR, use_progress_bars
from anyaccel.upstream.modular_blocks import list_blocks

__all__ = ["counting_components", "counting_steps"]


class _StepBar(tqdm):  # type: ignore[misc]
    """A hidden tqdm progress bar that reports each denoising step to a listener.

    It is a subclass because pipelines use the full tqdm API.
    """

    def __init__(self, listener: ProgressListener, iterable: Any = None, total: int | None = None) -> None:
        super().__init__(iterable, total=total, disable=True)
        # tqdm does not count while it is disabled, so count here.
        self.listener, self.done = listener, 0
        self.step_count = total if total is not None else len(iterable) if hasattr(iterable, "__len__") else None
        listener.on_step(0, self.step_count)

    def update(self, n: float | None = 1) -> None:
        """Count `n` finished steps and notify the listener."""
        self.done += int(n or 0)
        self.listener.on_step(self.done, self.step_count)

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.update()


@contextmanager
def counting_steps(pipe: Any, listener: ProgressListener | None) -> Iterator[None]:
    """Notify a listener of denoising steps inside the `with` block, instead of showing a progress bar."""
    if listener is None:
        yield
        return
    step_listener = listener

    def make_bar(iterable: Any = None, total: int | None = None) -> _StepBar:
        return _StepBar(step_listener, iterable, total)

    # Not `callback_on_step_end`: every pipeline has a `progress_bar`, but not all have a callback.
    # Combined pipelines such as Kandinsky's run other pipelines, which have their own bars.
    # The bars of a modular pipeline are those of its blocks.
    inner = [value for value in vars(pipe).values() if isinstance(value, diffusers.DiffusionPipeline)]
    pipes = [pipe, *inner, *(block for block in list_blocks(pipe) if hasattr(block, "progress_bar"))]
    for pipeline in pipes:
        vars(pipeline)["progress_bar"] = make_bar
    try:
        yield
    finally:
        for pipeline in pipes:
            vars(pipeline).pop("progress_bar", None)


@contextmanager
def counting_components(listener: ProgressListener | None) -> Iterator[None]:
    """Notify a listener of loaded components and quantized layers in the `with` block, without progress bars."""
    if listener is None:
        yield
        return
    component_listener = listener

    def make_bar(*args: Any, **options: Any) -> Any:
        if args and str(options.get("desc")).startswith(COMPONENTS_BAR):
            # Only now, after the downloads: earlier, this would also hide the download bars of the hub.
            stack.enter_context(no_transformers_bars())
            return _count_components(component_listener, list(args[0]))
        if args and str(options.get("desc")).startswith(QUANTIZATION_BAR):
            return _count_layers(component_listener, list(args[0]), str(options["desc"]))
        return diffusers_logging.EmptyTqdm(*args, **options)

    with ExitStack() as stack, use_progress_bars(make_bar):
        yield


def _count_layers(listener: ProgressListener, layers: list[Any], text: str) -> Iterator[Any]:
    for done, layer in enumerate(layers):
        listener.on_layer(done, len(layers), text[:1].lower() + text[1:])
        yield layer
    listener.on_layer(len(layers), len(layers), text[:1].lower() + text[1:])


def _count_components(listener: ProgressListener, components: list[Any]) -> Iterator[Any]:
    for done, component in enumerate(components):
        listener.on_component(done, len(components), str(component[0]))
        yield component
    listener.on_component(len(components), len(components), "")
