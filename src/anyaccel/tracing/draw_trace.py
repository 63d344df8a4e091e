"""Tracer that runs a pipeline on `meta` and records the random numbers that it draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.tracing.pipeline_trace import PipelineTrace
from anyaccel.upstream.torch_random import RANDOM_FUNCTIONS

__all__ = ["OTHER_GENERATOR", "DrawRecord", "DrawTrace", "UnknownDrawError"]

OTHER_GENERATOR = -1
# `tensor.shape` and `tensor.data = other` reach a function mode too.
_ATTRIBUTE_ACCESS = ("__get__", "__set__")


class UnknownDrawError(Exception):
    """A draw that cannot be recorded: inside a model, or by an unknown function."""


@dataclass(frozen=True)
class DrawRecord:
    """One call to a random function in pipeline code."""

    function: str
    shape: tuple[int, ...]
    """Shape of the result."""
    generator: int | None
    """Index in the list of passed generators, `OTHER_GENERATOR` for others, None for the default generator."""


class DrawTrace(PipelineTrace):
    """Tracer that runs a pipeline with models on `meta` and records its draws in order."""

    in_model = False
    """Whether a model is running."""

    def record(
        self, pipe: Any, arguments: Mapping[str, Any], generators: Sequence[torch.Generator]
    ) -> tuple[list[DrawRecord], Any]:
        """Call the pipeline once, and return its draws and its result.

        Raise `UnknownDrawError` if some random numbers cannot be attributed to a function of the pipeline's code.
        """
        with _DrawRecorder(self, generators) as recorder:
            result = self.run(pipe, arguments, Workspace())
        return recorder.draws, result

    def run_model(self, name: str, method: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Run one model call, or reuse the cached result of a call with the same input shapes."""
        self.in_model = True
        try:
            return super().run_model(name, method, call, args, kwargs)
        finally:
            self.in_model = False


class _DrawRecorder(TorchFunctionMode):
    def __init__(self, trace: DrawTrace, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.trace, self.generators = trace, list(generators)
        self.draws: list[DrawRecord] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM_FUNCTIONS:
            if self.trace.in_model:
                raise UnknownDrawError("a model draws random numbers")
            result = func(*args, **kwargs)
            generator = self._find_generator(kwargs.get("generator"))
            self.draws.append(DrawRecord(func.__name__, tuple(result.shape), generator))
            return result
        if self.trace.in_model or getattr(func, "__name__", "") in _ATTRIBUTE_ACCESS:
            return func(*args, **kwargs)
        before = self._read_states()
        result = func(*args, **kwargs)
        if any(not torch.equal(old, new) for old, new in zip(before, self._read_states(), strict=True)):
            raise UnknownDrawError(f"{func.__name__} draws random numbers")
        return result

    def _find_generator(self, generator: torch.Generator | None) -> int | None:
        if generator is None:
            return None
        own = (index for index, known in enumerate(self.generators) if known is generator)
        return next(own, OTHER_GENERATOR)

    def _read_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in (torch.default_generator, *self.generators)]
