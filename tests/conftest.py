"""What every test can use."""

import os

# Tests fork processes for virtual devices: torch must not have started threads before.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from anyaccel.backends.registry import build_registry

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "anyaccel"

ALL_SHEETS = [sheet for backend in build_registry([]).backends.values() for sheet in backend.sheets]

NEEDS_RECIPES = pytest.mark.skipif(
    Version(version("diffusers")) < Version("0.42") or Version(version("transformers")) < Version("5"),
    reason="the recipes are made of classes of diffusers 0.42 and transformers 5, which Python 3.10 cannot have",
)

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_cli() -> RunCli:
    """Run the command line in a process of its own, as a user does."""

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")}
        return subprocess.run(
            [sys.executable, "-m", "anyaccel", *arguments],
            env=kept | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run
