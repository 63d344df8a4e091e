"""Batch worker pool in which each worker is a Ray actor on any node with a free device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from anyaccel.cluster.batch.image_worker import ImageWorker, RowFailed, RowImage, WorkerFacts, WorkerSettings
from anyaccel.cluster.batch.local_worker_pool import Event, RowsFinished, WorkerDied, WorkerStarted, WorkerStartFailed
from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.cluster.device_slots import claim_device
from anyaccel.cluster.ray_cluster import environment
from anyaccel.errors import AnyaccelError
from anyaccel.library_logging import quiet_libraries

__all__ = ["RayWorkerPool"]


class _Actor:
    """Ray actor that runs one batch worker.

    The model is loaded by `load`, which returns errors instead of raising them. The constructor does
    not load it, because Ray reports only that the actor died if a constructor raises an exception.
    """

    def __init__(self, settings: WorkerSettings, counted_by_ray: bool) -> None:
        self.settings, self.counted_by_ray = settings, counted_by_ray

    def load(self) -> WorkerFacts | AnyaccelError:
        try:
            if not self.counted_by_ray:
                # The lock stays open as long as the actor lives.
                device, self.device_lock = claim_device(self.settings.device)
                self.settings = replace(self.settings, device=device)
            self.quiet = ExitStack()  # until the actor's process ends
            self.quiet.enter_context(quiet_libraries())
            self.worker = ImageWorker(self.settings)
        except AnyaccelError as error:
            return error
        except Exception as error:  # noqa: BLE001 - reported by the runner
            return AnyaccelError(
                f"cannot load the model: {type(error).__name__}: {error}",
                hint="run `anyaccel generate` with the same model and device to reproduce the error",
            )
        return self.worker.facts

    def generate(self, rows: list[BatchRow]) -> list[RowImage | RowFailed]:
        return self.worker.generate(rows)


@dataclass
class _RayWorker:
    actor: Any
    pending: deque[Any] = field(default_factory=deque)
    """Object references of the actor's results, in the order of its calls."""


class RayWorkerPool:
    """Worker pool in which each worker is a Ray actor in the connected cluster.

    `options` are the Ray actor options for each worker, such as `num_gpus`.
    """

    def __init__(self, options: Mapping[str, Any], counted_by_ray: bool) -> None:
        import ray

        self._ray, self._counted_by_ray = ray, counted_by_ray
        self._actor = ray.remote(_Actor).options(**options, max_restarts=0, runtime_env=environment())
        self._workers: dict[int, _RayWorker] = {}

    def start(self, worker: int, settings: WorkerSettings) -> None:
        """Create an actor and load its model; Ray starts the actor as soon as resources are free."""
        actor: Any = self._actor.remote(settings, self._counted_by_ray)
        self._workers[worker] = _RayWorker(actor, deque([actor.load.remote()]))

    def submit(self, worker: int, rows: Sequence[BatchRow]) -> None:
        """Queue rows on an actor, which processes them in submission order; do nothing if the actor has died."""
        state = self._workers.get(worker)
        if state is not None:
            state.pending.append(state.actor.generate.remote(list(rows)))

    def wait(self, seconds: float) -> list[Event]:
        """Wait until an actor finishes its oldest pending call, and return the resulting events.

        The list is empty if no call finishes within `seconds` seconds.
        """
        awaited = {state.pending[0]: worker for worker, state in self._workers.items() if state.pending}
        if not awaited:
            return []
        ready, _ = self._ray.wait(list(awaited), num_returns=1, timeout=seconds)
        return [self._read(awaited[reference]) for reference in ready]

    def stop(self) -> None:
        """Kill all actors."""
        for state in self._workers.values():
            self._ray.kill(state.actor)
        self._workers.clear()

    def _read(self, worker: int) -> Event:
        state = self._workers[worker]
        try:
            result = self._ray.get(state.pending.popleft())
        except self._ray.exceptions.RayError as error:
            del self._workers[worker]
            return WorkerDied(worker, _format_error(error))
        if isinstance(result, WorkerFacts):
            return WorkerStarted(worker, result)
        if isinstance(result, AnyaccelError):
            # Frees the device for other actors.
            del self._workers[worker]
            self._ray.kill(state.actor)
            return WorkerStartFailed(worker, result)
        return RowsFinished(worker, result)


def _format_error(error: BaseException) -> str:
    # Only the first line: Ray's messages list nodes, processes and tips.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
