"""Tests are skipped if a tool is missing, and the demo installs only the package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.tools import require_tool


def test_a_test_without_its_tool_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("ANYACCEL_REQUIRE_TOOLS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        require_tool("browser")


def test_a_test_without_its_tool_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("ANYACCEL_REQUIRE_TOOLS", "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        require_tool("browser")


def test_browsers_are_opened_by_fixtures_whose_tests_are_skipped() -> None:
    """`conftest.py` skips the tests with a fixture named `browser`."""
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)}
    users = {path: text for path, text in texts.items() if "open_browser()" in text}
    assert users
    for path, text in users.items():
        fixtures = re.findall(
            r"^@pytest.fixture.*\ndef browser\(\).*\n    with open_browser\(\) as", text, re.MULTILINE
        )
        assert len(fixtures) == text.count("open_browser()"), path


def test_the_demo_installs_only_the_package() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: \$\(READY\) ", makefile, re.MULTILINE)
    recipe = makefile.split("\n$(READY): ", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"\$\(call install,(.*)\)", recipe) == ["--editable ."]


def make_environment(folder: Path, install: str) -> "subprocess.CompletedProcess[str]":
    """Run the target of `make demo` that fills the environment, with another command instead of pip."""
    variables = {"VENV": folder, "BIN": Path(sys.executable).parent, "INSTALL": install, "PROGRESS_S": 1}
    command = ["make", f"{folder}/.ready", *(f"{name}={value}" for name, value in variables.items())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_installation_shows_its_progress(tmp_path: Path) -> None:
    done = make_environment(tmp_path, "sh -c 'sleep 2' --")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  1 s, \d+ MB in ", done.stdout, re.MULTILINE)
    assert (tmp_path / ".ready").exists()


def test_a_failed_installation_is_repeated_by_the_next_run(tmp_path: Path) -> None:
    done = make_environment(tmp_path, "sh -c 'exit 7' --")
    assert done.returncode != 0
    assert not (tmp_path / ".ready").exists()
