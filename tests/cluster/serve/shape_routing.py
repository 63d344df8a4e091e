"""Where pictures of two shapes go: real Ray Serve, the real router, and replicas that only wait.

    python -m tests.cluster.batch.parting

One picture of each shape runs on a replica of its own; then more come in turn. Prints which replica had which shapes,
and before that which devices and numbers of replicas the cluster takes.
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
from anyaccel.cluster.serve.replica_load import BOARD, find_shape
from anyaccel.errors import UsageError
from anyaccel.server.worker.messages import RunJob

APP, AT_ONCE, MANY = "parting", 8, 9


class Waiting:
    """Stands for a replica: tells its name, and takes its time."""

    async def make(self, said: RunJob) -> AsyncIterator[str]:
        from ray import serve

        yield str(serve.get_replica_context().replica_id.unique_id)
        await asyncio.sleep(said.work["seconds"])


def send(handle: Any, name: str, side: int, seconds: float) -> tuple[int, str]:
    """One picture; its side and the replica that had it."""
    work = {"model": "any", "width": side, "height": side, "seconds": seconds}
    told = list(handle.options(stream=True).make.remote(RunJob(name, work, {})))
    BOARD.take_off(name)
    return side, told[0]


def part() -> dict[str, list[int]]:
    """Which shapes each replica was given."""
    from ray import serve

    deployment = serve.deployment(
        num_replicas=2,
        max_ongoing_requests=AT_ONCE,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config={"request_router_class": "anyaccel.cluster.serve.router:ShapeRouter"},
    )(Waiting)
    serve.start(proxy_location="Disabled")
    handle = serve.run(deployment.bind(), name=APP, route_prefix=None)
    found: dict[str, set[int]] = defaultdict(set)
    with ThreadPoolExecutor(MANY + 2) as threads:
        long = [threads.submit(send, handle, f"long-{side}", side, 6.0) for side in (64, 128)]
        while any(BOARD.find(f"long-{side}") is None for side in (64, 128)):
            time.sleep(0.05)
        time.sleep(0.5)
        sides = [(64, 128, 64)[place % 3] for place in range(MANY)]  # one of them twice as often
        short = [threads.submit(send, handle, f"short-{place}", side, 0.4) for place, side in enumerate(sides)]
        for one in (*long, *short):
            side, replica = one.result()
            found[replica].add(side)
    assert find_shape({"model": "any", "width": 64}) != find_shape({"model": "any", "width": 128})
    return {replica: sorted(sides) for replica, sides in found.items()}


def ask_for_kinds() -> dict[str, Any]:
    """What comes of devices and numbers of replicas in a cluster of two cores and nothing else."""
    found: dict[str, Any] = {}
    for devices, replicas in (
        (["auto"], None), (["cpu"], 2), (["cpu"], 3), (["cpu"], "auto"), (["virtual:mps", "virtual:hpu,count=8"], 4),
        (["virtual:hpu"], 9), (["npu"], None), (["mlu"], 1), (["hpu:3"], None), (["cpu", "cpu"], None),
    ):  # fmt: skip
        try:
            kinds: Any = [
                (kind.device, kind.replicas, kind.scales, kind.at_once)
                for kind in find_device_groups(devices, replicas, 4)
            ]
        except UsageError as error:
            kinds = error.message
        found[f"{' '.join(devices)} {replicas}"] = kinds
    return found


def main() -> None:
    """In a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="ray") as place:
        os.environ["RAY_TMPDIR"] = place
        os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": 2})
        join("local")
        try:
            print(json.dumps({"kinds": ask_for_kinds(), "shapes": list(part().values())}))
        finally:
            leave()


if __name__ == "__main__":
    main()
