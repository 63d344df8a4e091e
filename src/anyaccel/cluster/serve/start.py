"""Start the service on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from anyaccel.cluster.ray_cluster import import_ray, join, leave, started_here
from anyaccel.cluster.serve.applications import Applications, find_device_groups, import_serve
from anyaccel.cluster.serve.replica_pool import ReplicaPool
from anyaccel.server.run_server import serve
from anyaccel.server.settings import ServerSettings

__all__ = ["serve_on_ray"]


def serve_on_ray(
    settings: ServerSettings,
    address: str,
    devices: Sequence[str],
    replicas: int | str | None,
    on_progress: Callable[[str], None],
    on_ready: Callable[[str], None],
) -> None:
    """Serve as `server.serve.serve` does, with the pictures made by replicas in a cluster."""
    on_progress("joining the Ray cluster" if address not in ("auto", "local") else "looking for a Ray cluster")
    join(address)
    try:
        kinds = find_device_groups(devices, replicas, settings.max_batch)
        with _leaving_serve_as_it_was():
            serve(settings, on_progress, on_ready, lambda current: ReplicaPool(Applications(current, kinds)))
    finally:
        leave()


@contextmanager
def _leaving_serve_as_it_was() -> Iterator[None]:
    """Ray Serve itself ends with us, if we started it and nobody else came to use it."""
    serve = import_serve()
    try:
        import_ray().get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        was_there = True
    except ValueError:
        was_there = False
    try:
        yield
    finally:
        if not was_there and not started_here() and not serve.status().applications:
            serve.shutdown()
