"""Running tiny pipelines with less and less memory, and out of it at one allocation after another.

python -m tests.runtime.placement.sweeps capacities hpu mps  the five pipelines at every capacity, down to the error
python -m tests.runtime.placement.sweeps injections hpu mps  out of memory at every tenth allocation in turn
"""

import gc
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.memory_tracker import MemoryTracker
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import DoesNotFitError
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import oom_history
from anyaccel.storage.cache_dir import CACHE_VARIABLE

FIVE = ("stable-diffusion", "stable-diffusion-xl", "pixart-alpha", "flux", "flux-2-klein")
SHRINK = 0.85
SAME = 1e-3


def use_quietly() -> None:
    """Keep advice and what recovery logs out of a sweep's output."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def measure_full(name: str, device: str) -> tuple[int, Any]:
    """What a pipeline holds at most with memory for all of it, and the CPU's picture."""

    def use(accelerator: VirtualAccelerator) -> int:
        use_quietly()
        pipe = place(recipes()[name].make(), device, dtype="float32")
        anyaccel.reset_peak_memory(device)
        run(recipes()[name], pipe)
        return anyaccel.max_memory(device)

    def on_the_host() -> Any:
        use_quietly()
        return run(recipes()[name], recipes()[name].make())

    return run_forked(device, use), call_in_fork(on_the_host)


def run_within(name: str, device: str, capacity: int, reference: Any) -> dict[str, Any]:
    """One run with so many bytes: how it ended, what was planned, and what the ledger says."""

    def use(accelerator: VirtualAccelerator) -> dict[str, Any]:
        use_quietly()
        os.environ[CACHE_VARIABLE] = tempfile.mkdtemp()
        try:
            pipe = place(recipes()[name].make(), device, dtype="float32")
            anyaccel.reset_peak_memory(device)
            made = run(recipes()[name], pipe)
        except DoesNotFitError as error:
            gc.collect()
            return {"error": str(error)}
        forecast = pipe.plan.report.forecast
        return {
            "rule": str(pipe.plan.memory_in_use),
            "predicted": forecast.peak_bytes if forecast else None,
            "peak": anyaccel.max_memory(device),
            "off": float(numpy.abs(made - reference).max()),
        }

    return run_forked(device, use, memory=str(capacity))


def sweep_capacities(name: str, device: str, shrink: float = SHRINK) -> Iterator[dict[str, Any]]:
    """From all that is needed down to the first capacity at which nothing fits."""
    full, reference = measure_full(name, device)
    capacity = int(full * 1.05)
    while capacity > 1000:
        row = {"pipeline": name, "device": device, "capacity": capacity}
        row |= run_within(name, device, capacity, reference)
        yield row
        if "error" in row:
            return
        capacity = int(capacity * shrink)


@contextmanager
def failing_at(number: int, counted: list[int]) -> Iterator[None]:
    """Let one allocation of the device fail, by its number; `counted` holds how many there were."""
    real = MemoryTracker.add

    def add(self: MemoryTracker, tensor: torch.Tensor, index: int) -> None:
        known = self._alive.get(tensor.untyped_storage()._cdata)
        if known is None or known[0]() is None:
            counted[0] += 1
            if counted[0] == number:
                raise torch.OutOfMemoryError("out of memory, injected")
        real(self, tensor, index)

    MemoryTracker.add = add  # type: ignore[method-assign]
    try:
        yield
    finally:
        MemoryTracker.add = real  # type: ignore[method-assign]


def inject(name: str, device: str, numbers: range, reference: Any) -> list[dict[str, Any]]:
    """Runs with one failing allocation each, of one placed pipeline: how each ended, and what was left behind."""

    def use(accelerator: VirtualAccelerator) -> list[dict[str, Any]]:
        use_quietly()
        rows: list[dict[str, Any]] = []
        folder = tempfile.mkdtemp()
        for number in numbers:
            counted = [0]
            oom_history._LEARNT.clear()
            os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(dir=folder)  # what one run learnt is not the next's
            row: dict[str, Any] = {"pipeline": name, "device": device, "allocation": number}
            with failing_at(number, counted):
                try:
                    pipe = place(recipes()[name].make(), device, dtype="float32")
                    made = run(recipes()[name], pipe)
                    row |= {"rule": str(pipe.plan.memory_in_use), "off": float(numpy.abs(made - reference).max())}
                except DoesNotFitError as error:
                    row["error"] = str(error)
            row["allocations"] = counted[0]
            pipe = None
            gc.collect()
            row["left"] = anyaccel.memory(device).used_bytes
            rows.append(row)
            if counted[0] < number:  # there are no more
                break
        shutil.rmtree(folder)
        return rows

    return run_forked(device, use, timeout_s=3600)


def main() -> None:
    """Print a row a line; exit 1 if one is wrong."""
    what, *devices = sys.argv[1:]
    wrong = 0
    for device in devices:
        for name in FIVE:
            if what == "capacities":
                rows: Any = sweep_capacities(name, device)
            else:
                rows = inject(name, device, range(1, 10**6, 10), measure_full(name, device)[1])
            for row in rows:
                bad = row.get("off", 0) > SAME or row.get("left", 0) or row.get("peak", 0) > row.get("capacity", 2**62)
                wrong += bool(bad)
                print(json.dumps(row | ({"wrong": True} if bad else {})), flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
