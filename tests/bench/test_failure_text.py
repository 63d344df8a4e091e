"""A variant that fails costs its own row alone, and a picture that is not finite is like nothing.

The processes are real, and what runs in them is a short program that answers as the worker does.
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

from anyaccel.bench.bench import liken_files, run_bench, run_together
from anyaccel.bench.case import VARIANTS, BenchCase
from anyaccel.bench.failure_text import describe_failure
from anyaccel.bench.text import format_bench
from anyaccel.cli.main import app
from anyaccel.errors import NotMeasurableError, UsageError

_WORKER = """#!{python}
import json, os, signal, sys, time
import numpy
job = json.loads(sys.stdin.readline())
name = job["variant"]
does = json.loads(os.environ["BENCH_TEST"]).get(name, {{}})
for line in sys.stdin:
    word = json.loads(line)
    doing = does.get(word)
    if doing == "raise":
        failed = {{"error": name + " failed: ValueError: 7", "hint": "take 8", "details": ["Traceback", "7"]}}
        print(json.dumps(failed), flush=True)
        sys.exit(1)
    if doing == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if doing == "mute":
        sys.exit("the last word")
    if doing == "wait":
        open(os.path.join(job["folder"], "waiting"), "w").close()
        time.sleep(60)
    if word == "warm":
        made = numpy.full((1, 3, 4, 4), float(does.get("picture", 0.5)), dtype="float32")
        numpy.save(os.path.join(job["folder"], name + ".npy"), made)
    answers = {{"warm": {{"first_picture_s": 1.0}}, "go": {{"seconds": 0.5}}, "finish": {{}}}}
    print(json.dumps(answers[word]), flush=True)
