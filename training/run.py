"""Training stages: time budget, learning rate schedule, checkpoints and log."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["Stage", "average_into"]

_FINAL_RATE = 0.01  # fraction of the peak learning rate
_WARM_UP_STEPS = 300
_CHECKPOINT_S = 60.0
_COMPILING_STEPS = 5


class Stage:
    """One training stage, which lasts as long as its time budget and may span several processes.

    The learning rate depends on the used fraction of the budget. `state` has the objects to checkpoint; a stopped
    stage resumes from its last checkpoint.
    """

    def __init__(
        self, name: str, folder: Path, budget_s: float, state: dict[str, Any], warm_up_steps: int = _WARM_UP_STEPS
    ) -> None:
        self.name, self.folder, self.budget_s, self.state = name, folder, budget_s, state
        self.warm_up_steps = warm_up_steps
        self.step, self.spent_s = 0, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._checkpoint = folder / f"{name}.pt"
        if self._checkpoint.is_file():
            self._resume()

    @property
    def finished(self) -> bool:
        """Whether the budget is spent."""
        return self.spent_s >= self.budget_s

    def steps(self, deadline: float | None = None) -> Iterator[float]:
        """Yield the spent fraction of the budget for every step, until it is 1 or `time.monotonic` reaches `deadline`.

        On a GPU, the first steps of a process include compilation and do not count against the budget.
        """
        saved = started = time.monotonic()
        before, free = self.spent_s, _COMPILING_STEPS if torch.accelerator.is_available() else 0
        for number in itertools.count():
            now = time.monotonic()
            if number == free:
                _synchronize()
                saved = started = now = time.monotonic()
            self.spent_s = before + (now - started if number > free else 0.0)
            out_of_time = deadline is not None and now > deadline
            if self.finished or out_of_time:
                break
            if now - saved > _CHECKPOINT_S:
                self.save()
                saved = now
            yield min(1.0, self.spent_s / self.budget_s)
            self.step += 1
        self.save()

    def learning_rate(self, share: float, peak: float) -> float:
        """Return the learning rate: linear warm-up, then cosine decay."""
        decay = _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * share)) / 2
        return peak * decay * min(1.0, (self.step + 1) / self.warm_up_steps)

    def log(self, **figures: float) -> None:
        """Print a line of metrics and append it to the log."""
        line = {"stage": self.name, "step": self.step, "spent_s": round(self.spent_s, 1)}
        line |= {name: float(f"{value:.4g}") for name, value in figures.items()}
        print(json.dumps(line), flush=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Write a checkpoint atomically."""
        _synchronize()
        states = {name: item.state_dict() for name, item in self.state.items()}
        unfinished = self._checkpoint.with_suffix(".part")
        torch.save({"step": self.step, "spent_s": self.spent_s, "state": states}, unfinished)
        unfinished.replace(self._checkpoint)

    def _resume(self) -> None:
        checkpoint = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        self.step, self.spent_s = checkpoint["step"], checkpoint["spent_s"]
        for name, item in self.state.items():
            item.load_state_dict(checkpoint["state"][name])
        print(f"{self.name}: resumes at step {self.step}, {self.spent_s:.0f} of {self.budget_s:.0f} s", flush=True)


def average_into(average: torch.nn.Module, model: torch.nn.Module, step: int, longest: float = 0.999) -> None:
    """Update an exponential moving average of a model's weights."""
    decay = min(longest, (1 + step) / (10 + step))
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
