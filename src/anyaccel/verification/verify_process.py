"""A process that probes a device: what kills it, or poisons its driver, loses one finding and not the others.

It is started afresh, since a driver that has begun does not survive a fork, and is asked one line of JSON at a time.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from anyaccel.backends.device import open_device, sheet, this_machine
from anyaccel.backends.evidence import Finding, PipelineFinding
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import AnyaccelError
from anyaccel.verification.bench import Bench, describe_error
from anyaccel.verification.probe_pipeline import probe_pipeline, settle_process
from anyaccel.verification.probes import probe

__all__ = ["Prober", "ProberDiedError", "ProberKilledError", "make_bench", "read_versions"]

_TIMEOUT_S = 600.0
_PACKAGES = ("torch", "diffusers", "transformers", "accelerate")


class ProberDiedError(AnyaccelError):
    """The process ended before it answered; the message says how."""


class ProberKilledError(ProberDiedError):
    """It was killed from outside: for memory, or since it took too long. That says nothing of the device."""


def _open_words() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


@dataclass
class Prober:
    """One process that answers about one device; it is started when it is first asked, and again after it died.

    A context manager: the process ends with it.
    """

    device: str
    quick: bool
    _process: subprocess.Popen[str] | None = None
    _words: IO[str] = field(default_factory=_open_words)

    def probe_claim(self, name: str) -> Finding:
        """What the device does about one claim."""
        return Finding(**self._ask({"claim": name}))

    def probe_pipeline(self, name: str, threads: int) -> PipelineFinding:
        """What one pipeline gives there; the host computes its picture in so many threads."""
        return PipelineFinding(**self._ask({"pipeline": name, "threads": threads}))

    def read_versions(self) -> dict[str, str]:
        """The versions of what ran."""
        return self._ask({"versions": True})

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
        self._words.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_TIMEOUT_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            status = process.wait()
            self._stop()
            hint = "the next one has a process of its own"
            if status == -signal.SIGKILL:
                raise ProberKilledError(f"killed: for memory, or after {_TIMEOUT_S:.0f} s", hint=hint)
            raise ProberDiedError(f"the process died with status {status}: {self._last_words()}", hint=hint)
        answer: dict[str, Any] = json.loads(line)
        if answer.pop("spoilt"):
            self._stop()
        return answer

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", __name__, self.device, str(int(self.quick))]
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True
        )

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = [line.strip() for line in self._words if line.strip()]
        return describe_error(RuntimeError(lines[-1])) if lines else "it left no word"


def make_bench(device: str, quick: bool) -> Bench:
    """A device that is here, with its sheet as it reads for the product and the versions alone."""
    opened = open_device(device)
    known = sheet(opened.sheet.name)
    product = type(opened.driver)(known).product(opened.index)
    written = known.on(product=product, versions=this_machine().versions)
    return Bench(written, type(opened.driver)(written), opened.index, product=product, quick=quick)


def read_versions(sheet: Sheet) -> dict[str, str]:
    """What runs here; a package that lies on the path without being installed is asked itself."""
    machine = this_machine()
    not_installed = [name for name in _PACKAGES if name not in machine.versions]
    versions = {name: str(importlib.import_module(name).__version__) for name in not_installed}
    builds = {f"torch built for {name}": version for name, version in machine.torch_builds.items()}
    kernel_module = Path("/sys/module", sheet.vendor.lower(), "version")
    driver = {"driver": kernel_module.read_text().strip()} if kernel_module.is_file() else {}
    return {**machine.versions, **versions, **builds, **driver}


def _answer(bench: Bench, task: dict[str, Any]) -> dict[str, Any]:
    if "claim" in task:
        return asdict(probe(bench, task["claim"]))
    if "versions" in task:
        return read_versions(bench.sheet)
    settle_process(task["threads"])
    return asdict(probe_pipeline(task["pipeline"], bench.device))


def _is_spoilt(bench: Bench) -> bool:
    """Whether the driver answers nothing any more, as after an illegal access to memory."""
    import torch

    try:
        return bool((torch.ones(2).to(bench.device) + 1).cpu().sum() != 4)
    except RuntimeError:
        return True


def _read_tasks() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Answer one task a line; what vendors print goes to stderr, so that the answers stay alone on stdout."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    device, quick = sys.argv[1:]
    settle_process(os.cpu_count() or 1)
    bench = make_bench(device, quick == "1")
    for task in _read_tasks():
        answer = _answer(bench, task)
        answers.write(json.dumps(answer | {"spoilt": _is_spoilt(bench)}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
