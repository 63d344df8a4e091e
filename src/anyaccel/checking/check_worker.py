"""The child process of a check: `python -m anyaccel.checking.check_worker`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from anyaccel.checking.check import check
from anyaccel.checking.fresh_process import CheckTask
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.processes.json_line_worker import connecting_to_parent


def _work(path: Path) -> None:
    """Replace the task in a file by what became of it."""
    try:
        task: CheckTask = pickle.loads(path.read_bytes())
        sys.path[:] = task.path
        message = pickle.dumps((True, check(task.subject, task.devices, **task.options, **task.call)))
    except (AnyaccelError, AttributeError, ImportError) as error:
        known = error if isinstance(error, AnyaccelError) else _not_found(error)
        message = pickle.dumps((False, known))
    path.write_bytes(message)


def _not_found(error: Exception) -> UsageError:
    return UsageError(
        f"another process does not find the pipeline's code: {error}",
        hint="put it into a module, and give a function that makes it: check('package.module:make', …)",
    )


if __name__ == "__main__":
    with connecting_to_parent() as (paths, answer):
        for path in paths:
            _work(Path(path))
            answer(None)
