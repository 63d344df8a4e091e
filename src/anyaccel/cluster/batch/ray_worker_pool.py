"""A crew of Ray actors: the same worker inside, on whichever machine has a device free."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from anyaccel.cluster.batch.image_worker import ImageWorker, RowFailed, RowImage, WorkerFacts, WorkerSettings
from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.cluster.batch.worker_pool import Event, RowsFinished, WorkerDied, WorkerStarted, WorkerStartFailed
from anyaccel.cluster.device_slots import claim_device
from anyaccel.cluster.ray_cluster import environment
from anyaccel.errors import AnyaccelError
from anyaccel.library_logging import quiet_libraries

__all__ = ["RayWorkerPool"]


class _Actor:
    """What Ray runs; an error on loading is an answer, so that it is told from a death."""

    def __init__(self, settings: WorkerSettings, counted_by_ray: bool) -> None:
        self.settings, self.counted = settings, counted_by_ray

    def load(self) -> WorkerFacts | AnyaccelError:
        try:
            if not self.counted:
                device, self.claim = claim_device(self.settings.device)
                self.settings = replace(self.settings, device=device)
            self.quiet = ExitStack()  # until the actor's process ends
            self.quiet.enter_context(quiet_libraries())
            self.maker = ImageWorker(self.settings)
        except AnyaccelError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, the leader tells it
            return AnyaccelError(
                f"{type(error).__name__}: {error}", hint="does `anyaccel generate` work with the same?"
            )
        return self.maker.facts

    def make(self, rows: list[BatchRow]) -> list[RowImage | RowFailed]:
        return self.maker.make(rows)


@dataclass
class _RayWorker:
    actor: Any
    answers: deque[Any] = field(default_factory=deque)
    """What it will say, in turn."""


class RayWorkerPool:
    """Actors of the cluster that was joined; `options` are what each takes of it."""

    def __init__(self, options: Mapping[str, Any], counted_by_ray: bool) -> None:
        import ray

        self._ray, self._counted = ray, counted_by_ray
        self._actor = ray.remote(_Actor).options(**options, max_restarts=0, runtime_env=environment())
        self._workers: dict[int, _RayWorker] = {}

    def start(self, worker: int, settings: WorkerSettings) -> None:
        """Ask for an actor; it waits until the cluster has room."""
        actor: Any = self._actor.remote(settings, self._counted)
        self._workers[worker] = _RayWorker(actor, deque([actor.load.remote()]))

    def give(self, worker: int, rows: Sequence[BatchRow]) -> None:
        """Ask an actor, which does things in turn."""
        found = self._workers.get(worker)
        if found is not None:
            found.answers.append(found.actor.make.remote(list(rows)))

    def wait(self, seconds: float) -> list[Event]:
        """Look at the next answer of each."""
        awaited = {found.answers[0]: worker for worker, found in self._workers.items() if found.answers}
        if not awaited:
            return []
        there, _ = self._ray.wait(list(awaited), num_returns=1, timeout=seconds)
        return [self._read(awaited[answer]) for answer in there]

    def stop(self) -> None:
        """Kill all."""
        for found in self._workers.values():
            self._ray.kill(found.actor)
        self._workers.clear()

    def _read(self, worker: int) -> Event:
        found = self._workers[worker]
        try:
            said = self._ray.get(found.answers.popleft())
        except self._ray.exceptions.RayError as error:
            del self._workers[worker]
            return WorkerDied(worker, _describe(error))
        if isinstance(said, WorkerFacts):
            return WorkerStarted(worker, said)
        if isinstance(said, AnyaccelError):
            del self._workers[worker]
            self._ray.kill(found.actor)
            return WorkerStartFailed(worker, said)
        return RowsFinished(worker, said)


def _describe(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
