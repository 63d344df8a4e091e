"""Headless Chromium for the tests of web pages."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.tools import find_browser

__all__ = ["count_colors", "open_browser", "read_errors", "resize"]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-dev-shm-usage",
)


@contextmanager
def open_browser() -> Iterator[Chrome]:
    """Start a browser with a temporary profile."""
    paths = find_browser()
    assert paths, "no browser is installed; call this in a fixture named `browser`, so that its tests are skipped"
    browser, driver = paths
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = browser
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # Without an explicit path, Selenium would download a driver.
        chrome = Chrome(options=options, service=Service(driver))
        try:
            yield chrome
        finally:
            chrome.quit()


def resize(chrome: Chrome, width: int, height: int = 900) -> None:
    """Set the size of the viewport; a window cannot be as narrow as a phone screen."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def read_errors(chrome: Chrome) -> list[str]:
    """Return the console messages since the last call."""
    return [entry["message"] for entry in chrome.get_log("browser")]  # type: ignore[no-untyped-call]


def count_colors(chrome: Chrome) -> int:
    """Return the number of colors on the page. A blank page has one color, and plain text has few."""
    screenshot = Image.open(BytesIO(chrome.get_screenshot_as_png())).convert("RGB")
    return len(screenshot.getcolors(maxcolors=screenshot.width * screenshot.height) or ())
