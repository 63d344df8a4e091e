"""A check in a process that starts afresh: a fork of one in which torch's threads run would wait for them for ever."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.storage.atomic_write import atomic_write

if TYPE_CHECKING:
    from anyaccel.checker.report import Report

__all__ = ["Task", "can_fork", "check_afresh"]


@dataclass(frozen=True, kw_only=True)
class Task:
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


def check_afresh(task: Task) -> Report:
    """Run a check in a process of its own, with one thread, and give its report."""
    try:
        content = pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"the pipeline cannot be handed to another process: {error}",
            hint="give a function of a module that makes it: check('package.module:make', …)",
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        command = [sys.executable, "-m", __name__, str(answer)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, input=content, env=environment, stderr=subprocess.PIPE, check=False)
        if not answer.is_file():
            words = done.stderr.decode(errors="replace").strip().splitlines()
            raise AnyaccelError(
                f"the process of the check died with status {done.returncode}: {words[-1] if words else 'no word'}",
                hint="run `anyaccel check` for the same, which shows what it prints",
            )
        succeeded, value = pickle.loads(answer.read_bytes())
    if not succeeded:
        raise value
    report: Report = value
    return report


def _work(answer: Path) -> None:
    from anyaccel.checker.check import check

    content = sys.stdin.buffer.read()
    try:
        task: Task = pickle.loads(content)
        sys.path[:] = task.path
        message = pickle.dumps((True, check(task.subject, task.devices, **task.options, **task.call)))
    except (AnyaccelError, AttributeError, ImportError) as error:
        known = error if isinstance(error, AnyaccelError) else _not_found(error)
        message = pickle.dumps((False, known))
    atomic_write(answer, message)


def _not_found(error: Exception) -> UsageError:
    return UsageError(
        f"another process does not find the pipeline's code: {error}",
        hint="put it into a module, and give a function that makes it: check('package.module:make', …)",
    )


if __name__ == "__main__":
    # Under its own name, so that what is pickled here is found there.
    from anyaccel.checker.fresh_process import _work as work

    work(Path(sys.argv[1]))
