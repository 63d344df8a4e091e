"""`anyaccel batch` as users run it: real workers, real deaths, real Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.batch.batch_kills import (
    ENVIRONMENT,
    TwoNodes,
    check_pictures,
    find_workers,
    read_manifest,
    start_batch,
    write_rows,
)
from tests.conftest import RunCli

ROWS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny pipeline of Stable Diffusion's kind, saved."""
    from anyaccel.recipes import recipes

    place = tmp_path_factory.mktemp("models") / "tiny"
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    """The rows, and their pictures as a single worker makes them."""
    place = tmp_path_factory.mktemp("alone")
    done = start_batch(write_rows(place / "rows.jsonl", ROWS), place / "out", "--model", model)
    out, errors = done.communicate(timeout=400)
    assert done.returncode == 0, errors
    assert out == f"{ROWS} of {ROWS} images: {place / 'out' / 'manifest.jsonl'}\n"
    assert "worker 0: StableDiffusionPipeline on cpu:0 in float32" in errors
    assert "a minute" in errors
    return place


def wait_for(out: Path, lines: int) -> None:
    end = time.monotonic() + 400
    while len(read_manifest(out)) < lines:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_pictures_are_those_of_the_library(alone: Path, model: str) -> None:
    import anyaccel
    from anyaccel.generation.image_format import read_metadata

    line = read_manifest(alone / "out")[4]
    assert {"row", "prompt", "seed", "num_inference_steps", "path", "sha256", "device", "seconds"} <= set(line)
    (origin,) = read_metadata(alone / "out" / line["path"])
    assert (origin.prompt, origin.seed, origin.steps) == (line["prompt"], line["seed"], 2)
    from PIL import Image, ImageChops

    here = anyaccel.generate(**{**origin.arguments(), "model": model})
    with Image.open(alone / "out" / line["path"]) as made:
        extrema: Any = ImageChops.difference(made, here[0]).getextrema()
    assert max(high for _, high in extrema) <= 1


def kill_worker_and_leader(leader: "subprocess.Popen[str]", out: Path) -> list[psutil.Process]:
    """Kill a worker after three pictures and the leader after eight; the workers that the leader had."""
    wait_for(out, 3)
    first = find_workers(leader.pid)
    if not first:  # the leader has ended already
        leader.communicate()
        return []
    first[0].kill()
    wait_for(out, 8)
    workers = find_workers(leader.pid)
    leader.send_signal(signal.SIGKILL)
    leader.communicate()
    return workers


@pytest.mark.long
def test_workers_and_the_leader_may_die(tmp_path: Path, alone: Path, model: str) -> None:
    rows = alone / "rows.jsonl"
    for attempt in range(10):  # where the test was held up, all rows are made before anything is killed
        out = tmp_path / str(attempt)
        leader = start_batch(rows, out, "--model", model, "--workers", "2")
        workers = kill_worker_and_leader(leader, out)
        made = len(read_manifest(out))
        if workers and made < ROWS:
            break
    assert made < ROWS
    assert workers
    for worker in workers:
        worker.wait(120)  # they end with it
    (out / "pictures" / ".anyaccel-0123456789abcdef.tmp").write_bytes(b"half")  # as one that is killed may leave it
    again = start_batch(rows, out, "--model", model, "--workers", "2", "--json")
    told, errors = again.communicate(timeout=400)
    assert again.returncode == 0, errors
    summary = json.loads(told)
    assert (summary["rows"], summary["done"], summary["failed"]) == (ROWS, ROWS, 0)
    assert ROWS - summary["made"] >= made
    assert check_pictures(out, alone / "out", ROWS) == []


