"""The first headline: every tiny pipeline on every virtual device, strict, in plain diffusers and placed by anyaccel.

    python -m benchmarks.portable [--device mps …] [--recipe flux …] [--json benchmarks/results/portable.json]

A pipeline works if it runs to the end with no `error` and no `wrong` in the ledger, never waits for the device between
its first and its last step (unless its model's own forward does), and gives the CPU's picture within 1e-3 in float32.
All of this is virtual: it says what the documented limits of a device do to a pipeline, and nothing of its kernels.
"""

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.process import run_forked
from anyaccel.recipes import Recipe, recipes, run
from anyaccel.runtime.pipeline import place
from benchmarks.provenance import describe_run, read_commit
from benchmarks.sweep import virtual_devices

TOLERANCE = 1e-3
EXCUSED: dict[tuple[str, str], str] = {
    (
        "attend-and-excite",
        "*",
    ): "asks for gradients as it denoises, which virtual devices do not give through attention",
    ("semantic-guidance", "*"): "writes its estimates to tensors of the host at every step, for the caller to read",
    ("score-sde-ve", "*"): "its scheduler makes a timestep on the device and looks it up on the host at every step",
    ("unclip", "mps"): "diffusers itself enlarges the picture in another way there (pipeline_unclip.py, line 447)",
    ("unclip-image-variation", "mps"): "diffusers itself enlarges the picture in another way there",
}
"""What cannot work placed, each with the reason; one that does after all is a failure too."""


@dataclass(frozen=True)
class Attempt:
    """One pipeline on one virtual device, in one of the two ways."""

    runs: bool
    error: str = ""
    max_difference: float | None = None
    errors: list[str] = field(default_factory=list)
    """The sites that met a limit whose effect is an error: `dtypes.float64 diffusers/models/embeddings.py:12`."""
    wrongs: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    """The sites that read from the device between the first and the last step."""

    @property
    def works(self) -> bool:
        """Whether it holds what the headline says."""
        same = self.max_difference is not None and self.max_difference <= TOLERANCE
        waits = [site for site in self.waits if not is_a_models_own(site)]
        return self.runs and same and not self.errors and not self.wrongs and not waits


def is_a_models_own(site: str) -> bool:
    """Whether a site lies in the forward of a model rather than in a pipeline or a scheduler."""
    return "/models/" in site or site.startswith("transformers/")


@dataclass(frozen=True)
class Outcome:
    """One pipeline on one virtual device, in both ways."""

    recipe: str
    device: str
    plain: Attempt
    placed: Attempt

    @property
    def excuse(self) -> str:
        """Why it cannot work placed; empty if it should."""
        return EXCUSED.get((self.recipe, "*")) or EXCUSED.get((self.recipe, self.device)) or ""

    @property
    def passes(self) -> bool:
        """Whether it works placed, or does not as it is known not to."""
        return self.placed.works != bool(self.excuse)


def attempt(accelerator: VirtualAccelerator, recipe: Recipe, expected: Any, put: Callable[[Any], Any]) -> Attempt:
    """Make a pipeline, place it in one of the two ways, run it, and hold it against the CPU's picture."""
    pipe: Any = recipe.make()
    accelerator.ledger.clear()
    try:
        seen = run(recipe, put(pipe))
    except Exception as error:  # noqa: BLE001 - a failure is a finding here, and is shown with its words
        return Attempt(False, f"{type(error).__name__}: {error}".splitlines()[0][:300])
    rows = accelerator.ledger.rows()
    sites = {effect: [f"{row.limit} {row.file}:{row.line}" for row in rows if row.effect == effect]
             for effect in ("error", "wrong")}  # fmt: skip
    waits = [f"{row.file}:{row.line}" for row in rows if row.limit == "host_round_trip" and row.step is not None]
    same_shape = expected.shape == seen.shape
    difference = float(numpy.abs(expected - seen).max()) if same_shape else float("inf")
    return Attempt(True, "", difference, sites["error"], sites["wrong"], waits)


