"""A batch while its workers are killed every few seconds and its leader twice: every row has its picture, and one.

    python -m tests.cluster.batch.batch_kills --rows 1000
    python -m tests.cluster.batch.batch_kills --rows 1000 --ray

Each picture must be, to the byte, the one that a process makes that makes nothing but these rows in turn. With --ray
there are two nodes on this machine, and one of them is killed too, and replaced.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

__all__ = ["TwoNodes", "check_pictures", "find_workers", "start_batch", "write_rows"]

WORDS = ("a red apple", "a cat", "a rocket", "a green tree", "a fox", "a bird", "a boat", "a house")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


class TwoNodes:
    """A Ray cluster of two nodes on this machine, each with one core: two raylets."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.second = self.cluster.add_node(num_cpus=1)
        self.address = str(self.cluster.address)

    def replace_second(self) -> None:
        """Kill a node with -9, and add another."""
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = self.cluster.add_node(num_cpus=1)

    def find_workers(self) -> list[psutil.Process]:
        """The actors on these nodes, and on no other cluster's."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self._nodes()]
        found = [child for raylet in raylets for child in psutil.Process(raylet).children(recursive=True)]
        return [one for one in found if one.is_running() and "".join(one.cmdline()).startswith("ray::_Actor")]

    def _nodes(self) -> list[Any]:
        return list(self.cluster.list_all_nodes())  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End both."""
        self.cluster.shutdown()  # type: ignore[no-untyped-call]


def write_rows(path: Path, count: int, steps: int = 2) -> Path:
    """So many rows, each another."""
    rows = [{"prompt": WORDS[n % len(WORDS)], "seed": n, "num_inference_steps": steps} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start_batch(rows: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """`anyaccel batch` in a process of its own, in float32, on the CPU unless the options name another device."""
    command = [sys.executable, "-m", "anyaccel", "batch", str(rows), "--out", str(out), "--dtype", "float32", *options]
    command += [] if "--device" in options else ["--device", "cpu"]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


class Leader:
    """A batch under way, whose words are read while it runs: a pipe that nobody reads would stop it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.errors = process, [""]
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def end(self) -> str:
        """Wait for its end; gives what it told on stdout."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        told = self.process.stdout.read()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return told


def find_workers(leader: int) -> list[psutil.Process]:
    """The processes that work for a leader."""
    try:
        children = psutil.Process(leader).children()
        return [one for one in children if "spawn_main" in " ".join(one.cmdline())]
    except psutil.Error:
        return []


def read_manifest(out: Path) -> list[dict[str, Any]]:
    """Its lines."""
    path = out / "manifest.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half written
    return [json.loads(line) for line in whole.splitlines()]


def check_pictures(out: Path, alone: Path, rows: int) -> list[str]:
    """What is wrong: a row without a line or with two, a picture that is not the one made alone."""
    lines, wrong = read_manifest(out), []
    if sorted(line["row"] for line in lines) != list(range(1, rows + 1)):
        wrong.append(f"{len(lines)} lines for {rows} rows")
    pictures = sorted(path.name for path in (out / "pictures").glob("*"))
    if pictures != sorted(path.name for path in (alone / "pictures").iterdir()):
        wrong.append(f"{len(pictures)} files for {rows} rows")
    for line in lines:
        if "error" in line:
            wrong.append(f"row {line['row']}: {line['error']}")
        elif (out / line["path"]).read_bytes() != (alone / line["path"]).read_bytes():
            wrong.append(f"row {line['row']}: another picture")
    return wrong


def end_with_kills(
    start: Callable[[], subprocess.Popen[str]],
    out: Path,
    rows: int,
    every_s: float,
    find: Callable[[int], list[psutil.Process]] = find_workers,
    between: Callable[[int], None] = lambda kills: None,
) -> dict[str, int]:
    """Run a batch to its end, however often: a random worker is killed every so often, the leader at 1/3 and 2/3.

    Between two kills at least one picture is made: a worker takes seconds to begin, and on a busy machine many.
    """
    chance, leader, kills, starts, seen = random.Random(0), Leader(start()), 0, 1, 0
    leaders = [rows // 3, 2 * rows // 3]
    while leader.process.poll() is None:
        time.sleep(every_s)
        workers = find(leader.process.pid)
        made = len(read_manifest(out))
        if workers and made > seen and leader.process.poll() is None:
            seen = made
            chance.choice(workers).kill()
            kills += 1
            between(kills)
        if leaders and len(read_manifest(out)) >= leaders[0] and leader.process.poll() is None:
            leaders.pop(0)
            leader.process.kill()
            leader.end()
            leader, starts = Leader(start()), starts + 1
        print(f"\r{len(read_manifest(out))} of {rows}, {kills} kills, {starts} starts ", end="", file=sys.stderr)
    told = leader.end()
    assert leader.process.returncode == 0, "".join(leader.errors)
    assert told.count("\n") == 1, f"more than the summary on stdout: {told}"
    return {"rows": rows, "workers_killed": kills, "leaders_killed": starts - 1}


def main() -> None:
    """Kill, count, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--every", type=float, default=6.0)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--alone", type=Path, help="A folder of an earlier run of the same rows, made alone.")
    options = parser.parse_args()
    nodes = TwoNodes() if options.ray else None
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows = write_rows(place / "rows.jsonl", options.rows)
        alone = options.alone or place / "alone"
        first = start_batch(rows, alone)
        _, errors = first.communicate()
        assert first.returncode == 0, errors
        more = ["--workers", "2", *(["--ray", nodes.address] if nodes else [])]

        def kill_node(kills: int) -> None:
            if nodes and kills % 10 == 5:
                nodes.replace_second()

        def find(leader: int) -> list[psutil.Process]:
            return nodes.find_workers() if nodes else find_workers(leader)

        out, began = place / "out", time.monotonic()
        found = end_with_kills(lambda: start_batch(rows, out, *more), out, options.rows, options.every, find, kill_node)
        wrong = check_pictures(out, alone, options.rows)
        print(json.dumps({**found, "seconds": round(time.monotonic() - began), "wrong": wrong[:10]}))
    if nodes:
        nodes.end()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