@pytest.mark.long
@pytest.mark.parametrize("ended", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interruption_is_told_and_the_folder_goes_on(ended: bool, tmp_path: Path, model: str) -> None:
    out = tmp_path / "out"
    rows = 40 * ROWS  # more than are made while the test is held up
    leader = start_batch(write_rows(tmp_path / "rows.jsonl", rows), out, "--model", model)
    wait_for(out, 2)
    leader.send_signal(signal.SIGTERM if ended else signal.SIGINT)
    _, errors = leader.communicate(timeout=240)
    assert leader.returncode == (143 if ended else 130)
    assert f"of {rows} rows are finished; run the same command again to resume" in errors
    assert "Traceback" not in errors
    assert "leaked" not in errors


@pytest.mark.long
def test_a_row_that_fails_is_reported_and_the_rest_is_made(tmp_path: Path, model: str) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text(
        '{"prompt": "a cat", "num_inference_steps": 1}\n'
        '{"prompt": "a cat", "num_inference_steps": 1, "width": 17}\n'
        '{"prompt": "a cat", "num_inference_steps": 1, "guidance_scale": "much"}\n'
        '{"prompt": "a dog", "num_inference_steps": 1}\n'
    )
    done = start_batch(rows, out, "--model", model)
    told, errors = done.communicate(timeout=400)
    assert done.returncode == 1, errors
    assert told.startswith("2 of 4 images, 2 failed")
    failed = {line["row"]: line["error"] for line in read_manifest(out) if "error" in line}
    assert set(failed) == {2, 3}
    assert "width must be a multiple of" in failed[2]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("{", [], "line 1: it is no JSON"),
        ('{"prompt": "x"}', ["--workers", "999"], "999 workers were asked for, and there "),
        ('{"prompt": "x"}', ["--device", "virtual:hpu,count=2", "--workers", "3"], "there are 2 hpu devices"),
        ('{"prompt": "x"}', ["--model", "no/such/folder/here"], "no/such/folder/here"),
        ('{"prompt": "x"}', ["--speed", "warp"], "speed must be one of"),
        ('{"prompt": "x"}', ["--device", "virtual:nope"], "unknown device 'nope'"),
        ('{"prompt": "x"}', ["--device", "virtual:hpu,count=0"], "at least one device and at most 999, not 0"),
        ('{"prompt": "x"}', ["--device", "virtual:hpu:2"], "hint: write virtual:hpu,count=2"),
        ('{"prompt": "x"}', ["--device", "cpu:5"], "there is no cpu:5"),
        ('{"prompt": "x"}', ["--ray", "127.0.0.1:9", "--device", "cpu"], "no Ray cluster answers at 127.0.0.1:9"),
        ('{"prompt": "x"}', ["--ray", "127.0.0.1:9"], "the device that it has"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(
    run_cli_forked: RunCli, tmp_path: Path, content: str, options: list[str], words: str
) -> None:
    check_refused(run_cli_forked, tmp_path, content, options, words)


@pytest.mark.long
def test_what_the_model_does_not_take_is_said_before_the_work(run_cli: RunCli, tmp_path: Path, model: str) -> None:
    check_refused(run_cli, tmp_path, '{"prompt": "x", "sedd": 3}', ["--model", model], "takes no sedd")


def check_refused(run: RunCli, folder: Path, content: str, options: list[str], words: str) -> None:
    rows, out = folder / "rows.jsonl", folder / "out"
    rows.write_text(content)
    done = run("batch", str(rows), "--out", str(out), *options, **ENVIRONMENT)
    assert done.returncode in (1, 2, 3), done.stderr
    assert words in done.stderr
    assert "hint: " in done.stderr
    assert not list(out.glob("pictures/*"))


@pytest.mark.long
def test_on_ray_the_same_worker_runs(tmp_path: Path, model: str) -> None:
    """On a cluster of its own; two nodes, with workers and a node that die, are the slow test."""
    rows, out = write_rows(tmp_path / "rows.jsonl", 3), tmp_path / "out"
    leader = start_batch(rows, out, "--model", model, "--ray", "local", "--workers", "1")
    told, errors = leader.communicate(timeout=600)
    assert leader.returncode == 0, errors
    assert told == f"3 of 3 images: {out}/manifest.jsonl\n"
    assert [line["row"] for line in read_manifest(out)] == [1, 2, 3]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """Two raylets."""
    found = TwoNodes()
    yield found
    found.end()


@pytest.mark.slow
def test_on_ray_workers_and_nodes_may_die(tmp_path: Path, alone: Path, model: str, nodes: TwoNodes) -> None:
    out = tmp_path / "out"
    options = ["--model", model, "--ray", nodes.address, "--workers", "2"]
    leader = start_batch(alone / "rows.jsonl", out, *options)
    wait_for(out, 2)
    nodes.find_workers()[0].kill()
    wait_for(out, 5)
    nodes.replace_second()
    told, errors = leader.communicate(timeout=600)
    assert leader.returncode == 0, errors
    assert told == f"{ROWS} of {ROWS} images: {out}/manifest.jsonl\n", "what Ray says of the dead goes to stderr"
    assert "another takes its place" in errors
    assert check_pictures(out, alone / "out", ROWS) == []


RANK = """
import sys, torch
torch.distributed.init_process_group("gloo")
rank, number = torch.distributed.get_rank(), torch.ones(1)
if sys.argv[1:] == ["fail"] and rank == 1:
    sys.exit(3)
torch.distributed.all_reduce(number)
print("rank", rank, "of", int(number))
"""


@pytest.mark.slow
def test_ray_starts_ranks_and_one_that_fails_ends_all(tmp_path: Path, nodes: TwoNodes) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = [
        sys.executable,
        "-m",
        "anyaccel.cluster.torchrun_on_ray",
        "--ray",
        nodes.address,
        "--device",
        "cpu",
        "--ranks",
    ]

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, **ENVIRONMENT}
        return subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=400, env=environment, check=False
        )

    done = run("2", str(program))
    assert (done.returncode, done.stdout) == (0, "rank 0 of 2\n"), done.stderr
    failed = run("2", str(program), "fail")
    assert failed.returncode == 1
    assert "rank 1 ended with status 3" in failed.stderr
    assert "the cluster has room for 2" in run("3", str(program)).stderr


@pytest.mark.slow
def test_eight_workers_on_a_virtual_server(tmp_path: Path, model: str) -> None:
    check_own_devices(tmp_path, model, 8)


def check_own_devices(folder: Path, model: str, count: int) -> None:
    rows, out = write_rows(folder / "rows.jsonl", 20 * count), folder / "out"
    done = start_batch(rows, out, "--model", model, "--device", f"virtual:hpu,count={count}")
    told, errors = done.communicate(timeout=400)
    assert done.returncode == 0, errors
    assert told.startswith(f"{20 * count} of {20 * count} images")
    by_worker = {(line["worker"], line["device"]) for line in read_manifest(out)}
    assert by_worker == {(number, f"hpu:{number}") for number in range(count)}
    assert errors.count("virtual: nothing here is about hardware") == count
