"""Serve's router for pictures, which goes by the board."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from anyaccel.cluster.serve import replica_load
from anyaccel.server.worker.messages import RunJob

__all__ = ["ShapeRouter"]


class ShapeRouter(RequestRouter):
    """Serve's router in the process that holds the handle; Serve still asks the replica whether it has room."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Tell the board that this is the one that knows the replicas."""
        replica_load.BOARD.add_router(self.app_name, self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they suit; the best is noted at once, for those that come meanwhile."""
        living = [one for one in candidate_replicas if not replica_load.BOARD.is_lost(one.replica_id.unique_id)]
        said = _find_run(pending_request)
        if said is None or not living:
            return [living]
        shape = replica_load.find_shape(said.work)
        replica_load.BOARD.take_off(said.job)
        ranked = _rank(living, shape)
        replica_load.BOARD.put(said.job, self.app_name, ranked[0].replica_id.unique_id, shape)
        return [[one] for one in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It went there, which may be the second best."""
        said = _find_run(pending_request)
        if said is not None:
            replica_load.BOARD.put(said.job, self.app_name, replica_id.unique_id, replica_load.find_shape(said.work))


def _rank(replicas: Iterable[RunningReplica], shape: replica_load.Shape) -> list[RunningReplica]:
    return sorted(
        replicas,
        key=lambda one: replica_load.BOARD.weigh(one.replica_id.unique_id, shape, max(1, one.max_ongoing_requests)),
    )


def _find_run(pending: PendingRequest | None) -> RunJob | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, RunJob) else None
