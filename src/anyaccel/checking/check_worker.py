"""Child process that runs a check: `python -m anyaccel.checking.check_worker`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from anyaccel.checking.check import check
from anyaccel.checking.fresh_process import CheckTask
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.processes.json_line_worker import connecting_to_parent


def _run_task(path: Path) -> None:
    """Run a pickled task, then overwrite its file with `(True, report)` or `(False, error)`."""
    try:
        task: CheckTask = pickle.loads(path.read_bytes())
        sys.path[:] = task.path
        message = pickle.dumps((True, check(task.target, task.devices, **task.options, **task.call)))
    except (AnyaccelError, AttributeError, ImportError) as error:
        # pickle stores classes by name, so code of `__main__` or a notebook cannot be imported here.
        message = pickle.dumps((False, error if isinstance(error, AnyaccelError) else _make_import_error(error)))
    path.write_bytes(message)


def _make_import_error(error: Exception) -> UsageError:
    return UsageError(
        f"the check process cannot import the code of the pipeline: {error}",
        hint="move the code to a module with a function that returns the pipeline: check('package.module:function')",
    )


if __name__ == "__main__":
    with connecting_to_parent() as (paths, answer):
        for path in paths:
            _run_task(Path(path))
            answer(None)
