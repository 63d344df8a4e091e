"""Tests are skipped if a tool is missing, and the demo installs only the package."""

import re

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


def test_the_demo_installs_only_the_package() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: \$\(READY\) ", makefile, re.MULTILINE)
    recipe = makefile.split("\n$(READY): ", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"\$\(INSTALL\) (.*)", recipe) == ["--editable ."]
