"""The web page of `anyaccel serve` in a real browser, with a real service that requires a key."""

import json
from collections.abc import Iterator
from copy import copy
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser import count_colors, open_browser, read_errors, resize
from tests.server.conftest import CAROL
from tests.server.live import Live

SECRET = CAROL
SIDE = 64
LONG, WITH_PREVIEWS, SHORT = 2000, 60, 6
HTML_PROMPT = "<img src=x onerror=window.broken=1>"
COUNT_PREVIEWS = """
window.previews = 0;
const count = (changes) => changes.forEach(({ target }) => { previews += target.src.startsWith("data:image/"); });
new MutationObserver(count).observe(document.getElementById("rows"), { subtree: true, attributeFilter: ["src"] });
"""
ROW, TILE = "#rows > li", "#gallery .tile img"


@pytest.fixture(scope="module")
def live(live: Live) -> Live:
    """The shared service, with a key that no other test uses."""
    carols = copy(live)
    carols.key = SECRET
    return carols


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with open_browser() as chrome:
        yield chrome


class Page:
    """The page and the actions of a user."""

    def __init__(self, chrome: Chrome, live: Live) -> None:
        self.chrome, self.live = chrome, live

    def load(self) -> None:
        self.chrome.get(self.live.address)

    def unlock(self, key: str = SECRET) -> None:
        self.find("#key").send_keys(key, Keys.ENTER)

    def find(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def press(self, *keys: str) -> None:
        ActionChains(self.chrome).send_keys(*keys).perform()

    def run(self, script: str) -> Any:
        return self.chrome.execute_script(script)

    def wait_for(self, condition: str, timeout_s: float = 120) -> None:
        """Wait until a JavaScript expression is true."""
        try:
            WebDriverWait(self.chrome, timeout_s, 0.05).until(lambda chrome: self.run(f"return Boolean({condition})"))
        except Exception as error:
            raise AssertionError(f"not true after {timeout_s} s: {condition}\n{self.find('body').text}") from error

    def wait_for_images(self, count: int) -> None:
        """Wait until the gallery has `count` images and all are loaded."""
        loaded = f"[...document.querySelectorAll('{TILE}')].filter((img) => img.complete && img.naturalWidth)"
        self.wait_for(f"document.querySelectorAll('{TILE}').length === {count} && {loaded}.length === {count}")

    def count_images(self) -> int:
        return len(self.chrome.find_elements(By.CSS_SELECTOR, TILE))

    def fill(self, name: str, text: object) -> None:
        field = self.find(f"#{name}")
        field.clear()
        field.send_keys(str(text))

    def generate(self, prompt: str, steps: int = SHORT) -> None:
        self.fill("steps", steps)
        self.fill("prompt", prompt)
        self.press(Keys.ENTER)

    def facts(self) -> dict[str, str]:
        """Return the settings that the viewer shows."""
        names = self.chrome.find_elements(By.CSS_SELECTOR, "#facts dt")
        values = self.chrome.find_elements(By.CSS_SELECTOR, "#facts dd")
        return {name.text: value.text for name, value in zip(names, values, strict=True)}

    def has_focus(self, selector: str) -> bool:
        return bool(self.run(f"return document.activeElement.matches({json.dumps(selector)})"))

    def measure_overflow(self, selector: str) -> int:
        """Return by how many pixels an element scrolls horizontally."""
        element = self.find(selector)
        return int(element.get_property("scrollWidth")) - int(element.get_property("clientWidth"))  # type: ignore[arg-type]

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return the jobs from the API, the newest first."""
        with self.live.http() as client:
            jobs: list[dict[str, Any]] = client.get("/v1/jobs").json()["data"]
        return jobs

    def count_stored_images(self) -> int:
        """Return the number of images from the API."""
        return sum(len(job["images"]) for job in self.list_jobs())


@pytest.fixture
def page(browser: Chrome, live: Live) -> Iterator[Page]:
    """The page with at least one image in its gallery; fails if the test logs an error to the console."""
    page = Page(browser, live)
    resize(browser, 1440)
    page.load()
    page.wait_for("steps.value || !document.getElementById('key-form').hidden")
    if page.find("#key").is_displayed():
        page.unlock()
        page.wait_for("steps.value")
        page.wait_for_images(page.count_stored_images())
        before = page.count_images()  # earlier runs with the same service may have left some
        page.generate("a red circle")
        page.wait_for_images(before + 1)
        read_errors(browser)  # drop the 401 error from before the key was entered
    page.wait_for(f"document.querySelector('{TILE}')")
    yield page
    assert read_errors(browser) == []
    assert page.run("return window.broken") is None


def fetch_image(url: str) -> Image.Image:
    response = httpx.get(url, timeout=60)  # without a key: the URL contains a token
    return Image.open(BytesIO(response.raise_for_status().content)).convert("RGB")


def test_the_page_asks_for_a_key_until_it_is_valid(page: Page) -> None:
    page.run("sessionStorage.clear()")
    page.load()
    page.wait_for("document.activeElement.id === 'key'")
    assert not page.find("#generate-form").is_displayed()
    page.unlock("another")
    page.wait_for("document.getElementById('key-error').textContent === 'invalid API key'")
    page.unlock()
    page.wait_for("document.activeElement.id === 'prompt'")
    page.wait_for(f"document.querySelector('{TILE}')")
    errors = read_errors(page.chrome)
    assert errors
    assert all("401 (Unauthorized)" in error for error in errors)


def test_a_prompt_gives_previews_and_then_an_image(page: Page) -> None:
    before = page.count_images()
    page.run(COUNT_PREVIEWS)
    page.fill("seed", 2**64 - 1)  # not representable as a JavaScript number
    page.generate(HTML_PROMPT, steps=WITH_PREVIEWS)
    page.wait_for("window.previews >= 1")
    page.wait_for_images(before + 1)
    image = page.find(TILE)
    assert image.get_property("naturalWidth") == SIDE
    assert image.get_attribute("alt") == HTML_PROMPT
    page.wait_for(f"!document.querySelector('{ROW}')")
    page.click(TILE)
    facts = page.facts()
    assert (facts["Seed"], facts["Steps"], facts["Size"]) == (str(2**64 - 1), str(WITH_PREVIEWS), f"{SIDE} × {SIDE}")
    assert page.find("#viewer-prompt").text == HTML_PROMPT
    assert page.find("#download").get_attribute("download") == f"img-src-x-onerror-window-broken-1-{2**64 - 1}.png"


def test_a_job_is_followed_after_a_reload_and_can_be_cancelled(page: Page) -> None:
    before = page.count_images()
    page.generate("a blue square", steps=LONG)
    page.wait_for(f"document.querySelector('{ROW} progress')?.value > 0")
    page.load()
    page.wait_for_images(before)
    page.wait_for(f"/step \\d+ of {LONG}/.test(document.querySelector('{ROW} .row-state')?.textContent)")
    page.click(f"{ROW} .row-actions button")
    page.wait_for(f"document.querySelector('{ROW}').dataset.state === 'cancelled'")
    assert page.find(f"{ROW} .row-state").text == "cancelled"
    newest = page.list_jobs()[0]
    assert (newest["state"], newest["request"]["prompt"]) == ("cancelled", "a blue square")
    assert page.has_focus(f"{ROW} .row-actions button"), "keyboard users continue from there"
    page.click(f"{ROW} .row-actions button:last-child")
    assert not page.chrome.find_elements(By.CSS_SELECTOR, ROW)
    assert page.count_images() == before


def test_generate_again_gives_the_same_image(page: Page) -> None:
    before = page.count_images()
    first = page.find(TILE).get_attribute("src") or ""
    page.click(TILE)
    facts = page.facts()
    page.click("#again")
    page.wait_for_images(before + 1)
    second = page.find(TILE).get_attribute("src") or ""
    page.click(TILE)
    assert page.facts()["Seed"] == facts["Seed"]
    assert first != second
    assert fetch_image(first).tobytes() == fetch_image(second).tobytes()


def test_images_are_viewed_reused_and_deleted(page: Page) -> None:
    before = page.count_images()
    page.generate("a green triangle")
    page.wait_for_images(before + 1)
    page.run(f"document.querySelector('{TILE}').parentElement.focus()")
    page.press(Keys.ENTER)
    assert page.find("#viewer-prompt").text == "a green triangle"
    page.press(Keys.ARROW_RIGHT)
    assert page.find("#position").text == f"2 of {before + 1}"
    page.press(Keys.ARROW_LEFT)
    assert page.find("#position").text == f"1 of {before + 1}"
    page.press(Keys.ESCAPE)
    page.wait_for("!viewer.open")
    page.wait_for(f"document.activeElement === document.querySelector('{TILE}').parentElement")
    page.fill("prompt", "something else")
    page.click(TILE)
    page.click("#reuse")
    assert page.find("#prompt").get_property("value") == "a green triangle"
    page.click(TILE)
    page.click("#delete")
    page.click("#delete")
    page.wait_for_images(before)
    prompts = [job["request"]["prompt"] for job in page.list_jobs()]
    assert "a green triangle" not in prompts


def test_a_rejected_request_shows_the_error_message(page: Page) -> None:
    page.run("generate({ prompt: 'a cat', size: '100x100' })")
    page.wait_for(f"document.querySelector('{ROW}')?.dataset.state === 'failed'")
    assert "multiples of 8" in page.find(f"{ROW} .row-state").text
    assert [error.split(" - ")[1][:23] for error in read_errors(page.chrome)] == ["Failed to load resource"]


@pytest.mark.parametrize("width", [390, 1440])
def test_the_layout_does_not_overflow(page: Page, width: int, tmp_path: Path) -> None:
    resize(page.chrome, width)
    page.wait_for_images(page.count_images())
    for name in ("#more", "#device details"):
        page.click(f"{name} summary")
    assert "StableDiffusionPipeline" in page.find(".plan").text
    assert page.measure_overflow("html") == 0
    assert page.measure_overflow(".side") == 0
    page.chrome.save_screenshot(str(tmp_path / f"{width}.png"))
    with Image.open(tmp_path / f"{width}.png") as screenshot:
        assert screenshot.size == (width, 900)
    assert count_colors(page.chrome) > 100
    page.click(TILE)
    assert page.measure_overflow("html") == 0
    viewer = page.find("#viewer").rect
    assert viewer["x"] >= 0
    assert viewer["x"] + viewer["width"] <= width
