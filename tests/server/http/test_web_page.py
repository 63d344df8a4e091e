"""The page of `anyaccel serve` in a real browser, against a real service that wants a key."""

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

from tests.browser import count_colours, open_browser, read_errors, resize
from tests.server.conftest import CAROL
from tests.server.live import Live

SECRET = CAROL
SIDE = 128
LONG, WATCHED, SHORT = 2000, 60, 6
NASTY = "<img src=x onerror=window.broken=1>"
NOTE_PREVIEWS = """
window.previews = 0;
const note = (changes) => changes.forEach(({ target }) => { previews += target.src.startsWith("data:image/"); });
new MutationObserver(note).observe(document.getElementById("rows"), { subtree: true, attributeFilter: ["src"] });
"""
ROW, TILE = "#rows > li", "#gallery .tile img"


@pytest.fixture(scope="module")
def live(live: Live) -> Live:
    """The service of all tests, asked by one who sees nobody else's pictures."""
    asked = copy(live)
    asked.key = SECRET
    return asked


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with open_browser() as chrome:
        yield chrome


class Page:
    """The page as a person meets it."""

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
        """Until an expression in JavaScript is true."""
        try:
            WebDriverWait(self.chrome, timeout_s, 0.05).until(lambda chrome: self.run(f"return Boolean({condition})"))
        except Exception as error:
            raise AssertionError(f"not so in {timeout_s} s: {condition}\n{self.find('body').text}") from error

    def wait_for_pictures(self, count: int) -> None:
        """Until so many are in the gallery, and all have come from the service whole."""
        whole = f"[...document.querySelectorAll('{TILE}')].filter((one) => one.complete && one.naturalWidth)"
        self.wait_for(f"document.querySelectorAll('{TILE}').length === {count} && {whole}.length === {count}")

    def count_pictures(self) -> int:
        return len(self.chrome.find_elements(By.CSS_SELECTOR, TILE))

    def fill(self, name: str, text: object) -> None:
        field = self.find(f"#{name}")
        field.clear()
        field.send_keys(str(text))

    def make(self, prompt: str, steps: int = SHORT) -> None:
        self.fill("steps", steps)
        self.fill("prompt", prompt)
        self.press(Keys.ENTER)

    def facts(self) -> dict[str, str]:
        """The recipe of the picture that is shown large."""
        names = self.chrome.find_elements(By.CSS_SELECTOR, "#facts dt")
        values = self.chrome.find_elements(By.CSS_SELECTOR, "#facts dd")
        return {name.text: value.text for name, value in zip(names, values, strict=True)}

    def has_focus(self, selector: str) -> bool:
        return bool(self.run(f"return document.activeElement.matches({json.dumps(selector)})"))

    def measure_overflow(self, selector: str) -> int:
        """How many pixels an element would scroll sideways."""
        element = self.find(selector)
        return int(element.get_property("scrollWidth")) - int(element.get_property("clientWidth"))  # type: ignore[arg-type]

    def list_jobs(self) -> list[dict[str, Any]]:
        """What the service itself says, the newest first."""
        with self.live.http() as client:
            found: list[dict[str, Any]] = client.get("/v1/jobs").json()["data"]
        return found

    def count_made(self) -> int:
        """How many pictures the service itself has for who asks."""
        return sum(len(job["images"]) for job in self.list_jobs())


@pytest.fixture
def page(browser: Chrome, live: Live) -> Iterator[Page]:
    """The page, ready and with a picture in its gallery; whatever a test does, the console has nothing to say."""
    page = Page(browser, live)
    resize(browser, 1440)
    page.load()
    page.wait_for("steps.value || !document.getElementById('key-form').hidden")
    if page.find("#key").is_displayed():
        page.unlock()
        page.wait_for("steps.value")
        page.wait_for_pictures(page.count_made())
        before = page.count_pictures()  # the tests of this file may come in several goes, each with its own browser
        page.make("a red circle")
        page.wait_for_pictures(before + 1)
        read_errors(browser)  # that a key was wanted
    page.wait_for(f"document.querySelector('{TILE}')")
    yield page
    assert read_errors(browser) == []
    assert page.run("return window.broken") is None


def read_picture(url: str) -> Image.Image:
    answer = httpx.get(url, timeout=60)  # without a key: the address has a token
    return Image.open(BytesIO(answer.raise_for_status().content)).convert("RGB")


def test_a_key_is_asked_for_until_it_is_the_right_one(page: Page) -> None:
    page.run("sessionStorage.clear()")
    page.load()
    page.wait_for("document.activeElement.id === 'key'")
    assert not page.find("#make").is_displayed()
    page.unlock("another")
    page.wait_for("document.getElementById('key-says').textContent === 'the key is wrong'")
    page.unlock()
    page.wait_for("document.activeElement.id === 'prompt'")
    page.wait_for(f"document.querySelector('{TILE}')")
    told = read_errors(page.chrome)
    assert told
    assert all("401 (Unauthorized)" in one for one in told)


