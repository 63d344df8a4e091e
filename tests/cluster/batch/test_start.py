"""End-to-end tests of `anyaccel batch` with real worker processes, kills and Ray."""

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
from typer.main import get_command
from typer.testing import CliRunner

from anyaccel.cli.main import app
from anyaccel.cluster.batch.runner import BatchSummary
from anyaccel.cluster.batch.start import BatchJob
from anyaccel.progress import ProgressListener
from tests.cluster.batch.batch_kills import (
    ENVIRONMENT,
    TwoNodes,
    check_images,
    find_workers,
    read_manifest,
    start_batch,
    write_rows,
)
from tests.conftest import RunCli

ROWS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny Stable Diffusion pipeline."""
    from anyaccel.recipes import recipes

    folder = tmp_path_factory.mktemp("models") / "tiny"
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    """Return a folder with rows and their output from a run with one worker."""
    folder = tmp_path_factory.mktemp("reference")
    done = start_batch(write_rows(folder / "rows.jsonl", ROWS), folder / "out", "--model", model)
    out, errors = done.communicate(timeout=400)
    assert done.returncode == 0, errors
    assert out == f"{ROWS} of {ROWS} images: {folder / 'out' / 'manifest.jsonl'}\n"
    assert "worker 0: StableDiffusionPipeline on cpu:0 in float32" in errors
    assert "per minute" in errors
    return folder


def wait_for(out: Path, lines: int) -> None:
    end = time.monotonic() + 400
    while len(read_manifest(out)) < lines:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_images_equal_those_of_the_library(reference: Path, model: str) -> None:
    import anyaccel
    from anyaccel.generation.image_format import read_metadata

    line = read_manifest(reference / "out")[4]
    assert {"row", "prompt", "seed", "num_inference_steps", "path", "sha256", "device", "seconds"} <= set(line)
    (metadata,) = read_metadata(reference / "out" / line["path"])
    assert (metadata.prompt, metadata.seed, metadata.steps) == (line["prompt"], line["seed"], 2)
    from PIL import Image, ImageChops

    expected = anyaccel.generate(**{**metadata.arguments(), "model": model})
    with Image.open(reference / "out" / line["path"]) as image:
        extrema: Any = ImageChops.difference(image, expected[0]).getextrema()
    assert max(high for _, high in extrema) <= 1


def kill_worker_and_main_process(batch: "subprocess.Popen[str]", out: Path) -> list[psutil.Process]:
    """Kill a worker after three images and the main process after eight; return the workers of the main process."""
    wait_for(out, 3)
    first = find_workers(batch.pid)
    if not first:  # the batch has already finished
        batch.communicate()
        return []
    first[0].kill()
    wait_for(out, 8)
    workers = find_workers(batch.pid)
    batch.send_signal(signal.SIGKILL)
    batch.communicate()
    return workers


@pytest.mark.slow
def test_workers_and_the_main_process_may_die(tmp_path: Path, reference: Path, model: str) -> None:
    """The parts run in every check: test_runner.py replaces dead workers, test_rows.py resumes a folder, and in
    tests/processes/test_pipe_worker.py workers end with their parent.
    """
    rows = reference / "rows.jsonl"
    for attempt in range(10):  # on a busy machine, all rows may finish before anything is killed
        out = tmp_path / str(attempt)
        batch = start_batch(rows, out, "--model", model, "--workers", "2")
        workers = kill_worker_and_main_process(batch, out)
        finished = len(read_manifest(out))
        if workers and finished < ROWS:
            break
    assert finished < ROWS
    assert workers
    for worker in workers:
        worker.wait(120)  # workers end with the main process
    (out / "images" / ".anyaccel-0123456789abcdef.tmp").write_bytes(b"half")  # left by a killed process
    second = start_batch(rows, out, "--model", model, "--workers", "2", "--json")
    output, errors = second.communicate(timeout=400)
    assert second.returncode == 0, errors
    summary = json.loads(output)
    assert (summary["rows"], summary["done"], summary["failed"]) == (ROWS, ROWS, 0)
    assert ROWS - summary["made"] >= finished
    assert check_images(out, reference / "out", ROWS) == []


@pytest.mark.long
@pytest.mark.parametrize("terminated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interrupted_batch_says_how_to_resume(terminated: bool, tmp_path: Path, model: str) -> None:
    out = tmp_path / "out"
    rows = 40 * ROWS  # too many to finish before the signal is sent
    batch = start_batch(write_rows(tmp_path / "rows.jsonl", rows), out, "--model", model)
    wait_for(out, 2)
    batch.send_signal(signal.SIGTERM if terminated else signal.SIGINT)
    _, errors = batch.communicate(timeout=240)
    assert batch.returncode == (143 if terminated else 130)
    assert f"of {rows} rows are finished; run the same command again to resume" in errors
    assert "Traceback" not in errors
    assert "leaked" not in errors


@pytest.mark.slow
def test_a_failed_row_is_reported_and_the_others_finish(tmp_path: Path, model: str) -> None:
    """The same as the next test, test_runner.py and test_image_worker.py, with a real worker."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text(
        '{"prompt": "a cat", "num_inference_steps": 1}\n'
        '{"prompt": "a cat", "num_inference_steps": 1, "width": 17}\n'
        '{"prompt": "a cat", "num_inference_steps": 1, "guidance_scale": "much"}\n'
        '{"prompt": "a dog", "num_inference_steps": 1}\n'
    )
    done = start_batch(rows, out, "--model", model)
    output, errors = done.communicate(timeout=400)
    assert done.returncode == 1, errors
    assert output.startswith("2 of 4 images, 2 failed")
    failed = {line["row"]: line["error"] for line in read_manifest(out) if "error" in line}
    assert set(failed) == {2, 3}
    assert "width must be a multiple of" in failed[2]


