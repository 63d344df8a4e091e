"""The web page of `anyaccel serve` in a real browser, with a real service that requires a key."""

from collections.abc import Iterator
from copy import copy
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from PIL import Image
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

from tests.browser import count_colors, open_browser, read_errors, resize
from tests.server.conftest import CAROL
from tests.server.live import Live
from tests.server.page import ROW, TILE, Page

SECRET = CAROL
SIDE = 64
LONG, WITH_PREVIEWS = 2000, 60
HTML_PROMPT = "<img src=x onerror=window.broken=1>"
COUNT_PREVIEWS = """
window.previews = 0;
const count = (changes) => changes.forEach(({ target }) => { previews += target.src.startsWith("data:image/"); });
new MutationObserver(count).observe(document.getElementById("rows"), { subtree: true, attributeFilter: ["src"] });
"""
MAX_PIXELS = 65536  # of the fixture `live`
WCAG_AA = 4.5  # https://www.w3.org/TR/WCAG22/#contrast-minimum


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


@pytest.fixture
def page(browser: Chrome, live: Live) -> Iterator[Page]:
    """The page with at least one image in its gallery; fails if the test logs an error to the console."""
    page = Page(browser, live)
    resize(browser, 1440)
    page.load()
    page.wait_for("steps.value || !document.getElementById('key-form').hidden")
    if page.find("#key").is_displayed():
        page.unlock(SECRET)
        page.wait_for("steps.value")
        page.wait_for_images(page.count_stored_results())
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
    page.unlock(SECRET)
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
    page.open_details("more")
    page.click("#add-argument")
    page.press("etaa", Keys.TAB, "0.5")
    page.generate("a cat")
    page.wait_for(f"document.querySelector('{ROW}')?.dataset.state === 'failed'")
    assert page.find(f"{ROW} .row-state").text.startswith("unknown parameter 'etaa': did you mean eta?")
    assert [error.split(" - ")[1][:23] for error in read_errors(page.chrome)] == ["Failed to load resource"]


def test_a_dropped_image_is_edited(page: Page) -> None:
    before = page.count_images()
    page.drop("photo.png", 96, 48)
    page.wait_for("document.querySelector('[data-input=image] .thumb img')?.naturalWidth")
    assert page.find("#strength-field").is_displayed()
    assert page.run("return size.value") == "88x48", "the shape of the input at the model's default area"
    page.open_details("more")
    page.click("#add-argument")
    page.press("eta", Keys.TAB, "0.5")
    page.generate("a red circle")
    page.wait_for_images(before + 1)
    job = page.list_jobs()[0]["request"]
    assert (job["task"], job["width"], job["height"], job["arguments"]) == ("edit", 88, 48, {"eta": 0.5})
    page.click("[data-input=image] .remove")
    assert not page.find("#strength-field").is_displayed()
    assert page.run("return size.value") == f"{SIDE}x{SIDE}"


def test_a_pasted_image_is_edited(page: Page) -> None:
    before = page.count_images()
    page.paste("notes.txt", 0, 0, "#prompt")
    assert not page.chrome.find_elements(By.CSS_SELECTOR, ".thumb"), "text is pasted into the field"
    page.paste("image.png", 64, 64, "#prompt")
    page.wait_for("document.querySelector('[data-input=image] .thumb img')?.naturalWidth === 64")
    assert page.find("#prompt").get_property("value") == ""
    page.generate("a red circle")
    page.wait_for_images(before + 1)
    assert page.list_jobs()[0]["request"]["task"] == "edit"


def test_a_file_that_is_not_an_image_is_rejected(page: Page) -> None:
    page.drop("notes.txt", 0, 0)
    page.wait_for("document.getElementById('input-error').textContent")
    assert page.find("#input-error").text == (
        "notes.txt is not an image that this browser can read; use PNG, JPEG or WebP"
    )


def test_a_large_photo_is_reduced_to_the_limit_of_the_service(page: Page) -> None:
    before = page.count_images()
    page.drop("photo.png", 1200, 600)
    page.wait_for("document.querySelector('[data-input=image] .thumb img')?.naturalWidth")
    width, height = page.run("const i = document.querySelector('.thumb img'); return [i.naturalWidth, i.naturalHeight]")
    assert width * height <= MAX_PIXELS
    assert width == pytest.approx(2 * height, abs=2)
    page.generate("a red circle")
    page.wait_for_images(before + 1)


def test_a_result_is_used_as_the_input(page: Page) -> None:
    width = page.find(TILE).get_property("naturalWidth")
    page.click(TILE)
    page.click("#use")
    page.wait_for(f"document.querySelector('[data-input=image] .thumb img')?.naturalWidth === {width}")
    page.wait_for("document.activeElement.id === 'prompt'")


def test_every_field_has_a_label(page: Page) -> None:
    page.open_details("more")
    page.drop("photo.png", 64, 64)
    page.wait_for("document.querySelector('.thumb')")
    page.click("#add-argument")
    fields = page.chrome.find_elements(By.CSS_SELECTOR, "input, select, textarea, button")
    shown = [field for field in fields if field.is_displayed()]
    assert len(shown) > 10
    assert [field.get_attribute("outerHTML") for field in shown if not field.accessible_name] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_color_schemes(page: Page, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        for selector in ("#prompt", "#generate-form .main", ".muted", "#generate-form label"):
            assert page.measure_contrast(selector) >= WCAG_AA, selector
        is_dark = page.run("return getComputedStyle(document.documentElement).getPropertyValue('--page')") == "#101314"
        assert is_dark == (scheme == "dark")
    finally:
        page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("width", [390, 1440])
def test_the_layout_does_not_overflow(page: Page, width: int, tmp_path: Path) -> None:
    resize(page.chrome, width)
    page.wait_for_images(page.count_images())
    for name in ("settings", "more"):
        page.open_details(name)
    if width > 900:
        page.click("#device summary")
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
