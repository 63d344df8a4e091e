"""A process that probes a device: what kills it, or poisons its driver, loses one finding and not the others.

It is started afresh, since a driver that has begun does not survive a fork, and is asked one line of JSON at a time.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anyaccel.backends.device import open_device, sheet, this_machine
from anyaccel.backends.evidence import Finding, PipelineFinding
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import AnyaccelError
from anyaccel.processes.json_line_worker import JsonLineWorker, connecting_to_parent
from anyaccel.verification.context import ProbeContext, describe_error
from anyaccel.verification.probe_pipeline import probe_pipeline, settle_process
from anyaccel.verification.probes import probe

__all__ = ["ProbeWorker", "ProbeWorkerDiedError", "ProbeWorkerKilledError", "make_probe_context", "read_versions"]

_TIMEOUT_S = 600.0
_PACKAGES = ("torch", "diffusers", "transformers", "accelerate")


class ProbeWorkerDiedError(AnyaccelError):
    """The process ended before it answered; the message says how."""


class ProbeWorkerKilledError(ProbeWorkerDiedError):
    """It was killed from outside: for memory, or since it took too long. That says nothing of the device."""


@dataclass
class ProbeWorker:
    """One process that answers about one device; it is started when it is first asked, and again after it died.

    A context manager: the process ends with it.
    """

    device: str
    quick: bool
    _worker: JsonLineWorker | None = None

    def probe_claim(self, name: str) -> Finding:
        """What the device does about one claim."""
        return Finding(**self._ask({"claim": name}))

    def probe_pipeline(self, name: str, threads: int) -> PipelineFinding:
        """What one pipeline gives there; the host computes its picture in so many threads."""
        return PipelineFinding(**self._ask({"pipeline": name, "threads": threads}))

    def read_versions(self) -> dict[str, str]:
        """The versions of what ran."""
        return self._ask({"versions": True})

    def __enter__(self) -> ProbeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        if self._worker is None:
            path = os.pathsep.join(filter(None, sys.path))
            self._worker = JsonLineWorker(__name__, self.device, str(int(self.quick)), env={"PYTHONPATH": path})
        worker = self._worker
        try:
            answer: dict[str, Any] = worker.request(task, _TIMEOUT_S)
        except EOFError:
            status, hint = worker.close(), "the next one has a process of its own"
            lines = [line.strip() for line in worker.stderr.splitlines() if line.strip()]
            self._worker = None
            if status == -signal.SIGKILL:
                raise ProbeWorkerKilledError(f"killed: for memory, or after {_TIMEOUT_S:.0f} s", hint=hint) from None
            words = describe_error(RuntimeError(lines[-1])) if lines else "it left no word"
            raise ProbeWorkerDiedError(f"the process died with status {status}: {words}", hint=hint) from None
        if answer.pop("spoilt"):
            self._stop()
        return answer


def make_probe_context(device: str, quick: bool) -> ProbeContext:
    """A device that is here, with its sheet as it reads for the product and the versions alone."""
    opened = open_device(device)
    known = sheet(opened.sheet.name)
    product = type(opened.driver)(known).product(opened.index)
    written = known.on(product=product, versions=this_machine().versions)
    return ProbeContext(written, type(opened.driver)(written), opened.index, product=product, quick=quick)


def read_versions(sheet: Sheet) -> dict[str, str]:
    """What runs here; a package that lies on the path without being installed is asked itself."""
    machine = this_machine()
    not_installed = [name for name in _PACKAGES if name not in machine.versions]
    versions = {name: str(importlib.import_module(name).__version__) for name in not_installed}
    builds = {f"torch built for {name}": version for name, version in machine.torch_builds.items()}
    kernel_module = Path("/sys/module", sheet.vendor.lower(), "version")
    driver = {"driver": kernel_module.read_text().strip()} if kernel_module.is_file() else {}
    return {**machine.versions, **versions, **builds, **driver}


def _answer(bench: ProbeContext, task: dict[str, Any]) -> dict[str, Any]:
    if "claim" in task:
        return asdict(probe(bench, task["claim"]))
    if "versions" in task:
        return read_versions(bench.sheet)
    settle_process(task["threads"])
    return asdict(probe_pipeline(task["pipeline"], bench.device))


def _is_spoilt(bench: ProbeContext) -> bool:
    """Whether the driver answers nothing any more, as after an illegal access to memory."""
    import torch

    try:
        return bool((torch.ones(2).to(bench.device) + 1).cpu().sum() != 4)
    except RuntimeError:
        return True


def main() -> None:
    """Answer one task after the other."""
    with connecting_to_parent() as (tasks, answer):
        device, quick = sys.argv[1:]
        settle_process(os.cpu_count() or 1)
        bench = make_probe_context(device, quick == "1")
        for task in tasks:
            answer(_answer(bench, task) | {"spoilt": _is_spoilt(bench)})


if __name__ == "__main__":
    main()
