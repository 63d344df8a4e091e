"""A check in a process that starts afresh: a fork of one in which torch's threads run would wait for them for ever."""

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
    """A check, as it is handed to the other process."""

    subject: Any
    devices: tuple[str, ...]
    options: Mapping[str, Any]
    call: Mapping[str, Any]
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))


def can_fork() -> bool:
    """Whether this process may be forked: torch is not here yet, or computes in one thread."""
    torch = sys.modules.get("torch")
    return torch is None or torch.get_num_threads() == 1


def check_in_fresh_process(task: CheckTask) -> Report:
    """Run a check in a process of its own, with one thread, and give its report."""
    try:
        content = pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"the pipeline cannot be handed to another process: {error}",
            hint="give a function of a module that makes it: check('package.module:make', …)",
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check"
        path.write_bytes(content)
        with JsonLineWorker("anyaccel.checking.check_worker", env={"OMP_NUM_THREADS": "1"}) as worker:
            try:
                worker.request(str(path))
            except EOFError:
                status, words = worker.close(), worker.stderr.strip().splitlines()
                raise AnyaccelError(
                    f"the process of the check died with status {status}: {words[-1] if words else 'no word'}",
                    hint="run `anyaccel check` for the same, which shows what it prints",
                ) from None
        succeeded, value = pickle.loads(path.read_bytes())
    if not succeeded:
        raise value
    report: Report = value
    return report
