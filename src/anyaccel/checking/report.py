"""Data classes for check results: one report per device, with the code lines that hit a limit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from anyaccel.backends.claim import Effect, Evidence
from anyaccel.checking.report_text import describe_report

__all__ = ["TOLERANCE", "DeviceReport", "Graphs", "Report", "State", "Violation"]

# State of a pipeline on a device. `works`: correct image. `waits`: correct, but the CPU waits for the device at every
# step. `wrong`: a different image, without an error. `stops`: an error.
State: TypeAlias = Literal["works", "waits", "wrong", "stops"]

# Allowed difference of a float32 image (values from 0 to 1) from the CPU's.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Violation:
    """Line of code that hits a device limit."""

    limit: str
    """Name on the sheet: `dtypes.float64`."""
    effect: Effect
    operation: str
    """Operator name in torch: `aten::arange`."""
    file: str
    line: int
    code: str
    """Source text of the line."""
    count: int
    step: int | None
    """Denoising step of the first hit; None outside the loop."""
    says: str
    source: str
    evidence: Evidence | None
    hint: str
    """How to fix it."""

    @property
    def waits(self) -> bool:
        """Whether this line of pipeline or scheduler code synchronizes with the device in the denoising loop."""
        # A synchronization inside a model belongs to the model; a change to the pipeline cannot remove it.
        in_model = "/models/" in self.file or self.file.startswith("transformers/")
        return self.limit == "host_round_trip" and self.step is not None and not in_model


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """Graphs that the device's compiler compiled, with recompilations and graph breaks."""

    compiled: int
    recompiled_for: tuple[tuple[str, ...], ...] = ()
    """Inputs of each graph that was recompiled for other shapes: `("float32[1, 4, 8, 8]", …)`."""
    breaks: tuple[str, ...] = ()
    """Graph breaks as `file:line: reason`."""


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """Result of checking a pipeline on one device."""

    device: str
    virtual: bool
    placed: bool
    """Whether anyaccel placed the pipeline; otherwise it ran in plain diffusers."""
    finished: bool
    error: str = ""
    """Error that ended the run, if it did not finish."""
    max_difference: float | None = None
    """Largest difference from the CPU's image, divided by its largest value if that is above 1."""
    host_round_trips_per_step: float | None = None
    violations: tuple[Violation, ...] = ()
    graphs: Graphs | None = None
    seconds: float = 0.0
    known: int = 0
    """Number of findings that a baseline hides."""

    @property
    def runs(self) -> bool:
        """Whether the run would finish on the device: no line hits a limit that raises an error."""
        return self.finished and not self.of("error")

    @property
    def is_right(self) -> bool:
        """Whether the image matches the CPU image and no line hits a limit that silently gives wrong results."""
        same = self.max_difference is not None and self.max_difference <= TOLERANCE
        return self.finished and same and not self.of("wrong")

    @property
    def passes(self) -> bool:
        """Whether the pipeline runs on this device and produces the correct image."""
        return self.runs and self.is_right

    @property
    def state(self) -> State:
        """The most severe state that applies: `stops`, `wrong`, `waits` or `works`.

        `stops` means an error, `wrong` means a different image, and `waits` means that the CPU waits for
        the device during the denoising loop.
        """
        if not self.runs:
            return "stops"
        if not self.is_right:
            return "wrong"
        return "waits" if any(violation.waits for violation in self.violations) else "works"

    def of(self, effect: Effect) -> tuple[Violation, ...]:
        """Return the violations with the given effect, such as `error`."""
        return tuple(violation for violation in self.violations if violation.effect == effect)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        # Properties are not fields, so `asdict` leaves them out.
        verdicts = {"runs": self.runs, "right": self.is_right, "passes": self.passes, "state": self.state}
        return asdict(self) | verdicts


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a check on all requested devices."""

    target: str
    pipeline: str
    devices: dict[str, DeviceReport] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Notes on how the checked pipeline was built."""

    @property
    def passes(self) -> bool:
        """Whether the check passes on every device."""
        return all(device.passes for device in self.devices.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        return {
            "subject": self.target,
            "pipeline": self.pipeline,
            "passes": self.passes,
            "notes": list(self.notes),
            "devices": {name: device.as_dict() for name, device in self.devices.items()},
        }

    def to_json(self) -> str:
        """Return the report as a JSON string."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(describe_report(self))
