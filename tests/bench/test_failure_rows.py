"""Tests for failed variants and images with NaN or Inf.

The processes are real, but they run a short script with the protocol of the worker.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner

from anyaccel.bench.bench import measure_file_psnr, run_bench, run_together
from anyaccel.bench.case import VARIANTS, BenchCase
from anyaccel.bench.failure_rows import make_failure_row
from anyaccel.bench.text import format_bench
from anyaccel.cli.main import app
from anyaccel.errors import NotMeasurableError, UsageError

_WORKER = """#!{python}
import json, os, signal, sys, time
import numpy
job = json.loads(sys.stdin.readline())
name = job["variant"]
behavior = json.loads(os.environ["BENCH_TEST"]).get(name, {{}})
for line in sys.stdin:
    command = json.loads(line)
    action = behavior.get(command)
    if action == "raise":
        failed = {{"error": name + " failed: ValueError: 7", "hint": "use 8", "details": ["Traceback", "7"]}}
        print(json.dumps(failed), flush=True)
        sys.exit(1)
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "exit":
        sys.exit("the last line")
    if action == "wait":
        open(os.path.join(job["folder"], "waiting"), "w").close()
        time.sleep(60)
    if command == "warm":
        image = numpy.full((1, 3, 4, 4), float(behavior.get("image", 0.5)), dtype="float32")
        numpy.save(os.path.join(job["folder"], name + ".npy"), image)
    answers = {{"warm": {{"first_picture_s": 1.0}}, "go": {{"seconds": 0.5}}, "finish": {{}}}}
    print(json.dumps(answers[command]), flush=True)
