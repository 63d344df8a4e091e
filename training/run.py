"""What both stages of training share: a budget of time, a schedule by it, checkpoints, a log."""

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

_FINAL_SHARE = 0.01  # of the learning rate, at the end
_WARM_UP_STEPS = 300
_CHECKPOINT_S = 60.0
_COMPILING_STEPS = 5


class Stage:
    """One stage of training: it lasts as long as its budget, over as many processes as it takes.

    The learning rate follows the share of the budget that is spent. `state` is everything that a checkpoint keeps; a
    stage that was stopped goes on from its last one.
    """

    def __init__(self, name: str, folder: Path, budget_s: float, state: dict[str, Any]) -> None:
        self.name, self.folder, self.budget_s, self.state = name, folder, budget_s, state
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
        """The share of the budget that is spent, for every step until it is, or until a moment of `time.monotonic`.

        On a GPU the first steps of a process compile: they are made, and cost nothing of the budget.
        """
        saved = started = time.monotonic()
        before, free = self.spent_s, _COMPILING_STEPS if torch.accelerator.is_available() else 0
        for number in itertools.count():
            now = time.monotonic()
            if number == free:
                _wait()
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
        """A short rise, then half a cosine down."""
        fall = _FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * share)) / 2
        return peak * fall * min(1.0, (self.step + 1) / _WARM_UP_STEPS)

    def log(self, **figures: float) -> None:
        """One line of figures, printed and kept."""
        line = {"stage": self.name, "step": self.step, "spent_s": round(self.spent_s, 1)}
        line |= {name: float(f"{value:.4g}") for name, value in figures.items()}
        print(json.dumps(line), flush=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Keep everything, whole or not at all."""
        _wait()
        kept = {name: part.state_dict() for name, part in self.state.items()}
        unfinished = self._checkpoint.with_suffix(".part")
        torch.save({"step": self.step, "spent_s": self.spent_s, "state": kept}, unfinished)
        unfinished.replace(self._checkpoint)

    def _resume(self) -> None:
        kept = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        self.step, self.spent_s = kept["step"], kept["spent_s"]
        for name, part in self.state.items():
            part.load_state_dict(kept["state"][name])
        print(f"{self.name}: goes on from step {self.step}, {self.spent_s:.0f} of {self.budget_s:.0f} s", flush=True)


def average_into(average: torch.nn.Module, model: torch.nn.Module, step: int, longest: float = 0.999) -> None:
    """Move a running average of a model's weights a little towards the model."""
    decay = min(longest, (1 + step) / (10 + step))
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
