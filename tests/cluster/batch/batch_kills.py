"""Stress test of a batch: kills a worker every few seconds and the main process twice, then checks every row.

    python -m tests.cluster.batch.batch_kills --rows 1000
    python -m tests.cluster.batch.batch_kills --rows 1000 --ray

Every image must be byte-identical to the image of an undisturbed run with one worker. With --ray, the batch runs on a
cluster of two nodes on this machine, and one of the nodes is also killed and replaced.
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

__all__ = ["TwoNodes", "check_images", "find_workers", "start_batch", "write_rows"]

PROMPTS = ("a red apple", "a cat", "a rocket", "a green tree", "a fox", "a bird", "a boat", "a house")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


class TwoNodes:
    """Ray cluster of two nodes (raylets) on this machine, each with one core."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.second = self.cluster.add_node(num_cpus=1)
        self.address = str(self.cluster.address)

    def replace_second(self) -> None:
        """Kill a node with SIGKILL and add a new one."""
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = self.cluster.add_node(num_cpus=1)

    def find_workers(self) -> list[psutil.Process]:
        """Return the actors on these nodes, but not those of other clusters on this machine."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self._nodes()]
        children = [child for raylet in raylets for child in psutil.Process(raylet).children(recursive=True)]
        return [
            child for child in children if child.is_running() and "".join(child.cmdline()).startswith("ray::_Actor")
        ]

    def _nodes(self) -> list[Any]:
        return list(self.cluster.list_all_nodes())  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Shut the cluster down."""
        self.cluster.shutdown()  # type: ignore[no-untyped-call]


def write_rows(path: Path, count: int, steps: int = 2) -> Path:
    """Write a file with `count` different rows."""
    rows = [{"prompt": PROMPTS[n % len(PROMPTS)], "seed": n, "num_inference_steps": steps} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start_batch(rows: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Start `anyaccel batch` in float32, on the CPU unless the options name another device."""
    command = [sys.executable, "-m", "anyaccel", "batch", str(rows), "--out", str(out), "--dtype", "float32", *options]
    command += [] if "--device" in options else ["--device", "cpu"]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


class RunningBatch:
    """Batch process with a thread that reads stderr: a full pipe would block the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.errors = process, [""]
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def end(self) -> str:
        """Wait until the process ends; return its stdout."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        output = self.process.stdout.read()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return output


def find_workers(batch_pid: int) -> list[psutil.Process]:
    """Return the worker processes of a batch process."""
    try:
        children = psutil.Process(batch_pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def read_manifest(out: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a manifest."""
    path = out / "manifest.jsonl"
    complete = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be incomplete
    return [json.loads(line) for line in complete.splitlines()]


def check_images(out: Path, reference: Path, rows: int) -> list[str]:
    """Return the problems: missing or duplicate manifest lines, and images that differ from the reference run."""
    lines, problems = read_manifest(out), []
    if sorted(line["row"] for line in lines) != list(range(1, rows + 1)):
        problems.append(f"{len(lines)} lines for {rows} rows")
    names = sorted(path.name for path in (out / "images").glob("*"))
    if names != sorted(path.name for path in (reference / "images").iterdir()):
        problems.append(f"{len(names)} files for {rows} rows")
    for line in lines:
        if "error" in line:
            problems.append(f"row {line['row']}: {line['error']}")
        elif (out / line["path"]).read_bytes() != (reference / line["path"]).read_bytes():
            problems.append(f"row {line['row']}: the image differs")
    return problems


def run_with_kills(
    start: Callable[[], subprocess.Popen[str]],
    out: Path,
    rows: int,
    every_s: float,
    find: Callable[[int], list[psutil.Process]] = find_workers,
    on_kill: Callable[[int], None] = lambda kills: None,
) -> dict[str, int]:
    """Run a whole batch; kill a random worker periodically, and the main process after 1/3 and 2/3 of the rows.

    At least one image finishes between two kills, because workers may start slowly on a busy machine.
    """
    rng, batch, kills, starts, finished_at_kill = random.Random(0), RunningBatch(start()), 0, 1, 0
    restarts_at = [rows // 3, 2 * rows // 3]
    while batch.process.poll() is None:
        time.sleep(every_s)
        workers = find(batch.process.pid)
        finished = len(read_manifest(out))
        if workers and finished > finished_at_kill and batch.process.poll() is None:
            finished_at_kill = finished
            rng.choice(workers).kill()
            kills += 1
            on_kill(kills)
        if restarts_at and len(read_manifest(out)) >= restarts_at[0] and batch.process.poll() is None:
            restarts_at.pop(0)
            batch.process.kill()
            batch.end()
            batch, starts = RunningBatch(start()), starts + 1
        print(f"\r{len(read_manifest(out))} of {rows}, {kills} kills, {starts} starts ", end="", file=sys.stderr)
    output = batch.end()
    assert batch.process.returncode == 0, "".join(batch.errors)
    assert output.count("\n") == 1, f"unexpected output on stdout: {output}"
    return {"rows": rows, "workers_killed": kills, "leaders_killed": starts - 1}


def main() -> None:
    """Run the stress test and print its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--every", type=float, default=6.0)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--alone", type=Path, help="Output folder of an earlier undisturbed run of the same rows.")
    options = parser.parse_args()
    nodes = TwoNodes() if options.ray else None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = write_rows(folder / "rows.jsonl", options.rows)
        reference = options.alone or folder / "alone"
        first = start_batch(rows, reference)
        _, errors = first.communicate()
        assert first.returncode == 0, errors
        extra = ["--workers", "2", *(["--ray", nodes.address] if nodes else [])]

        def kill_node(kills: int) -> None:
            if nodes and kills % 10 == 5:
                nodes.replace_second()

        def find(batch_pid: int) -> list[psutil.Process]:
            return nodes.find_workers() if nodes else find_workers(batch_pid)

        out, start = folder / "out", time.monotonic()
        counts = run_with_kills(
            lambda: start_batch(rows, out, *extra), out, options.rows, options.every, find, kill_node
        )
        problems = check_images(out, reference, options.rows)
        print(json.dumps({**counts, "seconds": round(time.monotonic() - start), "wrong": problems[:10]}))
    if nodes:
        nodes.end()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
