"""Cost of a virtual accelerator: five tiny pipelines compared to the CPU, with all checks enabled.

    python benchmarks/virtual_cost.py [mps]

Medians of interleaved pairs in one process, one thread; writes benchmarks/results/virtual_cost_DEVICE.json. The target
is at most 8 times the CPU time. A tiny pipeline is the worst case: checks take longer than its operations.
"""

import copy
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from anyaccel.backends.device import this_machine
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from benchmarks.provenance import read_commit

PIPELINES = ["stable-diffusion", "stable-diffusion-xl", "flux", "pixart-alpha", "wan"]
PAIRS = 9
TARGET = 8.0


def measure(accelerator: VirtualAccelerator) -> dict[str, dict[str, float]]:
    """Return the seconds of each pipeline on the CPU and on the virtual device, and their ratio."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    figures = {}
    for name in PIPELINES:
        recipe = recipes()[name]
        on_cpu: Any = recipe.make()
        on_virtual: Any = copy.deepcopy(on_cpu)
        on_virtual.to(accelerator.device())
        run(recipe, on_cpu), run(recipe, on_virtual)
        pairs = [(time_run(recipe, on_cpu), time_run(recipe, on_virtual)) for _ in range(PAIRS)]
        cpu_s, virtual_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        figures[name] = {
            "cpu_s": round(cpu_s, 4),
            "virtual_s": round(virtual_s, 4),
            "ratio": round(virtual_s / cpu_s, 2),
        }
    return figures


def time_run(recipe: Any, pipe: Any) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    run(recipe, pipe)
    return time.perf_counter() - start


def main() -> int:
    """Measure, write the file and print; the exit status is 1 above the target."""
    device = sys.argv[1] if len(sys.argv) > 1 else "neuron"
    figures = run_forked(device, measure)
    machine = this_machine()
    result = {
        "evidence": "virtual",
        "device": device,
        "target": TARGET,
        "pairs": PAIRS,
        "pipelines": figures,
        "commit": read_commit(),
        "system": f"{machine.system} {machine.architecture}",
        "versions": dict(machine.versions),
    }
    path = Path(__file__).parent / "results" / f"virtual_cost_{device}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    for name, figure in figures.items():
        print(f"{name:24} {figure['cpu_s']:8.4f} s  {figure['virtual_s']:8.4f} s  {figure['ratio']:5.2f} times")
    return 0 if all(figure["ratio"] <= TARGET for figure in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
