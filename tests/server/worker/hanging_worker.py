"""A worker in which one operation never returns, as if the device's driver hung."""

import ctypes
from pathlib import Path
from typing import Any

from anyaccel.processes.pipe_worker import ParentPipe
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker.transport import WorkerProcess
from anyaccel.server.worker.worker import run_worker

__all__ = ["HangingWorker"]


class HangingWorker(WorkerProcess):
    """A worker whose next convolution hangs if the file `hang` exists in the data folder."""

    def __init__(self, settings: ServerSettings) -> None:
        super(WorkerProcess, self).__init__(_run, settings, name="anyaccel-worker")
        self._max_in_flight = settings.max_in_flight


def _run(pipe: ParentPipe, settings: ServerSettings) -> None:
    _patch_convolutions(settings.data / "hang")
    run_worker(pipe, settings)


def _patch_convolutions(mark: Path) -> None:
    import torch

    original = torch.nn.Conv2d.forward

    def forward(self: torch.nn.Conv2d, *args: Any) -> torch.Tensor:
        if mark.exists():
            mark.unlink()
            ctypes.CDLL(None).pause()  # releases the GIL and returns only after a signal
        return original(self, *args)

    torch.nn.Conv2d.forward = forward  # type: ignore[method-assign]