"""


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "worker"
    path.write_text(_WORKER.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setenv("BENCH_TEST", "{}")
    return path


def run(monkeypatch: pytest.MonkeyPatch, behavior: dict[str, Any], *, rounds: int = 2) -> dict[str, Any]:
    monkeypatch.setenv("BENCH_TEST", json.dumps(behavior))
    [row] = run_together([BenchCase(model="tiny", variants=VARIANTS)], rounds=rounds)
    assert json.loads(json.dumps(row)) == row
    return row


def save_image(folder: Path, name: str, value: float) -> Path:
    path = folder / f"{name}.npy"
    image = numpy.full((1, 3, 4, 4), 0.5, dtype="float32")
    image[0, 0, 0, 0] = value
    numpy.save(path, image)
    return path


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, -numpy.inf])
def test_psnr_of_an_image_with_nan_or_inf_is_an_error(tmp_path: Path, value: float) -> None:
    ours, stock = save_image(tmp_path, "anyaccel", 0.5), save_image(tmp_path, "stock eager", value)
    with pytest.raises(NotMeasurableError, match=r"^the image from stock eager contains NaN or Inf\n"):
        measure_file_psnr(ours, stock)
    with pytest.raises(NotMeasurableError, match=r"^the image from stock eager contains NaN or Inf\n"):
        measure_file_psnr(stock, ours)
    with pytest.raises(NotMeasurableError, match="images from stock eager and anyaccel contain NaN or Inf"):
        measure_file_psnr(stock, save_image(tmp_path, "anyaccel", value))


def test_psnr(tmp_path: Path) -> None:
    first = save_image(tmp_path, "first", 0.5)
    assert measure_file_psnr(first, save_image(tmp_path, "same", 0.5)) is None
    assert measure_file_psnr(first, save_image(tmp_path, "other", 1.5)) == pytest.approx(16.81)
    assert measure_file_psnr(first, save_image(tmp_path, "far", 1e30)) == pytest.approx(-583.19), (
        "its square overflows float32"
    )


@pytest.mark.parametrize("image", ["nan", "inf"])
def test_a_stock_image_with_nan_or_inf_is_reported(monkeypatch: pytest.MonkeyPatch, image: str) -> None:
    row = run(monkeypatch, {"stock eager": {"image": image}})
    assert row["variants"]["anyaccel"]["not_compared"] == "the image from stock eager contains NaN or Inf"
    assert "psnr_db" not in row["variants"]["anyaccel"]
    assert row["fast_psnr_db"] is None
    lines = list(format_bench([row]))
    [ours] = [line for line in lines if line.startswith("  anyaccel  ")]
    assert "the image from stock eager contains NaN or Inf" in ours
    assert "same image" not in ours


def test_an_exact_image_with_nan_is_reported_for_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(monkeypatch, {"anyaccel": {"image": "nan"}})
    assert row["fast_not_compared"] == "the image from anyaccel contains NaN or Inf"
    assert "as exact, and the image from anyaccel contains NaN or Inf" in "\n".join(format_bench([row]))


@pytest.mark.parametrize("command", ["warm", "go", "finish"])
@pytest.mark.parametrize(
    ("action", "cause", "hint"),
    [
        ("raise", "ValueError: 7", "use 8"),
        ("die", "its process was killed by SIGKILL", "memory"),
        ("exit", "the last line", "--json"),
    ],
)
def test_the_other_variants_are_measured(
    monkeypatch: pytest.MonkeyPatch, command: str, action: str, cause: str, hint: str
) -> None:
    row = run(monkeypatch, {"stock eager": {command: action}})
    failed = row["variants"]["stock eager"]
    assert failed["error"] == f"stock eager failed: {cause}"
    assert hint in failed["hint"]
    assert isinstance(failed["details"], list)
    assert "against stock eager" not in row
    assert row["against stock compiled"] == 1.0
    assert row["fast against exact"] == 1.0
    text = "\n".join(format_bench([row]))
    assert f"  stock eager failed: {cause}\n    hint: " in text
    assert "anyaccel is 1.00 times as fast as stock compiled" in text


def test_if_all_variants_fail_the_row_has_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(monkeypatch, {name: {"warm": "raise"} for name in VARIANTS})
    assert row["error"] == "anyaccel failed: ValueError: 7"
    assert row["failed"]["stock compiled"]["details"] == ["Traceback", "7"]
    assert "variants" not in row
    assert "stock compiled failed: ValueError: 7" in "\n".join(format_bench([row]))


def test_run_bench_raises_if_a_variant_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_TEST", json.dumps({"stock compiled": {"warm": "raise"}}))
    with pytest.raises(NotMeasurableError, match=r"^stock compiled failed: ValueError: 7\nhint: use 8$"):
        run_bench(BenchCase(model="tiny"), rounds=1)


def test_a_case_without_variants_is_rejected() -> None:
    with pytest.raises(UsageError, match="a benchmark case has no variants"):
        run_bench(BenchCase(model="tiny", variants=()))


@pytest.mark.parametrize(("name", "status"), [("stock compiled", 0), ("anyaccel", 1), ("anyaccel fast", 1)])
def test_the_exit_status_depends_only_on_the_anyaccel_variants(
    monkeypatch: pytest.MonkeyPatch, name: str, status: int
) -> None:
    monkeypatch.setenv("BENCH_TEST", json.dumps({name: {"go": "raise"}}))
    arguments = ["bench", "--fast", "-d", "cpu", "--rounds", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status
    assert f"{name} failed: ValueError: 7\n    hint: use 8" in done.stdout
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert report["rows"][0]["variants"][name]["details"] == ["Traceback", "7"]
    assert report["rows"][0]["variants"]["stock eager"]["median_s"] == 0.5


def test_json_is_printed_even_if_all_variants_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_TEST", json.dumps({"anyaccel": {"warm": "raise"}}))
    done = CliRunner().invoke(app, ["bench", "--against", "nothing", "-d", "cpu", "--rounds", "1", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"][0]["error"] == "anyaccel failed: ValueError: 7"


def _wait_for_worker(folder: Path) -> Iterator[Path]:
    for _ in range(1200):
        yield from folder.glob("anyaccel-bench-*/0/waiting")
        time.sleep(0.05)


def test_sigterm_leaves_no_temporary_files(worker: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    program = (
        f"import sys; sys.executable = {str(worker)!r}; sys.argv = ['anyaccel', 'bench', '-d', 'cpu']\n"
        "from anyaccel.cli.main import main; main()"
    )
    environment = {**os.environ, "TMPDIR": str(folder), "BENCH_TEST": json.dumps({"stock eager": {"warm": "wait"}})}
    python = worker.read_text().splitlines()[0].removeprefix("#!")
    with subprocess.Popen([python, "-c", program], env=environment, stderr=subprocess.PIPE, text=True) as process:
        timeout = threading.Timer(90, process.kill)
        timeout.start()
        assert next(_wait_for_worker(folder), None), "the worker did not start"
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1]
        timeout.cancel()
    assert process.returncode == 143
    assert errors.endswith("terminated\n")
    assert list(folder.glob("anyaccel-bench-*")) == []


def test_the_cause_is_one_line_without_torchs_advice() -> None:
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    row = make_failure_row("stock compiled", InductorError(InvalidCxxCompiler(), None))
    assert "No working C++ compiler found" in row["error"]
    assert "\n" not in row["error"]
    assert "TORCHDYNAMO_VERBOSE" not in row["error"]
    assert "install a C++ compiler" in row["hint"]
    assert "--against eager" in row["hint"]
    assert "--against" not in make_failure_row("anyaccel", InductorError(InvalidCxxCompiler(), None))["hint"]


def test_the_cause_names_the_error_and_its_first_line() -> None:
    def cause(error: Exception) -> str:
        row = make_failure_row("stock eager", error)
        assert row["details"][-1]
        assert row["hint"]
        return str(row["error"]).removeprefix("stock eager failed: ")

    assert cause(ValueError("\n  the size is wrong\nand more")) == "ValueError: the size is wrong"
    assert cause(RuntimeError("it raised:\nOSError: no")) == "RuntimeError: it raised: OSError: no"
    assert cause(MemoryError()) == "MemoryError"
    assert cause(UsageError("not a valid size", hint="use 8")) == "not a valid size"
    assert make_failure_row("stock eager", UsageError("a", hint="use 8"))["hint"] == "use 8"


def test_a_variant_that_takes_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_TEST", json.dumps({"stock eager": {"go": "wait"}}))
    # The first images of the others must not exceed the limit on a busy machine.
    [row] = run_together([BenchCase(model="tiny", variants=("stock eager", "anyaccel"))], rounds=1, timeout_s=20.0)
    assert row["variants"]["stock eager"]["error"] == "stock eager failed: it was not done after 20 s"
    assert row["variants"]["anyaccel"]["timed_images"] == 1


def test_rounds_end_once_a_case_has_been_timed_long_enough(tmp_path: Path) -> None:
    variants = ("anyaccel", "anyaccel offloaded")
    cases = [BenchCase(model="tiny", variants=variants)]
    [row] = run_together(cases, rounds=3, output_dir=tmp_path)
    assert {name: result["timed_images"] for name, result in row["variants"].items()} == dict(
        zip(variants, (3, 1), strict=True)
    )
    assert (tmp_path / "0" / "anyaccel offloaded.npy").is_file()
    [row] = run_together(cases, rounds=3, enough_s=0.0)
    assert row["variants"]["anyaccel"]["timed_images"] == 1