def try_one(accelerator: VirtualAccelerator, recipe: Recipe, plain: bool = True) -> Outcome:
    """One pipeline on the CPU, in plain diffusers and placed."""
    expected = run(recipe, recipe.make())
    device = accelerator.device()
    nothing = Attempt(False, "not tried")
    return Outcome(
        recipe=recipe.name,
        device=accelerator.name,
        plain=attempt(accelerator, recipe, expected, lambda pipe: pipe.to(device)) if plain else nothing,
        placed=attempt(accelerator, recipe, expected, lambda pipe: place(pipe, device, dtype=torch.float32)),
    )


def sweep(device: str, names: list[str], *, plain: bool = True, show: bool = False) -> list[Outcome]:
    """Some pipelines on one virtual device, strict, in a process of its own."""
    known = recipes()

    def use(accelerator: VirtualAccelerator) -> list[Outcome]:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        outcomes = []
        for name in names:
            start = time.perf_counter()
            outcomes.append(try_one(accelerator, known[name], plain))
            if show:
                print(f"{describe(outcomes[-1])}  {time.perf_counter() - start:.1f} s", flush=True)
        return outcomes

    return run_forked(device, use, strict=True, timeout_s=7200.0)


def describe(outcome: Outcome) -> str:
    """One line for people."""
    mark = ("excused" if outcome.excuse else "ok     ") if outcome.passes else "FAIL   "
    placed, plain = outcome.placed, outcome.plain
    detail = placed.error or f"{placed.max_difference:.1e}"
    sites = [*placed.errors, *placed.wrongs, *(site for site in placed.waits if not is_a_models_own(site))]
    told = f"  {sites[:3]}" if sites else ""
    return f"{mark} {outcome.device:7} {outcome.recipe:42} plain {'ok' if plain.works else '--'}  placed {detail}{told}"


def summarise(outcomes: list[Outcome], commit: str) -> dict[str, Any]:
    """All outcomes with what they were made on."""
    devices = sorted({outcome.device for outcome in outcomes})
    by_device = {
        device: {
            "tried": sum(outcome.device == device for outcome in outcomes),
            "plain": sum(outcome.plain.works for outcome in outcomes if outcome.device == device),
            "placed": sum(outcome.placed.works for outcome in outcomes if outcome.device == device),
        }
        for device in devices
    }
    own = sorted({site for outcome in outcomes for site in outcome.placed.waits if is_a_models_own(site)})
    return {
        "evidence": "virtual",
        "what": (__doc__ or "").splitlines()[0],
        "tolerance": TOLERANCE,
        "works": by_device,
        "as_expected": sum(outcome.passes for outcome in outcomes),
        "tried": len(outcomes),
        "excused": {f"{recipe} on {device}": reason for (recipe, device), reason in EXCUSED.items()},
        "waits_in_models_own_forward": own,
        **describe_run(commit),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", action="append", help="a device; all six without it")
    parser.add_argument("--recipe", action="append", help="a recipe; all without it")
    parser.add_argument("--jobs", type=int, default=2, help="how many devices side by side")
    parser.add_argument("--json", type=Path, help="where to keep the outcomes")
    options = parser.parse_args()
    commit = read_commit()
    names, devices = options.recipe or list(recipes()), options.device or virtual_devices()
    with ThreadPoolExecutor(options.jobs) as pool:  # a thread waits for each process
        parts = pool.map(lambda device: sweep(device, names, show=True), devices)
    outcomes = [outcome for part in parts for outcome in part]
    summary = summarise(outcomes, commit)
    print(f"\n{'device':10}{'tried':>8}{'plain diffusers':>18}{'placed':>10}     (virtual, strict)")
    for device, counts in summary["works"].items():
        print(f"{device:10}{counts['tried']:8}{counts['plain']:18}{counts['placed']:10}")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if summary["as_expected"] == summary["tried"] else 1


if __name__ == "__main__":
    sys.exit(main())
