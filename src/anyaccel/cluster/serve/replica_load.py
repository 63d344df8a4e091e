"""Tracking of each replica's load, and selection of a replica for each new image.

Images can share a batch only if they have the same shape: model, image size and LoRA. Images of
different shapes on one device are generated in turn. The score therefore prefers replicas that are
not generating images of other shapes and, among those, the least busy one. An idle replica is
preferred to all others. If no replica is idle, a new image goes to a replica that is generating
only images of the same shape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["REPLICA_LOAD", "ReplicaLoad", "Shape", "find_shape"]

Shape: TypeAlias = tuple[Any, ...]
# How long a lost replica gets no images; Serve notices within this time that it is dead.
_LOST_S = 30.0


def find_shape(spec: Mapping[str, Any]) -> Shape:
    """Return the model, image size and LoRA of a request, which all images in a batch must share."""
    return tuple(spec.get(name) for name in ("model", "width", "height", "lora", "lora_scale", "speed", "num_frames"))


@dataclass(frozen=True)
class _Assignment:
    app: str
    replica: str
    shape: Shape


class ReplicaLoad:
    """Record of the images that each replica is generating.

    The record is complete, because only this process sends jobs to the replicas.
    """

    def __init__(self) -> None:
        # Serve calls the routers on its own event loop, the pool uses one thread per image.
        self._lock = threading.Lock()
        self._routers: dict[str, Any] = {}
        self._assignments: dict[str, _Assignment] = {}
        self._lost: dict[str, float] = {}

    def add_router(self, app: str, router: Any) -> None:
        """Register the router that Ray Serve has created for an application."""
        with self._lock:
            self._routers[app] = router

    def list_replicas(self, app: str) -> list[str]:
        """Return the IDs of an application's running replicas, except those marked as lost."""
        router = self._routers.get(app)
        replicas = [] if router is None else [replica.unique_id for replica in list(router.curr_replicas)]
        return [replica for replica in replicas if not self.is_lost(replica)]

    def assign(self, task: str, app: str, replica: str, shape: Shape) -> None:
        """Record that a replica is generating an image."""
        with self._lock:
            self._assignments[task] = _Assignment(app, replica, shape)

    def release(self, task: str) -> str | None:
        """Remove the record of an image; return the ID of the replica it was assigned to, or None."""
        with self._lock:
            assignment = self._assignments.pop(task, None)
        return None if assignment is None else assignment.replica

    def find_replica(self, task: str) -> str | None:
        """Return the ID of the replica that is generating an image, or None if there is none."""
        with self._lock:
            assignment = self._assignments.get(task)
        return None if assignment is None else assignment.replica

    def mark_lost(self, replica: str) -> bool:
        """Exclude a dead replica that Ray Serve still lists; return False if it was already marked as lost."""
        with self._lock:
            is_new = replica not in self._lost
            self._lost[replica] = time.monotonic()
            return is_new

    def is_lost(self, replica: str) -> bool:
        """Return whether a replica is excluded because it was recently marked as lost.

        The exclusion expires. If Ray Serve still lists the replica by then, it was only unreachable and is
        used again.
        """
        with self._lock:
            return time.monotonic() - self._lost.get(replica, -_LOST_S) < _LOST_S

    def score(self, replica: str, shape: Shape, limit: int) -> tuple[bool, int, float]:
        """Return a key for sorting replicas by their suitability for an image; lower is better.

        The key consists of whether the replica is full, how many images with a different model, size or
        LoRA it is generating, and its utilization.
        """
        with self._lock:
            shapes = [item.shape for item in self._assignments.values() if item.replica == replica]
        return len(shapes) >= limit, sum(other != shape for other in shapes), len(shapes) / limit

    def choose_app(self, apps: Mapping[str, int], shape: Shape) -> str | None:
        """Return the application that has the best replica for an image, or None if no replica is available.

        `apps` maps each application to the maximum number of concurrent images per replica.
        """
        scores = [
            (self.score(replica, shape, limit), position, app)
            for position, (app, limit) in enumerate(apps.items())
            for replica in self.list_replicas(app)
        ]
        # `position` breaks ties in favor of the application that became ready first.
        return min(scores)[2] if scores else None


# Shared by the pool and the routers. Serve creates the routers, so it cannot be passed to them.
REPLICA_LOAD = ReplicaLoad()
