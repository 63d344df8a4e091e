"""`torchrun` for a Ray cluster: runs a program with one rank per device.

    python -m anyaccel.cluster.torchrun_on_ray --ray 10.0.0.1:6379 --device hpu --ranks 8 program.py

Each rank is a process with torchrun's environment variables, on any machine where Ray has a free
device. If one rank fails, all ranks are terminated. The program must have the same path on all
machines.
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

__all__ = ["RankResult", "run_ranks"]

_MAX_OUTPUT_CHARACTERS = 4000


@dataclass(frozen=True)
class RankResult:
    """Exit status and output of a rank."""

    rank: int
    status: int
    output: str
    """The end of stdout and stderr."""


class _Rank:
    """Ray actor that runs one rank as a child process."""

    def find_address(self) -> tuple[str, int]:
        """Return this node's IP address and a free port."""
        from ray import util

        # Another process may bind the port before rank 0 does (https://github.com/pytorch/pytorch/pull/13109), but a
        # fixed port would collide with every other run on the node.
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = int(listener.getsockname()[1])
            return str(util.get_node_ip_address()), port  # type: ignore[no-untyped-call]

    def run(self, rank: int, command: list[str], folder: str, environment: dict[str, str]) -> RankResult:
        """Run the rank's process and wait for it to exit; the process is killed if this actor dies."""
        # `ray.kill` runs no cleanup in the actor, so `end_with_parent` makes the kernel kill the process.
        completed = subprocess.run(
            command, env={**os.environ, **environment}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False, preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
        return RankResult(rank, completed.returncode, completed.stdout[-_MAX_OUTPUT_CHARACTERS:])


def run_ranks(command: Sequence[str], ranks: int, options: Mapping[str, Any]) -> list[RankResult]:
    """Run a command as several ranks on the connected Ray cluster, and return their results.

    `options` are the Ray actor options for each rank. If one rank fails, the others are terminated.
    """
    import ray

    actor_class = ray.remote(_Rank).options(**options, max_restarts=0)
    actors: list[Any] = [actor_class.remote() for _ in range(ranks)]
    try:
        addresses = ray.get([actor.find_address.remote() for actor in actors])
        # Rank 0 hosts torch.distributed's store, so all ranks get the address of its node.
        address, port = addresses[0]
        ranks_per_node = Counter[str]()
        pending = {}
        for rank, (actor, (node, _)) in enumerate(zip(actors, addresses, strict=True)):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(ranks_per_node[node]),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            # LOCAL_RANK counts the ranks of one node, as in torchrun.
            ranks_per_node[node] += 1
            pending[actor.run.remote(rank, list(command), os.getcwd(), environment)] = rank
        return _wait(ray, pending)
    finally:
        # Killing an actor also kills the process of its rank, which may wait for a rank that failed.
        for actor in actors:
            ray.kill(actor)


def _wait(ray: Any, pending: dict[Any, int]) -> list[RankResult]:
    """Wait for all ranks and return their results; if one fails, return the results so far.

    The remaining ranks would otherwise wait forever for the failed one.
    """
    results: list[RankResult] = []
    while pending:
        (finished,), _ = ray.wait(list(pending), num_returns=1)
        rank = pending.pop(finished)
        try:
            results.append(ray.get(finished))
        except ray.exceptions.RayError as error:
            raise AnyaccelError(
                f"rank {rank} failed: {type(error).__name__}",
                hint="check the output of this rank in the Ray logs (/tmp/ray), then start all ranks again",
            ) from error
        if results[-1].status:
            break
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program as several ranks, print the output of rank 0 and return the exit status."""
    from anyaccel.backends.device import sheet
    from anyaccel.cluster.device_slots import slots_from_name
    from anyaccel.cluster.ray_cluster import check_slots, join, resources_for

    parser = argparse.ArgumentParser(prog="python -m anyaccel.cluster.torchrun_on_ray", description=__doc__)
    parser.add_argument("--ray", default="auto", metavar="ADDRESS")
    parser.add_argument("--device", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    try:
        if options.ranks < 1:
            raise UsageError(f"--ranks must be at least 1, not {options.ranks}", hint="for example --ranks 2")
        if not options.program:
            raise UsageError("missing program", hint="pass a Python file, for example: --ranks 2 program.py")
        slots = slots_from_name(options.device)
        join(options.ray)
        device_sheet = sheet(slots.name)
        check_slots(device_sheet, slots.virtual, options.ranks)
        results = run_ranks(
            [sys.executable, *options.program], options.ranks, resources_for(device_sheet, slots.virtual)
        )
    except AnyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    failed = next((result for result in results if result.status), None)
    if failed is not None:
        print(failed.output, file=sys.stderr)
        print(f"error: rank {failed.rank} exited with status {failed.status}", file=sys.stderr)
        return 1
    print(next(result for result in results if result.rank == 0).output, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
