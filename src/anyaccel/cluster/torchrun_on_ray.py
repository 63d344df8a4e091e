"""The ranks of one program on a Ray cluster, a device each: what torchrun does for the devices of one machine.

    python -m anyaccel.cluster.torchrun_on_ray --ray 10.0.0.1:6379 --device hpu --ranks 8 program.py --its arguments

Each rank is a process that finds torchrun's variables in its environment, wherever Ray has a device for it. One that
fails ends the others. The machines need the program at the same path.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.processes.signals import end_with_parent

__all__ = ["Ended", "run_ranks"]

_MOST_TOLD = 4000


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    rank: int
    status: int
    output: str
    """The last of what it printed."""


class _Rank:
    """What Ray runs: one process of the program."""

    def where(self) -> tuple[str, int]:
        """The address of its machine in the cluster, and a port there that is free."""
        from ray import util

        with socket.socket() as listening:
            listening.bind(("", 0))
            port = int(listening.getsockname()[1])
            return str(util.get_node_ip_address()), port  # type: ignore[no-untyped-call]

    def run(self, rank: int, command: list[str], folder: str, environment: dict[str, str]) -> Ended:
        """Run it to its end; it ends with this actor."""
        done = subprocess.run(
            command, env={**os.environ, **environment}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False, preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
        return Ended(rank, done.returncode, done.stdout[-_MOST_TOLD:])


def run_ranks(command: Sequence[str], ranks: int, options: Mapping[str, Any]) -> list[Ended]:
    """Run a command as so many ranks on the cluster that was joined; what each takes of it are Ray's options."""
    import ray

    actor = ray.remote(_Rank).options(**options, max_restarts=0)
    actors: list[Any] = [actor.remote() for _ in range(ranks)]
    try:
        places = ray.get([one.where.remote() for one in actors])
        address, port = places[0]
        seen = Counter[str]()
        waiting = {}
        for rank, (one, (machine, _)) in enumerate(zip(actors, places, strict=True)):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(seen[machine]),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            seen[machine] += 1
            waiting[one.run.remote(rank, list(command), os.getcwd(), environment)] = rank
        return _wait(ray, waiting)
    finally:
        for one in actors:
            ray.kill(one)


def _wait(ray: Any, waiting: dict[Any, int]) -> list[Ended]:
    """All of them, or the first that failed: the others would wait for it for ever."""
    ended: list[Ended] = []
    while waiting:
        (there,), _ = ray.wait(list(waiting), num_returns=1)
        rank = waiting.pop(there)
        try:
            ended.append(ray.get(there))
        except ray.exceptions.RayError as error:
            raise AnyaccelError(
                f"rank {rank} is gone: {type(error).__name__}", hint="start again; a picture of several ranks needs all"
            ) from error
        if ended[-1].status:
            break
    return ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program as ranks, and print what the first of them printed."""
    from anyaccel.backends.device import sheet
    from anyaccel.cluster.device_slots import slots_from_name
    from anyaccel.cluster.ray_cluster import check_places, join, resources_for

    parser = argparse.ArgumentParser(prog="python -m anyaccel.cluster.torchrun_on_ray", description=__doc__)
    parser.add_argument("--ray", default="auto", metavar="ADDRESS")
    parser.add_argument("--device", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    try:
        if asked.ranks < 1 or not asked.program:
            raise UsageError("a program and at least one rank are needed", hint="--ranks 2 program.py")
        places = slots_from_name(asked.device)
        join(asked.ray)
        found = sheet(places.name)
        check_places(found, places.virtual, asked.ranks)
        ended = run_ranks([sys.executable, *asked.program], asked.ranks, resources_for(found, places.virtual))
    except AnyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    broken = next((one for one in ended if one.status), None)
    if broken is not None:
        print(broken.output, file=sys.stderr)
        print(f"error: rank {broken.rank} ended with status {broken.status}", file=sys.stderr)
        return 1
    print(next(one for one in ended if one.rank == 0).output, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