def test_the_exit_status_is_1_if_a_row_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = BatchSummary(rows=4, done=2, failed=2, made=2, seconds=1.0)
    monkeypatch.setattr("anyaccel.cluster.batch.start.run_batch", lambda job, listener: summary)
    result = CliRunner().invoke(app, ["batch", "rows.jsonl", "--out", "out"])
    assert result.exit_code == 1, result.output
    assert "2 of 4 images, 2 failed" in result.output


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("{", [], "line 1: not valid JSON"),
        ('{"prompt": "x"}', ["--workers", "999"], "999 workers requested, but there "),
        ('{"prompt": "x"}', ["--device", "virtual:hpu,count=2", "--workers", "3"], "there are only 2 hpu devices"),
        ('{"prompt": "x"}', ["--model", "no/such/folder/here"], "no/such/folder/here"),
        ('{"prompt": "x"}', ["--speed", "warp"], "speed must be one of"),
        ('{"prompt": "x"}', ["--device", "virtual:nope"], "unknown device 'nope'"),
        ('{"prompt": "x"}', ["--device", "virtual:hpu,count=0"], "must be between 1 and 999, not 0"),
        ('{"prompt": "x"}', ["--device", "virtual:hpu:2"], "hint: use virtual:hpu,count=2"),
        ('{"prompt": "x"}', ["--device", "cpu:5"], "cpu:5 is not available"),
        ('{"prompt": "x"}', ["--ray", "127.0.0.1:9", "--device", "cpu"], "cannot reach a Ray cluster at 127.0.0.1:9"),
        ('{"prompt": "x"}', ["--ray", "127.0.0.1:9"], "--ray requires --device with a device name"),
    ],
)
def test_invalid_input_is_rejected_before_a_worker_starts(
    run_cli_forked: RunCli, tmp_path: Path, content: str, options: list[str], message: str
) -> None:
    check_rejected(run_cli_forked, tmp_path, content, options, message)


@pytest.mark.slow
def test_an_argument_unknown_to_the_model_is_rejected_before_any_row_runs(
    run_cli_forked: RunCli, tmp_path: Path, model: str
) -> None:
    """The same as a test in test_runner.py and one in test_rows.py, with a real worker."""
    row = '{"prompt": "x", "sedd": 3}'
    check_rejected(run_cli_forked, tmp_path, row, ["--model", model], "unknown argument 'sedd'")


def check_rejected(run: RunCli, folder: Path, content: str, options: list[str], message: str) -> None:
    rows, out = folder / "rows.jsonl", folder / "out"
    rows.write_text(content)
    done = run("batch", str(rows), "--out", str(out), *options, **ENVIRONMENT)
    assert done.returncode in (1, 2, 3), done.stderr
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert not list(out.glob("images/*"))


