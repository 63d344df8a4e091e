"""Run each case on its virtual device and compare the ledger with the effect on hardware."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.limit_ledger import LedgerRow
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.recipes.lazy_modules import diffusers
from tests.calibration.case import Case

__all__ = ["CaseOutcome", "Summary", "calibrate", "load_libraries", "observe", "strict_error_classes", "summarize"]

FALSE_ALARMS = ("error", "wrong")
"""Effects that are false alarms if the program runs correctly on hardware."""
_PRELOADED = (
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "FluxPipeline",
    "PixArtAlphaPipeline",
    "PNDMScheduler",
    "DDIMScheduler",
)
REQUIRED_SHARE = 0.9
"""Share of the failures that must be caught."""


@dataclass(frozen=True)
class CaseOutcome:
    """The result of one case."""

    name: str
    device: str
    effect: str | None
    thread: str
    good: bool
    """Whether the failure was caught, or the correct program raised no false alarm."""
    rows: list[str]
    """The relevant rows of the ledger, as text."""
    raised: str
    seconds: float


@dataclass(frozen=True)
class Summary:
    """Counts of caught failures and false alarms."""

    caught: int
    failures: int
    false_alarms: int
    good_cases: int

    @property
    def share(self) -> float:
        """Share of the failures that were caught."""
        return self.caught / self.failures if self.failures else 0.0

    @property
    def holds(self) -> bool:
        """Whether the virtual devices are accurate enough."""
        return self.share >= REQUIRED_SHARE and not self.false_alarms

    def __str__(self) -> str:
        return (
            f"{self.caught} of {self.failures} failures caught ({self.share:.0%})\n"
            f"{self.false_alarms} false alarms in {self.good_cases} good cases"
        )


def load_libraries() -> None:
    """Import the libraries once; each case runs in a fork of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _PRELOADED:
            getattr(diffusers, name)
        recipes()


def calibrate(cases: Iterable[Case]) -> list[CaseOutcome]:
    """Run the cases one after another, each in its own process."""
    load_libraries()
    return [observe(case) for case in cases]


def observe(case: Case) -> CaseOutcome:
    """Run one case and evaluate it."""
    started = time.perf_counter()
    rows, error_classes, raised = run_forked(
        case.device, lambda accelerator: _run(case, accelerator), memory=case.product, timeout_s=180.0
    )
    if case.effect is None:
        relevant = [row for row in rows if row.effect in FALSE_ALARMS]
        good = not relevant and not error_classes
    else:
        relevant = [row for row in rows if _is_about(case, row)]
        good = bool(relevant) or (case.effect == "error" and case.strict_error in error_classes)
    return CaseOutcome(
        name=case.name,
        device=case.device,
        effect=case.effect,
        thread=case.thread,
        good=good,
        rows=[f"{row.effect} {row.limit} {row.operation} {row.file}:{row.line}" for row in relevant],
        raised=raised,
        seconds=round(time.perf_counter() - started, 2),
    )


def strict_error_classes(case: Case) -> list[str]:
    """Return the class of the error in strict mode and its base classes: `["LimitTypeError", "TypeError", …]`."""
    _, error_classes, _ = run_forked(
        case.device, lambda accelerator: _run(case, accelerator), memory=case.product, strict=True, timeout_s=180.0
    )
    return error_classes


def summarize(outcomes: Iterable[CaseOutcome]) -> Summary:
    """Count caught failures and false alarms."""
    outcomes = list(outcomes)
    failures = [outcome for outcome in outcomes if outcome.effect is not None]
    good_cases = [outcome for outcome in outcomes if outcome.effect is None]
    return Summary(
        caught=sum(outcome.good for outcome in failures),
        failures=len(failures),
        false_alarms=sum(not outcome.good for outcome in good_cases),
        good_cases=len(good_cases),
    )


def write(outcomes: Iterable[CaseOutcome], path: Path) -> None:
    """Write the summary and all outcomes as JSON."""
    outcomes = list(outcomes)
    summary = summarize(outcomes)
    document = {**asdict(summary), "share": summary.share, "cases": [asdict(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _run(case: Case, accelerator: VirtualAccelerator) -> tuple[list[LedgerRow], list[str], str]:
    """Return the rows of the ledger, the classes of the raised error, and its text."""
    error_classes: list[str] = []
    raised = ""
    diffusers.utils.logging.set_verbosity_error()  # only in this forked process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.run(accelerator.device())
        except Exception as error:  # noqa: BLE001 - an error is the result of a snippet
            error_classes = [cls.__name__ for cls in type(error).__mro__]
            raised = f"{error_classes[0]}: {error}".splitlines()[0][:200]
    return accelerator.ledger.rows(), error_classes, raised


def _is_about(case: Case, row: LedgerRow) -> bool:
    return row.effect == case.effect and row.file == case.file and case.limit in row.limit
