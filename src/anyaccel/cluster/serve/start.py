"""Entry point for `anyaccel serve --ray`, which runs the service on a Ray cluster."""

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
    """Run the service like `run_server.serve`, but generate the images on replicas in a Ray cluster."""
    on_progress("joining the Ray cluster" if address not in ("auto", "local") else "looking for a Ray cluster")
    join(address)
    try:
        groups = find_device_groups(devices, replicas, settings.max_batch)
        with _stopping_serve():
            serve(settings, on_progress, on_ready, lambda current: ReplicaPool(Applications(current, groups)))
    finally:
        leave()


@contextmanager
def _stopping_serve() -> Iterator[None]:
    """Shut down Ray Serve after the `with` block if it was not running before and no application uses it."""
    serve = import_serve()
    # `serve.status()` does not raise if Serve is not running, so look for its controller.
    try:
        import_ray().get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        was_running = True
    except ValueError:
        was_running = False
    try:
        yield
    finally:
        # A cluster that was started here ends with its Serve.
        if not was_running and not started_here() and not serve.status().applications:
            serve.shutdown()
