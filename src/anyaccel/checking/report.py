"""What a check found: a device a part, a violation a line of code; as data, so that every output says the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from anyaccel.backends.claim import Effect, Evidence
from anyaccel.checking.report_text import describe_report

__all__ = ["TOLERANCE", "DeviceReport", "Graphs", "Report", "State", "Violation"]

State: TypeAlias = Literal["works", "waits", "wrong", "stops"]
"""A pipeline on a device in one word: right; right, but it waits at every step; another picture; no picture."""

TOLERANCE = 1e-3
"""How far a picture in float32 may be from the CPU's, of 1."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One line of code that met one limit of the device."""

    limit: str
    """The name on the sheet: `dtypes.float64`."""
    effect: Effect
    operation: str
    """As torch names it: `aten::arange`."""
    file: str
    line: int
    code: str
    """The line's own text."""
    count: int
    step: int | None
    """The denoising step at which it was first seen; None outside the loop."""
    says: str
    source: str
    evidence: Evidence | None
    hint: str
    """How to mend it."""

    @property
    def waits(self) -> bool:
        """Whether a pipeline or a scheduler waits for the device here at every step; a model's own forward may."""
        own = "/models/" in self.file or self.file.startswith("transformers/")
        return self.limit == "host_round_trip" and self.step is not None and not own


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """What the device's compiler was given."""

    compiled: int
    recompiled_for: tuple[tuple[str, ...], ...] = ()
    """The inputs of each graph that was needed since they had changed: `("float32[1, 4, 8, 8]", …)`."""
    breaks: tuple[str, ...] = ()
    """`file:line: why`."""


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """What a pipeline does on one device."""

    device: str
    virtual: bool
    placed: bool
    """Whether anyaccel placed it; else it is diffusers alone."""
    finished: bool
    error: str = ""
    """What stopped it, where it did not finish."""
    max_difference: float | None = None
    """From the CPU's, as a share of its largest number where that is above 1."""
    host_round_trips_per_step: float | None = None
    violations: tuple[Violation, ...] = ()
    graphs: Graphs | None = None
    seconds: float = 0.0
    known: int = 0
    """How many findings of a baseline were left out."""

    @property
    def runs(self) -> bool:
        """Whether the device would run it to the end: no line met a limit that is an error there."""
        return self.finished and not self.of("error")

    @property
    def is_right(self) -> bool:
        """Whether the picture is the CPU's, and no line met a limit that makes numbers silently wrong."""
        same = self.max_difference is not None and self.max_difference <= TOLERANCE
        return self.finished and same and not self.of("wrong")

    @property
    def passes(self) -> bool:
        """Whether the answer is yes."""
        return self.runs and self.is_right

    @property
    def state(self) -> State:
        """The answer in one word, the worst that holds."""
        if not self.runs:
            return "stops"
        if not self.is_right:
            return "wrong"
        return "waits" if any(one.waits for one in self.violations) else "works"

    def of(self, effect: Effect) -> tuple[Violation, ...]:
        """The violations of one effect."""
        return tuple(one for one in self.violations if one.effect == effect)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        answers = {"runs": self.runs, "right": self.is_right, "passes": self.passes, "state": self.state}
        return asdict(self) | answers


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found on every device that was asked for."""

    subject: str
    pipeline: str
    devices: dict[str, DeviceReport] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What the reader must know of how the subject was made."""

    @property
    def passes(self) -> bool:
        """Whether it is fine on all of them."""
        return all(one.passes for one in self.devices.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "subject": self.subject,
            "pipeline": self.pipeline,
            "passes": self.passes,
            "notes": list(self.notes),
            "devices": {name: one.as_dict() for name, one in self.devices.items()},
        }

    def to_json(self) -> str:
        """The whole report."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(describe_report(self))
