"""A real browser for the tests of pages: the Chromium of the machine, without a window."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.tools import find_browser

__all__ = ["count_colours", "open_browser", "read_errors", "resize"]

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
    """A browser with a profile of its own."""
    found = find_browser()
    assert found, "open it in a fixture called browser: a test that uses it is skipped where there is none"
    browser, driver = found
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = browser
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # The driver is named, so that none is ever downloaded.
        chrome = Chrome(options=options, service=Service(driver))
        try:
            yield chrome
        finally:
            chrome.quit()


def resize(chrome: Chrome, width: int, height: int = 900) -> None:
    """Give the page exactly this room: a window alone cannot be as narrow as a telephone."""
    room = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", room)


def read_errors(chrome: Chrome) -> list[str]:
    """What the console has to complain of since it was last read."""
    return [entry["message"] for entry in chrome.get_log("browser")]  # type: ignore[no-untyped-call]


def count_colours(chrome: Chrome) -> int:
    """How many colours the page shows: a blank one has a single colour, and text alone has few."""
    picture = Image.open(BytesIO(chrome.get_screenshot_as_png())).convert("RGB")
    return len(picture.getcolors(maxcolors=picture.width * picture.height) or ())
