"""What a result was made on: the commit, the machine and the versions."""

import subprocess
from typing import Any

import anyaccel
from anyaccel.backends.device import this_machine

__all__ = ["describe_run", "read_commit"]


def read_commit() -> str:
    """The commit that is checked out."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def describe_run(commit: str) -> dict[str, Any]:
    """What every kept result says of its making."""
    machine = this_machine()
    return {
        "commit": commit,
        "anyaccel": anyaccel.__version__,
        "system": f"{machine.system} {machine.architecture}",
        "versions": dict(machine.versions),
    }
