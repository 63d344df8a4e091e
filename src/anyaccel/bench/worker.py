"""Worker process for one benchmark variant: generates images on request and reports their times."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from anyaccel.processes.json_line_worker import connecting_to_parent

__all__ = ["main"]


class _BenchWorker:
    """Worker for one variant: holds its pipeline and handles the commands `warm`, `go` and `finish`."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        from anyaccel.backends.device import open_device
        from anyaccel.bench.case import ANYACCEL, BenchCase
        from anyaccel.bench.pipelines import make_call, make_pipeline

        case = BenchCase.from_dict(job["case"])
        self.opened, self.torch = open_device(case.device), torch
        self.pipe = make_pipeline(case, job["variant"])
        self.call, self.folder = make_call(case, self.pipe), Path(job["folder"])
        self.case, self.variant = case, job["variant"]
        # Before the first call, which compiles the models: a forecast traces them.
        self.forecast = _forecast(self.pipe, self.call) if self.variant in ANYACCEL else {}
        self.memory: dict[str, Any] = {}

    def generate(self) -> tuple[Any, float]:
        """Generate an image; return the pipeline's output and the elapsed time in seconds."""
        driver, index = self.opened.driver, self.opened.index
        generator = self.torch.Generator("cpu").manual_seed(0)
        with self.torch.no_grad():
            # Devices run asynchronously: wait for earlier work, and below for this call.
            driver.synchronize(index)
            start = time.perf_counter()
            output = self.pipe(**self.call, generator=generator)
            driver.synchronize(index)
        return output, time.perf_counter() - start

    def warm_up(self, images: int) -> dict[str, Any]:
        """Generate `images` warm-up images; return the time of the first one and the compile times.

        The last image is saved for comparison with the other variants.
        """
        import numpy

        from anyaccel.generation.pipeline_interface import read_interface

        # Read right after the first image, so that the compile times explain its time.
        first_s, compile_times = self.generate()[1], _read_compile_times()
        output = None
        for _ in range(images - 1):
            output, _ = self.generate()
        output = output if output is not None else self.generate()[0]
        # The first field: images, frames or audios. A modular pipeline returns the value of one field.
        result = self.torch.as_tensor(next(iter(output.values())) if isinstance(output, dict) else output)
        numpy.save(self.folder / f"{self.variant}.npy", result.float().cpu().numpy())
        kind = read_interface(self.pipe).kind or "image"
        return {
            "first_picture_s": round(first_s, 4),
            "kind": kind,
            **({"compiling_s": compile_times} if compile_times else {}),
        }

    def measure(self) -> dict[str, Any]:
        """Generate one image; return the elapsed time in seconds, and store the peak memory."""
        from anyaccel.errors import NotMeasurableError

        driver, index = self.opened.driver, self.opened.index
        with contextlib.suppress(NotMeasurableError):
            driver.reset_peak_memory(index)
        seconds = self.generate()[1]
        with contextlib.suppress(NotMeasurableError):
            self.memory = {"peak_bytes": driver.max_memory(index), "held_bytes": self._read_reserved_bytes()}
        return {"seconds": seconds}

    def finish(self) -> dict[str, Any]:
        """Return the peak memory of the last image and, for anyaccel, the forecast, the plan and a profile."""
        from anyaccel.bench.case import ANYACCEL

        result = {**self.memory, **self.forecast}
        if self.variant in ANYACCEL:
            plan = self.pipe.plan
            result["plan"] = {name: f"{decision}: {decision.reason}" for name, decision in plan.decisions()}
            result["memory_in_use"] = f"{plan.memory_in_use}: {plan.memory_in_use.reason}"
            result["report"] = {name: f"{outcome}: {outcome.reason}" for name, outcome in plan.report.entries()}
            # After the timed images, because the profiler slows a call down.
            if self.case.profile:
                result["profile"] = self._profile()
        return result

    def _read_reserved_bytes(self) -> int | None:
        """Return the peak reserved memory in bytes, or None if torch does not report it.

        Reserved memory includes the allocator's cache and captured graphs.
        """
        with contextlib.suppress(RuntimeError, AttributeError):
            return int(self.torch.accelerator.max_memory_reserved(self.opened.index))
        return None

    def _profile(self) -> dict[str, Any] | None:
        """Profile the generation of one image; return the kernel count, total time and slowest kernels.

        Return None if torch's profiler does not support the device.
        """
        from torch.profiler import ProfilerActivity, profile

        activity = getattr(ProfilerActivity, self.opened.sheet.torch_name.upper(), None)
        if activity is None or activity is ProfilerActivity.CPU:
            return None
        with profile(activities=[activity]) as profiler:
            self.generate()
        kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)
        # torch reports microseconds.
        rows = [
            {"kernel": kernel.key[:100], "count": kernel.count, "ms": round(kernel.device_time_total / 1e3, 2)}
            for kernel in kernels
        ]
        busy_s = round(sum(kernel.device_time_total for kernel in kernels) / 1e6, 4)
        return {"kernels": sum(kernel.count for kernel in kernels), "busy_s": busy_s, "most": rows[:15]}


def _forecast(pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return the memory that the plan predicts for a call, or the reason why it cannot be predicted."""
    from anyaccel.errors import summarize_error
    from anyaccel.runtime.call_request import read_call_request
    from anyaccel.runtime.introspection import plain_class
    from anyaccel.runtime.placement.memory_plan import forecast_call
    from anyaccel.runtime.placement_state import find_placement

    placement = find_placement(pipe)
    assert placement is not None
    try:
        forecast = forecast_call(pipe, placement, read_call_request(pipe, plain_class(pipe).__call__, (), call))
    except Exception as error:  # noqa: BLE001 - pipelines run arbitrary code; the call is measured anyway
        return {"not_forecast": summarize_error(error)}
    keys = ("peak_bytes", "recorded_peak_bytes", "phases", "components")
    return {"forecast": {key: forecast.to_dict()[key] for key in keys}}


def _read_compile_times() -> dict[str, float]:
    """Return the compile time in seconds that torch reports for each phase, longest first.

    Phases can be nested, so their sum can exceed the total time.
    """
    from anyaccel.upstream.torch_compile_internals import read_compile_times_s

    totals = {name: round(sum(times), 2) for name, times in read_compile_times_s().items()}
    return dict(sorted(totals.items(), key=lambda item: -item[1])[:12])


def main() -> None:
    """Read a benchmark job from the parent process, and run the commands that follow it.

    An error is sent to the parent process and ends this process.
    """
    with connecting_to_parent() as (requests, answer):
        job = next(requests)
        try:
            worker = _BenchWorker(job)
            commands = {"warm": lambda: worker.warm_up(job["warm"]), "go": worker.measure, "finish": worker.finish}
            for command in requests:
                answer(commands[command]())
        except Exception as error:  # noqa: BLE001 - reported by the parent process
            from anyaccel.bench.failure_rows import make_failure_row

            answer(make_failure_row(job["variant"], error))
            sys.exit(1)


if __name__ == "__main__":
    main()
