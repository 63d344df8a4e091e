"""Run every case on its virtual device, and hold what the ledger says against what the hardware did."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.ledger import LedgerRow
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.recipes.lazy_modules import diffusers
from tests.calibration.case import Case

__all__ = ["Outcome", "Summary", "calibrate", "load_libraries", "observe", "strict_kinds", "summarise"]

LOUD = ("error", "wrong")
"""The effects that a program which runs right must never be accused of."""
_USED = (
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "FluxPipeline",
    "PixArtAlphaPipeline",
    "PNDMScheduler",
    "DDIMScheduler",
)
ENOUGH = 0.9
"""The part of the failures that must be caught."""


@dataclass(frozen=True)
class Outcome:
    """What one case left behind."""

    name: str
    device: str
    effect: str | None
    thread: str
    good: bool
    """Caught, where it is a failure; free of any accusation, where the hardware ran it right."""
    rows: list[str]
    """What the ledger held of it, in words."""
    raised: str
    seconds: float


@dataclass(frozen=True)
class Summary:
    """The two figures."""

    caught: int
    failures: int
    false_alarms: int
    good_cases: int

    @property
    def share(self) -> float:
        """The part of the failures that was caught."""
        return self.caught / self.failures if self.failures else 0.0

    @property
    def holds(self) -> bool:
        """Whether the virtual devices may be believed."""
        return self.share >= ENOUGH and not self.false_alarms

    def __str__(self) -> str:
        return (
            f"{self.caught} of {self.failures} failures caught ({self.share:.0%})\n"
            f"{self.false_alarms} false alarms in {self.good_cases} good cases"
        )


def load_libraries() -> None:
    """Import once what every case needs: each case forks from here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _USED:
            getattr(diffusers, name)
        recipes()


def calibrate(cases: Iterable[Case]) -> list[Outcome]:
    """Every case in a process of its own, one after the other."""
    load_libraries()
    return [observe(case) for case in cases]


def observe(case: Case) -> Outcome:
    """Run one case, and judge it."""
    started = time.perf_counter()
    rows, kinds, raised = run_forked(
        case.device, lambda accelerator: _run(case, accelerator), memory=case.product, timeout_s=180.0
    )
    if case.effect is None:
        told = [row for row in rows if row.effect in LOUD]
        good = not told and not kinds
    else:
        told = [row for row in rows if _is_about(case, row)]
        good = bool(told) or (case.effect == "error" and case.strict_error in kinds)
    return Outcome(
        name=case.name,
        device=case.device,
        effect=case.effect,
        thread=case.thread,
        good=good,
        rows=[f"{row.effect} {row.limit} {row.operation} {row.file}:{row.line}" for row in told],
        raised=raised,
        seconds=round(time.perf_counter() - started, 2),
    )


def strict_kinds(case: Case) -> list[str]:
    """The kinds of error that the case raises where a limit raises: `["LimitTypeError", "TypeError", …]`."""
    _, kinds, _ = run_forked(
        case.device, lambda accelerator: _run(case, accelerator), memory=case.product, strict=True, timeout_s=180.0
    )
    return kinds


def summarise(outcomes: Iterable[Outcome]) -> Summary:
    """Count them."""
    outcomes = list(outcomes)
    failures = [outcome for outcome in outcomes if outcome.effect is not None]
    good_cases = [outcome for outcome in outcomes if outcome.effect is None]
    return Summary(
        caught=sum(outcome.good for outcome in failures),
        failures=len(failures),
        false_alarms=sum(not outcome.good for outcome in good_cases),
        good_cases=len(good_cases),
    )


def write(outcomes: Iterable[Outcome], path: Path) -> None:
    """Keep the figures and every case as JSON."""
    outcomes = list(outcomes)
    summary = summarise(outcomes)
    kept = {**asdict(summary), "share": summary.share, "cases": [asdict(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(kept, indent=2) + "\n")


def _run(case: Case, accelerator: VirtualAccelerator) -> tuple[list[LedgerRow], list[str], str]:
    """The rows of the ledger, and what was raised: its kinds and its words."""
    kinds: list[str] = []
    raised = ""
    diffusers.utils.logging.set_verbosity_error()  # here, in a process of its own, and not for the caller
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.run(accelerator.device())
        except Exception as error:  # noqa: BLE001 - whatever a snippet raises is what is looked for
            kinds = [kind.__name__ for kind in type(error).__mro__]
            raised = f"{kinds[0]}: {error}".splitlines()[0][:200]
    return accelerator.ledger.rows(), kinds, raised


def _is_about(case: Case, row: LedgerRow) -> bool:
    return row.effect == case.effect and row.file == case.file and case.limit in row.limit
