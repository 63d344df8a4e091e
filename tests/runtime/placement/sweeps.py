"""Run tiny pipelines with decreasing memory, and with an out-of-memory error at each allocation in turn.

python -m tests.runtime.placement.sweeps capacities hpu mps  five pipelines at decreasing capacities, until nothing fits
python -m tests.runtime.placement.sweeps injections hpu mps  an out-of-memory error at every tenth allocation
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
from typing import Any, NoReturn

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

PIPELINES = ("stable-diffusion", "stable-diffusion-xl", "pixart-alpha", "flux", "flux-2-klein")
SHRINK = 0.85
TOLERANCE = 1e-3


def silence_output() -> None:
    """Silence warnings of libraries and the log messages of retries."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def measure_full(name: str, device: str) -> tuple[int, Any]:
    """Return the peak memory of a pipeline with unlimited memory, and the image generated on the CPU."""

    def use(accelerator: VirtualAccelerator) -> int:
        silence_output()
        pipe = place(recipes()[name].make(), device, dtype="float32")
        anyaccel.reset_peak_memory(device)
        run(recipes()[name], pipe)
        return anyaccel.max_memory(device)

    def run_on_cpu() -> Any:
        silence_output()
        return run(recipes()[name], recipes()[name].make())

    return run_forked(device, use), call_in_fork(run_on_cpu)


def run_within(name: str, device: str, capacity: int, reference: Any) -> dict[str, Any]:
    """Run twice with a memory capacity in bytes; return the rule, the predicted and the measured peak, or the error."""

    def use(accelerator: VirtualAccelerator) -> dict[str, Any]:
        silence_output()
        os.environ[CACHE_VARIABLE] = tempfile.mkdtemp()
        try:
            pipe = place(recipes()[name].make(), device, dtype="float32")
            first = run(recipes()[name], pipe)
            # The placement can leave all weights on the device, if they fit there without a call. The first call then
            # moves them, so the peak of the call is that of the second one.
            anyaccel.reset_peak_memory(device)
            second = run(recipes()[name], pipe)
        except DoesNotFitError as error:
            gc.collect()
            return {"error": str(error)}
        forecast = pipe.plan.report.forecast
        return {
            "rule": str(pipe.plan.memory_in_use),
            "predicted": forecast.peak_bytes if forecast else None,
            "peak": anyaccel.max_memory(device),
            "difference": max(float(numpy.abs(image - reference).max()) for image in (first, second)),
        }

    return run_forked(device, use, memory=str(capacity))


def sweep_capacities(name: str, device: str, shrink: float = SHRINK) -> Iterator[dict[str, Any]]:
    """Run with decreasing capacities, from the peak memory down to the first capacity at which nothing fits."""
    full, reference = measure_full(name, device)
    capacity = int(full * 1.05)
    while capacity > 1000:
        row = {"pipeline": name, "device": device, "capacity": capacity}
        row |= run_within(name, device, capacity, reference)
        yield row
        if "error" in row:
            return
        capacity = int(capacity * shrink)


def raise_from_device(error: Exception) -> NoReturn:
    """Raise an error as an operation of torch does: not by a `raise` statement in code of the user."""
    exec("raise error", {"__name__": torch.__name__, "error": error})
    raise AssertionError("unreachable")


@contextmanager
def failing_at(number: int, counter: list[int]) -> Iterator[None]:
    """Make one allocation of the device fail, by its number; `counter` receives the number of allocations."""
    original = MemoryTracker.add

    def add(self: MemoryTracker, tensor: torch.Tensor, index: int) -> None:
        # A storage that is already tracked is a view or a copy of the Python object, not an allocation.
        tracked = self._alive.get(tensor.untyped_storage()._cdata)
        if tracked is None or tracked[0]() is None:
            counter[0] += 1
            if counter[0] == number:
                raise_from_device(torch.OutOfMemoryError("out of memory, injected"))
        original(self, tensor, index)

    MemoryTracker.add = add  # type: ignore[method-assign]
    try:
        yield
    finally:
        MemoryTracker.add = original  # type: ignore[method-assign]


def inject(name: str, device: str, numbers: range, reference: Any) -> list[dict[str, Any]]:
    """Run once per number with that allocation failing; return the outcomes and the memory that was not freed."""

    def use(accelerator: VirtualAccelerator) -> list[dict[str, Any]]:
        silence_output()
        rows: list[dict[str, Any]] = []
        folder = tempfile.mkdtemp()
        for number in numbers:
            counter = [0]
            oom_history._OUTCOMES.clear()
            os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(dir=folder)  # do not reuse outcomes of earlier runs
            row: dict[str, Any] = {"pipeline": name, "device": device, "allocation": number}
            with failing_at(number, counter):
                try:
                    pipe = place(recipes()[name].make(), device, dtype="float32")
                    image = run(recipes()[name], pipe)
                    difference = float(numpy.abs(image - reference).max())
                    row |= {"rule": str(pipe.plan.memory_in_use), "difference": difference}
                except DoesNotFitError as error:
                    row["error"] = str(error)
            row["allocations"] = counter[0]
            pipe = None
            gc.collect()
            row["left"] = anyaccel.memory(device).used_bytes
            rows.append(row)
            if counter[0] < number:  # the run has fewer allocations, so nothing failed
                break
        shutil.rmtree(folder)
        return rows

    return run_forked(device, use, timeout_s=3600)


def main() -> None:
    """Print one row per line; exit with status 1 if one is wrong."""
    sweep, *devices = sys.argv[1:]
    wrong = 0
    for device in devices:
        for name in PIPELINES:
            if sweep == "capacities":
                rows: Any = sweep_capacities(name, device)
            else:
                rows = inject(name, device, range(1, 10**6, 10), measure_full(name, device)[1])
            for row in rows:
                bad = (
                    row.get("difference", 0) > TOLERANCE
                    or row.get("left", 0)
                    or row.get("peak", 0) > row.get("capacity", 2**62)
                )
                wrong += bool(bad)
                print(json.dumps(row | ({"wrong": True} if bad else {})), flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
