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
        from anyaccel.bench.case import BenchCase
        from anyaccel.bench.pipelines import make_call, make_pipeline

        case = BenchCase.from_dict(job["case"])
        self.opened, self.torch = open_device(case.device), torch
        self.pipe = make_pipeline(case, job["variant"])
        self.call, self.folder = make_call(case, self.pipe), Path(job["folder"])
        self.variant = job["variant"]

    def generate(self) -> tuple[Any, float]:
        """Generate an image; return the pipeline's output and the elapsed time in seconds."""
        from anyaccel.bench.pipelines import drawing_in_float32

        driver, index = self.opened.driver, self.opened.index
        generator = self.torch.Generator("cpu").manual_seed(0)
        with drawing_in_float32(), self.torch.no_grad():
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

        # Read right after the first image, so that the compile times explain its time.
        first_s, compile_times = self.generate()[1], _read_compile_times()
        output = None
        for _ in range(images - 1):
            output, _ = self.generate()
        output = output if output is not None else self.generate()[0]
        numpy.save(self.folder / f"{self.variant}.npy", output.images.float().cpu().numpy())
        return {"first_picture_s": round(first_s, 4), **({"compiling_s": compile_times} if compile_times else {})}

    def measure(self) -> dict[str, Any]:
        """Generate one image and return the elapsed time in seconds."""
        return {"seconds": self.generate()[1]}

    def finish(self) -> dict[str, Any]:
        """Generate another image; return its peak memory and, for anyaccel, the plan and a profile."""
        from anyaccel.bench.case import FAST, OURS
        from anyaccel.errors import NotMeasurableError

        # After the timed images, because the profiler slows a call down.
        result: dict[str, Any] = {}
        with contextlib.suppress(NotMeasurableError):
            self.opened.driver.reset_peak_memory(self.opened.index)
            self.generate()
            result["peak_bytes"] = self.opened.driver.max_memory(self.opened.index)
            result["held_bytes"] = self._read_reserved_bytes()
        if self.variant in (OURS, FAST):
            result["plan"] = {name: f"{decision}: {decision.reason}" for name, decision in self.pipe.plan.decisions()}
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
