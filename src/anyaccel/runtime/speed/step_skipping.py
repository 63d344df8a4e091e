"""Step reuse: at some steps a denoiser's last answer is taken again, as the plan says.

Steps are told by the scheduler: every call of its `step` ends one. A denoiser that is called more than once a step, as
for guidance in two calls, has an answer for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.planning.quality_levels import StepSkipping
from anyaccel.runtime.workarounds.method_override import override_method
from anyaccel.upstream.diffusers_internals import read_step_count
from anyaccel.upstream.torch_internals import tree_map

__all__ = ["StepSkipper", "current_step_skipper", "track_steps"]

Run = Callable[..., Any]
_NOW = threading.local()


class StepSkipper:
    """Where a call is among its steps, and what its denoisers answered last."""

    def __init__(self, pipe: Any, rule: StepSkipping) -> None:
        self.pipe, self.scheduler, self.rule = pipe, pipe.scheduler, rule
        self.step, self.run, self.reused = 0, 0, 0
        self._turns: dict[int, int] = {}
        self._answers: dict[tuple[int, int], tuple[Any, Any]] = {}

    def answer(self, who: int, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a denoiser answers: by running it, or as it did the last time that it was asked in this turn."""
        turn = self._turns[who] = self._turns.get(who, -1) + 1
        shape = tree_map(lambda leaf: leaf.shape if isinstance(leaf, torch.Tensor) else None, (args, kwargs))
        kept = self._answers.get((who, turn))
        if kept is not None and kept[0] == shape and not self.rule.is_run(self.step, self._count()):
            self.reused += 1
            return tree_map(_copy, kept[1])
        made = run(*args, **kwargs)
        self.run += 1
        self._answers[who, turn] = (shape, tree_map(_copy, made))
        return made

    def next(self) -> None:
        """A step is done."""
        self.step += 1
        self._turns.clear()

    def _count(self) -> int:
        """The steps of this call: pipelines that begin with a picture leave the first ones of a schedule out."""
        count = read_step_count(self.pipe)
        if count is not None and count > 0:
            return count
        timesteps = getattr(self.scheduler, "timesteps", None)
        begin = getattr(self.scheduler, "begin_index", None) or 0
        return len(timesteps) - begin if timesteps is not None else 0


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def current_step_skipper() -> StepSkipper | None:
    """The steps of the call that this thread runs; None where every one is run."""
    return getattr(_NOW, "steps", None)


@contextmanager
def track_steps(pipe: Any, rule: StepSkipping | None) -> Iterator[StepSkipper | None]:
    """While the block runs, every `step` of the pipeline's scheduler is counted; None where there is none to count.

    This is a matter of one thread and one call: another pipeline with the same models runs all of its own steps.
    """
    scheduler: Any = getattr(pipe, "scheduler", None)
    outside = current_step_skipper()
    if rule is None or not hasattr(scheduler, "step") or not hasattr(scheduler, "set_timesteps"):
        _NOW.steps = None
        try:
            yield None
        finally:
            _NOW.steps = outside
        return
    steps = _NOW.steps = StepSkipper(pipe, rule)

    def count(scheduler: Any, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(*args, **kwargs)
        steps.next()
        return result

    try:
        with override_method(scheduler, "step", count):
            yield steps
    finally:
        _NOW.steps = outside
