"""Checks that run in a new process, because torch has already started threads in this one.

Forking a process with OpenMP threads can deadlock, because the child waits for threads that fork
does not copy: https://github.com/pytorch/pytorch/issues/17199 (observed with torch 2.13).
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.processes.json_line_worker import JsonLineWorker

if TYPE_CHECKING:
    from anyaccel.checking.report import Report

__all__ = ["CheckTask", "can_fork", "check_in_fresh_process"]


@dataclass(frozen=True, kw_only=True)
class CheckTask:
    """Arguments for a check, pickled for the child process."""

    target: Any
    devices: tuple[str, ...]
    options: Mapping[str, Any]
    call: Mapping[str, Any]
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    """`sys.path` of the caller, so that the other process finds the same modules."""


def can_fork() -> bool:
    """Return whether it is safe to fork this process: torch is not imported yet, or uses a single thread."""
    # Not imported here: a process without torch has no OpenMP threads, and the import takes seconds.
    torch = sys.modules.get("torch")
    return torch is None or torch.get_num_threads() == 1


def check_in_fresh_process(task: CheckTask) -> Report:
    """Run a check in a new single-threaded process and return its report."""
    try:
        content = pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"cannot pickle the pipeline for the check process: {error}",
            hint="pass the name of a function that returns the pipeline: check('package.module:function')",
        ) from error
    # The task and the report go through a file, because the pipe to the worker carries JSON lines.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check"
        path.write_bytes(content)
        # One thread, so that the new process can fork virtual devices.
        with JsonLineWorker("anyaccel.checking.check_worker", env={"OMP_NUM_THREADS": "1"}) as worker:
            try:
                worker.request(str(path))
            except EOFError:
                status, lines = worker.close(), worker.stderr.strip().splitlines()
                raise AnyaccelError(
                    f"the check process exited with status {status}: {lines[-1] if lines else 'no output'}",
                    hint="run `anyaccel check` on the same model to see the full output",
                ) from None
        succeeded, value = pickle.loads(path.read_bytes())
    if not succeeded:
        raise value
    report: Report = value
    return report