@pytest.mark.parametrize("flag", ["--rows-per-call", "--rows-a-call"])
def test_rows_per_call_is_an_option_of_the_workers(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.1 called the option --rows-a-call."""
    jobs: list[BatchJob] = []

    def record(job: BatchJob, listener: ProgressListener) -> BatchSummary:
        jobs.append(job)
        return BatchSummary(rows=1, done=1, failed=0, made=1, seconds=0.0)

    monkeypatch.setattr("anyaccel.cluster.batch.start.run_batch", record)
    result = CliRunner().invoke(app, ["batch", "rows.jsonl", "--out", "out", flag, "3"])
    assert result.exit_code == 0, result.output
    assert [job.settings.rows_per_call for job in jobs] == [3]


def test_help_shows_only_the_new_name_of_rows_per_call() -> None:
    command: Any = get_command(app)
    options = {option for parameter in command.commands["batch"].params for option in parameter.opts}
    assert {"--rows-per-call", "--rows-a-call"} <= options
    text = CliRunner().invoke(app, ["batch", "--help"], env={"COLUMNS": "200"}).output
    assert "--rows-per-call" in text
    assert "--rows-a-call" not in text


@pytest.mark.long
def test_batch_on_ray(tmp_path: Path, model: str) -> None:
    """Run on a local cluster. The slow test below kills workers and nodes."""
    rows, out = write_rows(tmp_path / "rows.jsonl", 3), tmp_path / "out"
    batch = start_batch(rows, out, "--model", model, "--ray", "local", "--workers", "1")
    output, errors = batch.communicate(timeout=600)
    assert batch.returncode == 0, errors
    assert output == f"3 of 3 images: {out}/manifest.jsonl\n"
    assert [line["row"] for line in read_manifest(out)] == [1, 2, 3]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """Start a Ray cluster with two nodes."""
    cluster = TwoNodes()
    yield cluster
    cluster.end()


@pytest.mark.slow
def test_workers_and_nodes_on_ray_may_die(tmp_path: Path, reference: Path, model: str, nodes: TwoNodes) -> None:
    out = tmp_path / "out"
    options = ["--model", model, "--ray", nodes.address, "--workers", "2"]
    batch = start_batch(reference / "rows.jsonl", out, *options)
    wait_for(out, 2)
    nodes.find_workers()[0].kill()
    wait_for(out, 5)
    nodes.replace_second()
    output, errors = batch.communicate(timeout=600)
    assert batch.returncode == 0, errors
    assert output == f"{ROWS} of {ROWS} images: {out}/manifest.jsonl\n", "Ray reports dead workers on stderr"
    assert "and is replaced" in errors
    assert check_images(out, reference / "out", ROWS) == []


RANK = """
import sys, torch
torch.distributed.init_process_group("gloo")
rank, total = torch.distributed.get_rank(), torch.ones(1)
if sys.argv[1:] == ["fail"] and rank == 1:
    sys.exit(3)
torch.distributed.all_reduce(total)
print("rank", rank, "of", int(total))
"""


@pytest.mark.slow
def test_ray_runs_ranks_and_a_failed_rank_ends_all(tmp_path: Path, nodes: TwoNodes) -> None:
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

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, **ENVIRONMENT}
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=400, env=environment, check=False
        )

    done = run("2", str(program))
    assert (done.returncode, done.stdout) == (0, "rank 0 of 2\n"), done.stderr
    failed = run("2", str(program), "fail")
    assert failed.returncode == 1
    assert "rank 1 exited with status 3" in failed.stderr
    assert "the cluster has 2 slots" in run("3", str(program)).stderr


@pytest.mark.slow
def test_eight_workers_on_eight_virtual_devices(tmp_path: Path, model: str) -> None:
    check_one_device_per_worker(tmp_path, model, 8)


def check_one_device_per_worker(folder: Path, model: str, count: int) -> None:
    rows, out = write_rows(folder / "rows.jsonl", 20 * count), folder / "out"
    done = start_batch(rows, out, "--model", model, "--device", f"virtual:hpu,count={count}")
    output, errors = done.communicate(timeout=400)
    assert done.returncode == 0, errors
    assert output.startswith(f"{20 * count} of {20 * count} images")
    by_worker = {(line["worker"], line["device"]) for line in read_manifest(out)}
    assert by_worker == {(number, f"hpu:{number}") for number in range(count)}
    assert errors.count("(virtual device; timings do not apply to hardware)") == count
