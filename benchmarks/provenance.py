"""Provenance of a benchmark result: the commit, the machine and the versions."""

import subprocess
from typing import Any

import anyaccel
from anyaccel.backends.device import this_machine

__all__ = ["describe_run", "read_commit"]


def read_commit() -> str:
    """Return the commit that is checked out."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def describe_run(commit: str) -> dict[str, Any]:
    """Return the fields that every result file has."""
    machine = this_machine()
    return {
        "commit": commit,
        "anyaccel": anyaccel.__version__,
        "system": f"{machine.system} {machine.architecture}",
        "versions": dict(machine.versions),
    }
