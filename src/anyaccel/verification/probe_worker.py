"""Worker process that probes a device. A crash or an unresponsive driver affects only one finding.

The worker is a new process rather than a fork, because an initialized driver cannot be used after a
fork. Requests and responses are JSON lines.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anyaccel.backends.device import open_device, sheet, this_machine
from anyaccel.backends.evidence_files import Finding, PipelineFinding
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import AnyaccelError
from anyaccel.processes.json_line_worker import JsonLineWorker, connecting_to_parent
from anyaccel.verification.context import ProbeContext, describe_error
from anyaccel.verification.probe_pipeline import configure_process, probe_pipeline
from anyaccel.verification.probes import probe

__all__ = ["ProbeWorker", "ProbeWorkerDiedError", "ProbeWorkerKilledError", "make_probe_context", "read_versions"]

_TIMEOUT_S = 600.0
_PACKAGES = ("torch", "diffusers", "transformers", "accelerate")


class ProbeWorkerDiedError(AnyaccelError):
    """Error raised when a worker process ends before it responds to a request."""


class ProbeWorkerKilledError(ProbeWorkerDiedError):
    """Error raised when a worker process is killed because host memory ran out or a request timed out.

    Unlike a crash, this does not count as a device error.
    """


@dataclass
class ProbeWorker:
    """Handle to a worker process that probes one device. The process starts on the first request.

    The process is restarted after a crash. Use the handle as a context manager: the process ends when
    the `with` block exits.
    """

    device: str
    quick: bool
    compile_threads: int = 1
    """Processes in which Inductor compiles kernels."""
    _worker: JsonLineWorker | None = None

    def probe_claim(self, name: str) -> Finding:
        """Probe one claim on the device's sheet in the worker process, and return the finding."""
        return Finding(**self._request({"claim": name}))

    def probe_pipeline(self, name: str, threads: int, modes: Sequence[str]) -> list[PipelineFinding]:
        """Run a recipe on the CPU, with `threads` threads, and on the device in each mode; compare the images."""
        answer = self._request({"pipeline": name, "threads": threads, "modes": list(modes)})
        return [PipelineFinding(**finding) for finding in answer["findings"]]

    def read_versions(self) -> dict[str, str]:
        """Return the versions of the libraries and the driver, as the worker process reports them."""
        return self._request({"versions": True})

    def __enter__(self) -> ProbeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _request(self, task: dict[str, Any]) -> dict[str, Any]:
        if self._worker is None:
            # The worker must find the packages that a caller or a test has added to `sys.path`.
            path = os.pathsep.join(filter(None, sys.path))
            env = {"PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": str(self.compile_threads)}
            self._worker = JsonLineWorker(__name__, self.device, str(int(self.quick)), env=env)
        worker = self._worker
        try:
            answer: dict[str, Any] = worker.request(task, _TIMEOUT_S)
        except EOFError:
            status, hint = worker.close(), "the next probe runs in a new process"
            lines = [line.strip() for line in worker.stderr.splitlines() if line.strip()]
            self._worker = None
            # SIGKILL comes from the kernel (out of memory) or from the timeout in `request`.
            if status == -signal.SIGKILL:
                raise ProbeWorkerKilledError(
                    f"the probe process was killed: out of host memory, or no response within {_TIMEOUT_S:.0f} s",
                    hint=hint,
                ) from None
            output = describe_error(RuntimeError(lines[-1])) if lines else "no output"
            raise ProbeWorkerDiedError(f"the probe process exited with status {status}: {output}", hint=hint) from None
        if answer.pop("broken"):
            self._stop()
        return answer


def make_probe_context(device: str, quick: bool) -> ProbeContext:
    """Open a device on this machine; return it with its sheet for the detected product and versions."""
    opened = open_device(device)
    # The sheet of the opened device includes probe results; the claims to verify are those of the written sheet.
    written = sheet(opened.sheet.name)
    product = type(opened.driver)(written).product(opened.index)
    claims = written.on(product=product, versions=this_machine().versions)
    return ProbeContext(claims, type(opened.driver)(claims), opened.index, product=product, quick=quick)


def read_versions(sheet: Sheet) -> dict[str, str]:
    """Return the versions of the libraries and the kernel driver, keyed by name.

    The dict also contains the versions of toolkits that torch was built with, such as CUDA.
    """
    machine = this_machine()
    # A package on `sys.path` without metadata has only its `__version__`.
    not_installed = [name for name in _PACKAGES if name not in machine.versions]
    versions = {name: str(importlib.import_module(name).__version__) for name in not_installed}
    builds = {f"torch built for {name}": version for name, version in machine.torch_builds.items()}
    kernel_module = Path("/sys/module", sheet.vendor.lower(), "version")
    driver = {"driver": kernel_module.read_text().strip()} if kernel_module.is_file() else {}
    return {**machine.versions, **versions, **builds, **driver}


def _answer(context: ProbeContext, task: dict[str, Any]) -> dict[str, Any]:
    if "claim" in task:
        return asdict(probe(context, task["claim"]))
    if "versions" in task:
        return read_versions(context.sheet)
    configure_process(task["threads"])
    findings = probe_pipeline(task["pipeline"], context.device, task["modes"])
    return {"findings": [asdict(finding) for finding in findings]}


def _is_broken(context: ProbeContext) -> bool:
    """Return whether the driver has stopped working, for example after an illegal memory access."""
    import torch

    try:
        return bool((torch.ones(2).to(context.device) + 1).cpu().sum() != 4)
    except RuntimeError:
        return True


def main() -> None:
    """Probe the device named on the command line, as requested by the parent process."""
    with connecting_to_parent() as (tasks, answer):
        device, quick = sys.argv[1:]
        configure_process(os.cpu_count() or 1)
        context = make_probe_context(device, quick == "1")
        # A broken driver stays broken, so the parent starts a new process after this answer.
        for task in tasks:
            answer(_answer(context, task) | {"broken": _is_broken(context)})


if __name__ == "__main__":
    main()
