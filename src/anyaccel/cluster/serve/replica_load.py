"""Which replica makes a picture: one where few of another shape run, and of those the least busy.

Only calls of one shape are joined into a batch; two shapes on one device take turns. So shapes part: once one runs here
and another there, each goes where its own is, and an idle device is taken first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["BOARD", "ReplicaLoad", "Shape", "find_shape"]

Shape: TypeAlias = tuple[Any, ...]
_NOTICED_S = 30.0
"""In this time Serve finds out that a replica is gone."""


def find_shape(work: Mapping[str, Any]) -> Shape:
    """What two pictures must share to be made in one batch."""
    return tuple(work.get(name) for name in ("model", "width", "height", "lora", "lora_scale"))


@dataclass(frozen=True)
class _ReplicaState:
    app: str
    replica: str
    shape: Shape


class ReplicaLoad:
    """Which picture is made where, as this process knows it: it is the only one that gives them out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routers: dict[str, Any] = {}
        self._places: dict[str, _ReplicaState] = {}
        self._lost: dict[str, float] = {}

    def add_router(self, app: str, router: Any) -> None:
        """Serve made a router for an application of ours."""
        with self._lock:
            self._routers[app] = router

    def list_replicas(self, app: str) -> list[str]:
        """Those that take pictures now."""
        router = self._routers.get(app)
        known = [] if router is None else [one.unique_id for one in list(router.curr_replicas)]
        return [one for one in known if not self.is_lost(one)]

    def put(self, errand: str, app: str, replica: str, shape: Shape) -> None:
        """A picture goes there."""
        with self._lock:
            self._places[errand] = _ReplicaState(app, replica, shape)

    def take_off(self, errand: str) -> str | None:
        """A picture ended, or its replica did; where it was."""
        with self._lock:
            place = self._places.pop(errand, None)
        return None if place is None else place.replica

    def find(self, errand: str) -> str | None:
        """Where a picture is made."""
        with self._lock:
            place = self._places.get(errand)
        return None if place is None else place.replica

    def lose(self, replica: str) -> bool:
        """A replica ended before Serve noticed; whether that is news."""
        with self._lock:
            news = replica not in self._lost
            self._lost[replica] = time.monotonic()
            return news

    def is_lost(self, replica: str) -> bool:
        """Whether nothing must be sent there; one that Serve still knows after a while was only out of reach."""
        with self._lock:
            return time.monotonic() - self._lost.get(replica, -_NOTICED_S) < _NOTICED_S

    def weigh(self, replica: str, shape: Shape, most: int) -> tuple[bool, int, float]:
        """How little a replica suits a picture: it is full, others of another shape run there, how busy it is."""
        with self._lock:
            here = [place.shape for place in self._places.values() if place.replica == replica]
        return len(here) >= most, sum(one != shape for one in here), len(here) / most

    def choose(self, apps: Mapping[str, int], shape: Shape) -> str | None:
        """The application whose best replica suits best, if any is there; with each, what its replicas make at once."""
        found = [
            (self.weigh(replica, shape, most), place, app)
            for place, (app, most) in enumerate(apps.items())
            for replica in self.list_replicas(app)
        ]
        return min(found)[2] if found else None


BOARD = ReplicaLoad()
"""Serve makes the routers, and they find the board here."""
