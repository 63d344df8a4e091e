"""Routing of two image shapes with real Ray Serve, the real router, and replicas that only sleep.

    python -m tests.cluster.serve.shape_routing

One image of each shape starts on its own replica, then more images of both shapes follow. Prints the shapes that each
replica received, and the device groups that the cluster accepts.
"""

import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anyaccel.cluster.ray_cluster import join, leave
from anyaccel.cluster.serve.applications import find_device_groups
from anyaccel.cluster.serve.replica_load import REPLICA_LOAD, find_shape
from anyaccel.errors import UsageError
from anyaccel.server.worker.messages import RunJob

APP, MAX_ONGOING, SHORT_IMAGES = "shape-routing", 8, 9


class SleepingReplica:
    """Fake replica: returns its id and sleeps."""

    async def generate(self, message: RunJob) -> AsyncIterator[str]:
        from ray import serve

        yield str(serve.get_replica_context().replica_id.unique_id)
        await asyncio.sleep(message.spec["seconds"])


def send(handle: Any, name: str, side: int, seconds: float) -> tuple[int, str]:
    """Send one image; return its side length and the id of its replica."""
    spec = {"model": "any", "width": side, "height": side, "seconds": seconds}
    replicas = list(handle.options(stream=True).generate.remote(RunJob(name, spec, {})))
    REPLICA_LOAD.release(name)
    return side, replicas[0]


def route_shapes() -> dict[str, list[int]]:
    """Return the side lengths of the images that each replica received."""
    from ray import serve

    deployment = serve.deployment(
        num_replicas=2,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config={"request_router_class": "anyaccel.cluster.serve.router:ShapeRouter"},
    )(SleepingReplica)
    serve.start(proxy_location="Disabled")
    handle = serve.run(deployment.bind(), name=APP, route_prefix=None)
    sides_by_replica: dict[str, set[int]] = defaultdict(set)
    with ThreadPoolExecutor(SHORT_IMAGES + 2) as threads:
        long = [threads.submit(send, handle, f"long-{side}", side, 6.0) for side in (64, 128)]
        while any(REPLICA_LOAD.find_replica(f"long-{side}") is None for side in (64, 128)):
            time.sleep(0.05)
        time.sleep(0.5)
        sides = [(64, 128, 64)[index % 3] for index in range(SHORT_IMAGES)]  # one shape twice as often
        short = [threads.submit(send, handle, f"short-{index}", side, 0.4) for index, side in enumerate(sides)]
        for future in (*long, *short):
            side, replica = future.result()
            sides_by_replica[replica].add(side)
    assert find_shape({"model": "any", "width": 64}) != find_shape({"model": "any", "width": 128})
    return {replica: sorted(sides) for replica, sides in sides_by_replica.items()}


def find_groups() -> dict[str, Any]:
    """Return the device groups, or the error, for several options on a cluster with two cores and no accelerator."""
    results: dict[str, Any] = {}
    for devices, replicas in (
        (["auto"], None), (["cpu"], 2), (["cpu"], 3), (["cpu"], "auto"), (["virtual:mps", "virtual:hpu,count=8"], 4),
        (["virtual:hpu"], 9), (["npu"], None), (["mlu"], 1), (["hpu:3"], None), (["cpu", "cpu"], None),
    ):  # fmt: skip
        try:
            groups: Any = [
                (group.device, group.replicas, group.scales, group.max_concurrent)
                for group in find_device_groups(devices, replicas, 4)
            ]
        except UsageError as error:
            groups = error.message
        results[f"{' '.join(devices)} {replicas}"] = groups
    return results


def main() -> None:
    """Run both checks in a new cluster."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        os.environ["RAY_TMPDIR"] = folder
        os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": 2})
        join("local")
        try:
            print(json.dumps({"groups": find_groups(), "shapes": list(route_shapes().values())}))
        finally:
            leave()


if __name__ == "__main__":
    main()
