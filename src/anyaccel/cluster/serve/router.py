"""Ray Serve request router that chooses a replica by its load and the images it is generating."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# Serve pickles the router class by value. `from replica_load import REPLICA_LOAD` would copy the object with the class;
# an attribute of the module is looked up in the current process.
from anyaccel.cluster.serve import replica_load
from anyaccel.server.worker.messages import RunJob

__all__ = ["ShapeRouter"]


class ShapeRouter(RequestRouter):
    """Ray Serve request router that ranks replicas by `ReplicaLoad.score`.

    It runs in the process that holds the deployment handle. Ray Serve still asks the chosen replica
    whether it accepts the request.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Register this router with `REPLICA_LOAD`, which reads the list of running replicas from it."""
        replica_load.REPLICA_LOAD.add_router(self.app_name, self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidate replicas, best first, without those marked as lost."""
        running = [
            replica
            for replica in candidate_replicas
            if not replica_load.REPLICA_LOAD.is_lost(replica.replica_id.unique_id)
        ]
        message = _find_run_job(pending_request)
        if message is None or not running:
            return [running]
        shape = replica_load.find_shape(message.spec)
        replica_load.REPLICA_LOAD.release(message.job)
        ranked = _rank(running, shape)
        # Assigned before Serve has routed it, so that concurrent requests see this image.
        replica_load.REPLICA_LOAD.assign(message.job, self.app_name, ranked[0].replica_id.unique_id, shape)
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica accepted the request; it may not be the highest-ranked one."""
        message = _find_run_job(pending_request)
        if message is not None:
            shape = replica_load.find_shape(message.spec)
            replica_load.REPLICA_LOAD.assign(message.job, self.app_name, replica_id.unique_id, shape)


def _rank(replicas: Iterable[RunningReplica], shape: replica_load.Shape) -> list[RunningReplica]:
    load = replica_load.REPLICA_LOAD
    return sorted(
        replicas,
        key=lambda replica: load.score(replica.replica_id.unique_id, shape, max(1, replica.max_ongoing_requests)),
    )


def _find_run_job(pending: PendingRequest | None) -> RunJob | None:
    argument = pending.args[0] if pending is not None and pending.args else None
    return argument if isinstance(argument, RunJob) else None
