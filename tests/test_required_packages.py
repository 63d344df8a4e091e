"""The commands of the README in an environment without extras and without the packages of the test suite."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NEEDS_RECIPES, ROOT, inherit_environment
from tests.required_packages import list_required, write_customization

COMMANDS = re.findall(r"^\$ anyaccel (.+?)(?:  +#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def customization(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("required")
    write_customization(folder)
    return folder


def run_python(customization: Path, cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(customization), os.environ.get("PYTHONPATH", "")])
    environment = inherit_environment() | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=600
    )


def test_the_closure_of_the_required_packages() -> None:
    required = list_required("anyaccel")
    assert {"anyaccel", "torch", "diffusers", "transformers", "tokenizers", "typer"} <= required
    assert required.isdisjoint({"pytest", "gguf", "peft", "av", "soundfile", "ftfy", "ray", "fastapi", "hypothesis"})


def test_other_packages_are_hidden(customization: Path, tmp_path: Path) -> None:
    program = """
import importlib.metadata, importlib.util, json, sys
def has_metadata(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
names = ["torch", "numpy", "pytest", "peft", "httpx"]
print(json.dumps([[importlib.util.find_spec(name) is not None, has_metadata(name)] for name in names]))
try:
    import pytest
except ModuleNotFoundError as error:
    print(error)
"""
    done = run_python(customization, tmp_path, "-c", program)
    found, error = done.stdout.splitlines()
    assert json.loads(found) == [[True, True]] * 2 + [[False, False]] * 3
    assert error == "No module named 'pytest'"


@NEEDS_RECIPES
@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme(customization: Path, tmp_path: Path, command: str) -> None:
    # One device: checking all of them takes a minute, and needs the same packages.
    one_device = ["--device", "mps"] if command.startswith("check") else []
    done = run_python(customization, tmp_path, "-m", "anyaccel", *shlex.split(command), *one_device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "No module named" not in done.stdout + done.stderr


def test_the_readme_has_commands() -> None:
    assert {command.split()[0] for command in COMMANDS} == {"generate", "explain", "check"}