"""


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "worker"
    path.write_text(_WORKER.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setenv("BENCH_TEST", "{}")
    return path


def run(monkeypatch: pytest.MonkeyPatch, does: dict[str, Any], *, rounds: int = 2) -> dict[str, Any]:
    monkeypatch.setenv("BENCH_TEST", json.dumps(does))
    [row] = run_together([BenchCase(model="tiny", variants=VARIANTS)], rounds=rounds)
    assert json.loads(json.dumps(row)) == row
    return row


def keep(folder: Path, name: str, value: float) -> Path:
    path = folder / f"{name}.npy"
    made = numpy.full((1, 3, 4, 4), 0.5, dtype="float32")
    made[0, 0, 0, 0] = value
    numpy.save(path, made)
    return path


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, -numpy.inf])
def test_there_is_no_likeness_to_what_is_not_finite(tmp_path: Path, value: float) -> None:
    ours, stock = keep(tmp_path, "anyaccel", 0.5), keep(tmp_path, "stock eager", value)
    with pytest.raises(NotMeasurableError, match=r"^stock eager's picture is not finite\n"):
        liken_files(ours, stock)
    with pytest.raises(NotMeasurableError, match=r"^stock eager's picture is not finite\n"):
        liken_files(stock, ours)
    with pytest.raises(NotMeasurableError, match="are not finite"):
        liken_files(stock, keep(tmp_path, "anyaccel", value))


def test_likeness(tmp_path: Path) -> None:
    one = keep(tmp_path, "one", 0.5)
    assert liken_files(one, keep(tmp_path, "same", 0.5)) is None
    assert liken_files(one, keep(tmp_path, "other", 1.5)) == pytest.approx(16.81)
    assert liken_files(one, keep(tmp_path, "far", 1e30)) == pytest.approx(-583.19), "more than float32 can square"


@pytest.mark.parametrize("picture", ["nan", "inf"])
def test_a_stock_picture_that_is_not_finite_is_said(monkeypatch: pytest.MonkeyPatch, picture: str) -> None:
    row = run(monkeypatch, {"stock eager": {"picture": picture}})
    assert row["variants"]["anyaccel"]["not_compared"] == "stock eager's picture is not finite"
    assert "psnr_db" not in row["variants"]["anyaccel"]
    assert row["fast_psnr_db"] is None
    lines = list(format_bench([row]))
    [ours] = [line for line in lines if line.startswith("  anyaccel  ")]
    assert "stock eager's picture is not finite" in ours
    assert "the same picture" not in ours


def test_an_exact_picture_that_is_not_finite_is_said_of_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(monkeypatch, {"anyaccel": {"picture": "nan"}})
    assert row["fast_not_compared"] == "anyaccel's picture is not finite"
    assert "as exact, and anyaccel's picture is not finite" in "\n".join(format_bench([row]))


@pytest.mark.parametrize("word", ["warm", "go", "finish"])
@pytest.mark.parametrize(
    ("way", "cause", "hint"),
    [
        ("raise", "ValueError: 7", "take 8"),
        ("die", "its process was ended by SIGKILL", "memory"),
        ("mute", "the last word", "--json"),
    ],
)
def test_the_others_are_measured(monkeypatch: pytest.MonkeyPatch, word: str, way: str, cause: str, hint: str) -> None:
    row = run(monkeypatch, {"stock eager": {word: way}})
    broken = row["variants"]["stock eager"]
    assert broken["error"] == f"stock eager failed: {cause}"
    assert hint in broken["hint"]
    assert isinstance(broken["details"], list)
    assert "against stock eager" not in row
    assert row["against stock compiled"] == 1.0
    assert row["fast against exact"] == 1.0
    text = "\n".join(format_bench([row]))
    assert f"  stock eager failed: {cause}\n    hint: " in text
    assert "anyaccel is 1.00 times as fast as stock compiled" in text


def test_where_all_fail_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(monkeypatch, {name: {"warm": "raise"} for name in VARIANTS})
    assert row["error"] == "anyaccel failed: ValueError: 7"
    assert row["failed"]["stock compiled"]["details"] == ["Traceback", "7"]
    assert "variants" not in row
    assert "stock compiled failed: ValueError: 7" in "\n".join(format_bench([row]))


def test_one_row_alone_is_an_error_where_a_variant_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_TEST", json.dumps({"stock compiled": {"warm": "raise"}}))
    with pytest.raises(NotMeasurableError, match=r"^stock compiled failed: ValueError: 7\nhint: take 8$"):
        run_bench(BenchCase(model="tiny"), rounds=1)


def test_no_variant_at_all() -> None:
    with pytest.raises(UsageError, match="there is no variant"):
        run_bench(BenchCase(model="tiny", variants=()))


@pytest.mark.parametrize(("name", "status"), [("stock compiled", 0), ("anyaccel", 1), ("anyaccel fast", 1)])
def test_the_command_ends_by_what_became_of_ours(monkeypatch: pytest.MonkeyPatch, name: str, status: int) -> None:
    monkeypatch.setenv("BENCH_TEST", json.dumps({name: {"go": "raise"}}))
    words = ["bench", "--fast", "-d", "cpu", "--rounds", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == status
    assert f"{name} failed: ValueError: 7\n    hint: take 8" in done.stdout
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["rows"][0]["variants"][name]["details"] == ["Traceback", "7"]
    assert told["rows"][0]["variants"]["stock eager"]["median_s"] == 0.5


def test_where_nothing_could_be_measured_the_command_still_tells_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_TEST", json.dumps({"anyaccel": {"warm": "raise"}}))
    done = CliRunner().invoke(app, ["bench", "--against", "nothing", "-d", "cpu", "--rounds", "1", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"][0]["error"] == "anyaccel failed: ValueError: 7"


def _wait_for_worker(folder: Path) -> Iterator[Path]:
    for _ in range(1200):
        yield from folder.glob("anyaccel-bench-*/0/waiting")
        time.sleep(0.05)


def test_the_end_that_another_process_asks_for_leaves_nothing(worker: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    program = (
        f"import sys; sys.executable = {str(worker)!r}; sys.argv = ['anyaccel', 'bench', '-d', 'cpu']\n"
        "from anyaccel.cli.main import main; main()"
    )
    environment = {**os.environ, "TMPDIR": str(folder), "BENCH_TEST": json.dumps({"stock eager": {"warm": "wait"}})}
    python = worker.read_text().splitlines()[0].removeprefix("#!")
    with subprocess.Popen([python, "-c", program], env=environment, stderr=subprocess.PIPE, text=True) as process:
        late = threading.Timer(90, process.kill)
        late.start()
        assert next(_wait_for_worker(folder), None), "it began"
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1]
        late.cancel()
    assert process.returncode == 143
    assert said.endswith("terminated\n")
    assert list(folder.glob("anyaccel-bench-*")) == []


def test_the_cause_is_one_line_without_a_librarys_advice() -> None:
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    told = describe_failure("stock compiled", InductorError(InvalidCxxCompiler(), None))
    assert "No working C++ compiler found" in told["error"]
    assert "\n" not in told["error"]
    assert "TORCHDYNAMO_VERBOSE" not in told["error"]
    assert "install a C++ compiler" in told["hint"]
    assert "--against eager" in told["hint"]
    assert "--against" not in describe_failure("anyaccel", InductorError(InvalidCxxCompiler(), None))["hint"]


def test_causes() -> None:
    def cause(error: Exception) -> str:
        told = describe_failure("stock eager", error)
        assert told["details"][-1]
        assert told["hint"]
        return str(told["error"]).removeprefix("stock eager failed: ")

    assert cause(ValueError("\n  the size is wrong\nand more")) == "ValueError: the size is wrong"
    assert cause(RuntimeError("it raised:\nOSError: no")) == "RuntimeError: it raised: OSError: no"
    assert cause(MemoryError()) == "MemoryError"
    assert cause(UsageError("a size is no size", hint="take 8")) == "a size is no size"
    assert describe_failure("stock eager", UsageError("a", hint="take 8"))["hint"] == "take 8"
