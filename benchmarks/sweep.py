"""Every tiny pipeline on every virtual accelerator, in plain diffusers: whether it runs, and gives the CPU's picture.

    python -m benchmarks.sweep [--device mps …] [--recipe flux …] [--json benchmarks/results/virtual_sweep.json]

A process a device, one after another. The exit status is 1 if a pipeline fails or differs by more than 1e-4. All of
this is virtual: it says what a device's documented limits do to a pipeline, and nothing of its speed or its kernels.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import torch

from anyaccel.backends.registry import load_registry
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.process import run_forked
from anyaccel.recipes import Recipe, recipes, run
from benchmarks.provenance import describe_run, read_commit

TOLERANCE = 1e-4
_UNWRITTEN = "its attention reads memory that was never written, which MPS lets through as NaN (diffusers #14438)"
_OTHER_UPSCALING = "diffusers itself enlarges the picture in another way on mps (pipeline_unclip.py, line 447)"
EXCUSED = {
    ("easy-animate-inpaint", "*"): "hands the host's generator to a draw on the device, which torch refuses everywhere",
    (
        "attend-and-excite",
        "*",
    ): "needs gradients as it denoises, which virtual devices do not give through attention",
    ("wuerstchen-prior", "mps"): _UNWRITTEN,
    ("wuerstchen-combined", "mps"): _UNWRITTEN,
    ("stable-diffusion-self-attention-guidance", "mps"): _UNWRITTEN,
    ("unclip", "mps"): _OTHER_UPSCALING,
    ("unclip-image-variation", "mps"): _OTHER_UPSCALING,
}
"""What cannot give the CPU's picture, each with the reason; one that does after all is a failure too."""


@dataclass(frozen=True)
class Outcome:
    """One pipeline on one virtual device."""

    recipe: str
    device: str
    runs: bool
    error: str
    max_difference: float | None
    rows: dict[str, int]
    """How many sites met limits, by effect."""
    round_trips_a_step: float
    times_the_cpu: float | None

    @property
    def passes(self) -> bool:
        """Whether it ran to the end and gave the CPU's picture, or did not as it is known not to."""
        same = self.runs and self.max_difference is not None and self.max_difference <= TOLERANCE
        return same != bool(self.excuse)

    @property
    def excuse(self) -> str:
        """Why it cannot give the CPU's picture; empty if it should."""
        return EXCUSED.get((self.recipe, "*")) or EXCUSED.get((self.recipe, self.device)) or ""


def virtual_devices() -> list[str]:
    """The built-in devices that can be virtual."""
    return [backend.name for backend in load_registry().backends.values() if backend.sheet.can_be_virtual]


def try_one(accelerator: VirtualAccelerator, recipe: Recipe) -> Outcome:
    """Run one pipeline on the CPU and then on the device, and compare."""
    pipe: Any = recipe.make()
    start = time.perf_counter()
    expected = run(recipe, pipe)
    on_cpu_s = time.perf_counter() - start
    accelerator.ledger.clear()
    try:
        pipe.to(accelerator.device())
        start = time.perf_counter()
        seen = run(recipe, pipe)
    except Exception as error:  # noqa: BLE001 - a failure is a finding here, and is shown with its words
        words = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Outcome(recipe.name, accelerator.name, False, words, None, {}, 0.0, None)
    ratio = (time.perf_counter() - start) / on_cpu_s
    trips = {step: count for step, count in accelerator.ledger.round_trips().items() if step is not None}
    return Outcome(
        recipe=recipe.name,
        device=accelerator.name,
        runs=True,
        error="",
        max_difference=float(numpy.abs(expected - seen).max()),
        rows=dict(Counter(row.effect for row in accelerator.ledger.rows())),
        round_trips_a_step=sum(trips.values()) / len(trips) if trips else 0.0,
        times_the_cpu=round(ratio, 2),
    )


def sweep(device: str, names: list[str], show: bool = False) -> list[Outcome]:
    """Some pipelines on one virtual device, in a process of its own."""
    known = recipes()

    def use(accelerator: VirtualAccelerator) -> list[Outcome]:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        outcomes = []
        for name in names:
            outcomes.append(try_one(accelerator, known[name]))
            if show:
                print(describe(outcomes[-1]), flush=True)
        return outcomes

    return run_forked(device, use, timeout_s=7200.0)


def describe(outcome: Outcome) -> str:
    """One line for people."""
    mark = ("excused" if outcome.excuse else "ok  ") if outcome.passes else "FAIL"
    detail = outcome.error or f"{outcome.max_difference:.1e}  {outcome.times_the_cpu:.1f} x cpu  {outcome.rows}"
    return f"{mark} {outcome.device:7} {outcome.recipe:40} {detail}"


def summarise(outcomes: list[Outcome], commit: str) -> dict[str, Any]:
    """All outcomes with what they were made on."""
    return {
        "evidence": "virtual",
        "what": "plain diffusers, not strict, eval mode, float32, one thread, against the CPU in the same process",
        "tolerance": TOLERANCE,
        "passed": sum(outcome.passes for outcome in outcomes),
        "excused": {f"{recipe} on {device}": reason for (recipe, device), reason in EXCUSED.items()},
        "tried": len(outcomes),
        **describe_run(commit),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", action="append", help="a device; all six without it")
    parser.add_argument("--recipe", action="append", help="a recipe; all without it")
    parser.add_argument("--json", type=Path, help="where to keep the outcomes")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for device in options.device or virtual_devices():
        outcomes += sweep(device, options.recipe or list(recipes()), show=True)
    summary = summarise(outcomes, read_commit())
    print(f"{summary['passed']} of {summary['tried']} passed (virtual)")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if summary["passed"] == summary["tried"] else 1


if __name__ == "__main__":
    sys.exit(main())
