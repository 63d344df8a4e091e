"""Programs and files that some tests require and that pip does not install."""

import os
import shutil
from collections.abc import Callable
from typing import NamedTuple

import pytest

from training.glyphs import FONT

__all__ = ["find_browser", "require_tool"]


class Tool(NamedTuple):
    """A program or file: its name, the Debian packages that contain it, and a check whether it is installed."""

    title: str
    packages: str
    is_installed: Callable[[], bool]


def find_browser() -> tuple[str, str] | None:
    """Return the paths of Chromium and its driver; None if one of them is missing."""
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


TOOLS = {
    "browser": Tool(
        "Chromium and chromedriver on PATH", "chromium chromium-driver", lambda: find_browser() is not None
    ),
    "compiler": Tool("a C++ compiler (g++) on PATH", "g++", lambda: shutil.which("g++") is not None),
    "font": Tool("the font Noto Color Emoji", "fonts-noto-color-emoji", FONT.is_file),
}


def require_tool(name: str) -> None:
    """Skip the test if a tool is not installed.

    With ANYACCEL_REQUIRE_TOOLS=1, the test fails instead. CI installs every tool (.ci/run) and must not skip tests.
    """
    tool = TOOLS[name]
    if tool.is_installed():
        return
    message = f"requires {tool.title}; hint: apt-get install {tool.packages}"
    if os.environ.get("ANYACCEL_REQUIRE_TOOLS") == "1":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