def test_a_prompt_becomes_previews_and_then_a_picture(page: Page) -> None:
    before = page.count_pictures()
    page.run(NOTE_PREVIEWS)
    page.fill("seed", 2**64 - 1)  # larger than what JavaScript counts with
    page.make(NASTY, steps=WATCHED)
    page.wait_for("window.previews >= 1")
    page.wait_for_pictures(before + 1)
    picture = page.find(TILE)
    assert picture.get_property("naturalWidth") == SIDE
    assert picture.get_attribute("alt") == NASTY
    page.wait_for(f"!document.querySelector('{ROW}')")
    page.click(TILE)
    told = page.facts()
    assert (told["Seed"], told["Steps"], told["Size"]) == (str(2**64 - 1), str(WATCHED), f"{SIDE} × {SIDE}")
    assert page.find("#viewer-prompt").text == NASTY
    assert page.find("#download").get_attribute("download") == f"img-src-x-onerror-window-broken-1-{2**64 - 1}.png"


def test_a_job_is_found_again_after_a_reload_and_stops_when_it_is_cancelled(page: Page) -> None:
    before = page.count_pictures()
    page.make("a blue square", steps=LONG)
    page.wait_for(f"document.querySelector('{ROW} progress')?.value > 0")
    page.load()
    page.wait_for_pictures(before)
    page.wait_for(f"/step \\d+ of {LONG}/.test(document.querySelector('{ROW} .row-state')?.textContent)")
    page.click(f"{ROW} .row-actions button")
    page.wait_for(f"document.querySelector('{ROW}').dataset.state === 'cancelled'")
    assert page.find(f"{ROW} .row-state").text == "cancelled"
    newest = page.list_jobs()[0]
    assert (newest["state"], newest["request"]["prompt"]) == ("cancelled", "a blue square")
    assert page.has_focus(f"{ROW} .row-actions button"), "whoever cancelled with the keyboard goes on from there"
    page.click(f"{ROW} .row-actions button:last-child")
    assert not page.chrome.find_elements(By.CSS_SELECTOR, ROW)
    assert page.count_pictures() == before


def test_again_gives_the_same_picture(page: Page) -> None:
    before = page.count_pictures()
    first = page.find(TILE).get_attribute("src") or ""
    page.click(TILE)
    recipe = page.facts()
    page.click("#again")
    page.wait_for_pictures(before + 1)
    second = page.find(TILE).get_attribute("src") or ""
    page.click(TILE)
    assert page.facts()["Seed"] == recipe["Seed"]
    assert first != second
    assert read_picture(first).tobytes() == read_picture(second).tobytes()


def test_a_picture_is_looked_at_used_and_deleted_with_the_keyboard(page: Page) -> None:
    before = page.count_pictures()
    page.make("a green triangle")
    page.wait_for_pictures(before + 1)
    page.run(f"document.querySelector('{TILE}').parentElement.focus()")
    page.press(Keys.ENTER)
    assert page.find("#viewer-prompt").text == "a green triangle"
    page.press(Keys.ARROW_RIGHT)
    assert page.find("#place").text == f"2 of {before + 1}"
    page.press(Keys.ARROW_LEFT)
    assert page.find("#place").text == f"1 of {before + 1}"
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
    page.wait_for_pictures(before)
    prompts = [job["request"]["prompt"] for job in page.list_jobs()]
    assert "a green triangle" not in prompts


def test_what_is_refused_is_said_in_words(page: Page) -> None:
    page.run("make({ prompt: 'a cat', size: '100x100' })")
    page.wait_for(f"document.querySelector('{ROW}')?.dataset.state === 'failed'")
    assert "multiples of 8" in page.find(f"{ROW} .row-state").text
    assert [one.split(" - ")[1][:23] for one in read_errors(page.chrome)] == ["Failed to load resource"]


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_scrolls_sideways_and_the_page_is_not_blank(page: Page, width: int, tmp_path: Path) -> None:
    resize(page.chrome, width)
    page.wait_for_pictures(page.count_pictures())
    for name in ("#more", "#device details"):
        page.click(f"{name} summary")
    assert "StableDiffusionPipeline" in page.find(".plan").text
    assert page.measure_overflow("html") == 0
    assert page.measure_overflow(".side") == 0
    page.chrome.save_screenshot(str(tmp_path / f"{width}.png"))
    with Image.open(tmp_path / f"{width}.png") as picture:
        assert picture.size == (width, 900)
    assert count_colours(page.chrome) > 100
    page.click(TILE)
    assert page.measure_overflow("html") == 0
    viewer = page.find("#viewer").rect
    assert viewer["x"] >= 0
    assert viewer["x"] + viewer["width"] <= width
