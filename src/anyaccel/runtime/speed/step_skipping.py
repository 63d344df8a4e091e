"""Step skipping: at selected steps, a denoiser does not run and its last output is reused.

Every call to the scheduler's `step` ends a step. If a denoiser runs several times per step, for
example once per half of classifier-free guidance, one output is stored for each run.
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

# The caches of diffusers (first block, TaylorSeer, MagCache) support some transformers and no UNet. They also read a
# value from the device at every step to decide, which breaks a compiled or captured graph (docs/decisions/0008).

Forward = Callable[..., Any]
_ACTIVE = threading.local()


class StepSkipper:
    """State of step skipping during one call: the current step and the denoisers' last outputs."""

    def __init__(self, pipe: Any, rule: StepSkipping) -> None:
        self.pipe, self.scheduler, self.rule = pipe, pipe.scheduler, rule
        self.step, self.run, self.reused = 0, 0, 0
        self._run_indices: dict[int, int] = {}
        """The index of the current run within the step, by model."""
        self._outputs: dict[tuple[int, int], tuple[Any, Any]] = {}
        """The input shapes and the output, by model and index within the step."""

    def run_or_reuse(self, model_id: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a denoiser or, at a skipped step, return its output from an earlier step."""
        index = self._run_indices[model_id] = self._run_indices.get(model_id, -1) + 1
        shapes = tree_map(lambda leaf: leaf.shape if isinstance(leaf, torch.Tensor) else None, (args, kwargs))
        stored = self._outputs.get((model_id, index))
        # Shapes can change during a call, for example when guidance ends early.
        if stored is not None and stored[0] == shapes and not self.rule.is_run(self.step, self._count_steps()):
            self.reused += 1
            return tree_map(_copy, stored[1])
        output = forward(*args, **kwargs)
        self.run += 1
        # Copies in both directions: schedulers and pipelines may modify the output in place.
        self._outputs[model_id, index] = (shapes, tree_map(_copy, output))
        return output

    def finish_step(self) -> None:
        """Advance to the next step."""
        self.step += 1
        self._run_indices.clear()

    def _count_steps(self) -> int:
        """Return the number of steps in this call, without those that image-to-image pipelines skip."""
        count = read_step_count(self.pipe)
        if count is not None and count > 0:
            return count
        timesteps = getattr(self.scheduler, "timesteps", None)
        begin = getattr(self.scheduler, "begin_index", None) or 0
        return len(timesteps) - begin if timesteps is not None else 0


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def current_step_skipper() -> StepSkipper | None:
    """Return the step skipper for the call running in this thread; None if every step runs."""
    return getattr(_ACTIVE, "skipper", None)


@contextmanager
def track_steps(pipe: Any, rule: StepSkipping | None) -> Iterator[StepSkipper | None]:
    """Yield a `StepSkipper` that counts the scheduler's steps inside the `with` block.

    Yield None if there is no rule or no scheduler. The skipper applies only to this thread, so another
    pipeline that shares the models runs all of its steps.
    """
    scheduler: Any = getattr(pipe, "scheduler", None)
    outer = current_step_skipper()
    if rule is None or not hasattr(scheduler, "step") or not hasattr(scheduler, "set_timesteps"):
        _ACTIVE.skipper = None
        try:
            yield None
        finally:
            _ACTIVE.skipper = outer
        return
    skipper = _ACTIVE.skipper = StepSkipper(pipe, rule)

    def run_step(scheduler: Any, step: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = step(*args, **kwargs)
        skipper.finish_step()
        return result

    try:
        with override_method(scheduler, "step", run_step):
            yield skipper
    finally:
        _ACTIVE.skipper = outer
