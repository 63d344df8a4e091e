"""Programs and files that a few tests need and that Python, pip and make do not bring."""

import os
import shutil
from collections.abc import Callable
from typing import NamedTuple

import pytest

from training.glyphs import FONT

__all__ = ["find_browser", "require_tool"]


class Tool(NamedTuple):
    """Something of the machine: what it is, the Debian packages that have it, and whether it is installed."""

    title: str
    packages: str
    is_installed: Callable[[], bool]


def find_browser() -> tuple[str, str] | None:
    """Return the paths of Chromium and of its driver; None where one of them is missing."""
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


TOOLS = {
    "browser": Tool(
        "Chromium and chromedriver on PATH", "chromium chromium-driver", lambda: find_browser() is not None
    ),
    "compiler": Tool("a C++ compiler, g++, on PATH", "g++", lambda: shutil.which("g++") is not None),
    "font": Tool("the font Noto Color Emoji", "fonts-noto-color-emoji", FONT.is_file),
}


def require_tool(name: str) -> None:
    """Skip the test where the machine lacks the tool.

    Fail where ANYACCEL_REQUIRE_TOOLS=1 is set: CI installs every tool (.ci/run), and must not skip.
    """
    tool = TOOLS[name]
    if tool.is_installed():
        return
    message = f"needs {tool.title}; hint: apt-get install {tool.packages}"
    if os.environ.get("ANYACCEL_REQUIRE_TOOLS") == "1":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
