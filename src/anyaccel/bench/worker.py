"""One variant in a process of its own: it makes a picture whenever it is told to, and says how long that took."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from anyaccel.processes.json_line_worker import connecting_to_parent

__all__ = ["main"]


class _BenchWorker:
    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        from anyaccel.backends.device import open_device
        from anyaccel.bench.case import BenchCase
        from anyaccel.bench.pipelines import make_call, make_pipeline

        work = BenchCase.from_dict(job["work"])
        self.opened, self.torch = open_device(work.device), torch
        self.pipe = make_pipeline(work, job["variant"])
        self.call, self.folder = make_call(work, self.pipe), Path(job["folder"])
        self.variant = job["variant"]

    def picture(self) -> tuple[Any, float]:
        from anyaccel.bench.pipelines import drawing_alike

        driver, index = self.opened.driver, self.opened.index
        generator = self.torch.Generator("cpu").manual_seed(0)
        with drawing_alike(), self.torch.no_grad():
            driver.synchronize(index)
            start = time.perf_counter()
            made = self.pipe(**self.call, generator=generator)
            driver.synchronize(index)
        return made, time.perf_counter() - start

    def warm_up(self, pictures: int) -> dict[str, Any]:
        """The first pictures, and the last of them in a file, to be compared."""
        import numpy

        first, compiling = self.picture()[1], _read_compile_times()
        made = None
        for _ in range(pictures - 1):
            made, _ = self.picture()
        made = made if made is not None else self.picture()[0]
        numpy.save(self.folder / f"{self.variant}.npy", made.images.float().cpu().numpy())
        return {"first_picture_s": round(first, 4), **({"compiling_s": compiling} if compiling else {})}

    def measure(self) -> dict[str, Any]:
        return {"seconds": self.picture()[1]}

    def finish(self) -> dict[str, Any]:
        """The peak of memory, where the time goes, and what was planned."""
        from anyaccel.bench.case import FAST, OURS
        from anyaccel.errors import NotMeasurableError

        found: dict[str, Any] = {}
        with contextlib.suppress(NotMeasurableError):
            self.opened.driver.reset_peak_memory(self.opened.index)
            self.picture()
            found["peak_bytes"] = self.opened.driver.max_memory(self.opened.index)
            found["held_bytes"] = self._count_held()
        if self.variant in (OURS, FAST):
            found["plan"] = {name: f"{decision}: {decision.reason}" for name, decision in self.pipe.plan.decisions()}
            found["profile"] = self._profile()
        return found

    def _count_held(self) -> int | None:
        """All that the process has of the device, with what recordings and caches hold; None where nobody tells."""
        with contextlib.suppress(RuntimeError, AttributeError):
            return int(self.torch.accelerator.max_memory_reserved(self.opened.index))
        return None

    def _profile(self) -> dict[str, Any] | None:
        """The device's kernels in one picture; None where torch's profiler knows nothing of the device."""
        from torch.profiler import ProfilerActivity, profile

        kind = getattr(ProfilerActivity, self.opened.sheet.torch_name.upper(), None)
        if kind is None or kind is ProfilerActivity.CPU:
            return None
        with profile(activities=[kind]) as seen:
            self.picture()
        kernels = sorted(seen.key_averages(), key=lambda one: -one.device_time_total)
        most = [
            {"kernel": one.key[:100], "count": one.count, "ms": round(one.device_time_total / 1e3, 2)}
            for one in kernels
        ]
        busy = round(sum(one.device_time_total for one in kernels) / 1e6, 4)
        return {"kernels": sum(one.count for one in kernels), "busy_s": busy, "most": most[:15]}


def _read_compile_times() -> dict[str, float]:
    """What torch's compiler says of its own time, the longest first; one part may be inside another."""
    from anyaccel.upstream.torch_internals import read_compile_times_s

    found = {name: round(sum(times), 2) for name, times in read_compile_times_s().items()}
    return dict(sorted(found.items(), key=lambda item: -item[1])[:12])


def main() -> None:
    """Take a job, and then a word at a time; answer each, the last one where it fails."""
    with connecting_to_parent() as (requests, answer):
        job = next(requests)
        try:
            worker = _BenchWorker(job)
            does = {"warm": lambda: worker.warm_up(job["warm"]), "go": worker.measure, "finish": worker.finish}
            for word in requests:
                answer(does[word]())
        except Exception as error:  # noqa: BLE001 - whatever it is, the other process tells it
            from anyaccel.bench.failure_text import describe_failure

            answer(describe_failure(job["variant"], error))
            sys.exit(1)


if __name__ == "__main__":
    main()
