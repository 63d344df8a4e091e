"""Write the screenshots of the web page in `docs/images`.

    .venv/bin/python -m tools.web_page_images            # requires chromium and chromium-driver, takes a few minutes

The service runs the embedded model on the CPU, and generates the images itself.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome

from tests.browser import open_browser, resize
from tests.server.live import Live
from tests.server.page import TILE, Page

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PROMPTS = (
    "a red apple", "a large elephant", "three small stars on black", "a cat and a pizza",
    "a rocket on a dark blue background", "a castle on a light blue background",
)  # fmt: skip
SIZES = {"web-page.png": (1440, 900), "web-page-phone.png": (390, 844)}
_COLORS = 192


def write_images(folder: Path) -> None:
    """Generate images with the embedded model, and write a screenshot of the page for each size."""
    with tempfile.TemporaryDirectory() as data, open_browser() as chrome:
        live = Live(Path(data), "--device", "cpu")
        try:
            with live.http() as client:
                for prompt in PROMPTS:
                    job = client.post("/v1/jobs", json={"prompt": prompt, "seed": 7}).raise_for_status().json()["id"]
                    live.wait_state(client, job, "done")
            page = Page(chrome, live)
            for name, size in SIZES.items():
                resize(chrome, *size)
                page.load()
                page.wait_for_images(len(PROMPTS))
                page.wait_for(f"document.querySelector('#result img').complete && document.querySelector('{TILE}')")
                page.run("document.getElementById('prompt').value = 'a castle on a light blue background'")
                page.run("document.activeElement.blur()")
                _save(chrome, folder / name)
        finally:
            live.end()


def _save(chrome: Chrome, path: Path) -> None:
    """Save a screenshot as a PNG file with a palette, which is much smaller."""
    screenshot = Image.open(io.BytesIO(chrome.get_screenshot_as_png())).convert("RGB")
    screenshot.quantize(_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    write_images(IMAGES)
