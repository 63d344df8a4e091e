"""A worker in which one operation never returns, as if the device's driver hung."""

import ctypes
from pathlib import Path
from typing import Any

from anyaccel.processes.pipe_worker import ParentPipe
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker import worker
from anyaccel.server.worker.messages import ModelFacts
from anyaccel.server.worker.transport import WorkerProcess

__all__ = ["HangingWorker"]


class HangingWorker(WorkerProcess):
    """A worker whose next convolution hangs if the file `hang` exists in the data folder."""

    def __init__(self, settings: ServerSettings) -> None:
        super(WorkerProcess, self).__init__(_run, settings, name="anyaccel-worker")
        self._max_in_flight = settings.max_in_flight


def _run(pipe: ParentPipe, settings: ServerSettings) -> None:
    worker.Worker = _PatchedWorker  # type: ignore[misc]
    worker.run_worker(pipe, settings)


class _PatchedWorker(worker.Worker):
    def _load(self) -> tuple[ModelFacts, ...]:
        _patch_convolutions(self.settings.data / "hang")
        return super()._load()


def _patch_convolutions(mark: Path) -> None:
    import torch

    original: Any = torch.nn.Conv2d.forward

    def forward(self: Any, *args: Any) -> Any:
        if mark.exists():
            mark.unlink()
            ctypes.CDLL(None).pause()  # releases the GIL and returns only after a signal
        return original(self, *args)

    torch.nn.Conv2d.forward = forward  # type: ignore[assignment,method-assign]
