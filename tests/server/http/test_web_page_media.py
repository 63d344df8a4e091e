"""Videos, audio and masks on the web page, with tiny models in a real browser."""

import warnings
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from PIL import Image
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from anyaccel.recipes import recipes
from tests.browser import open_browser, read_errors, resize
from tests.conftest import NEEDS_RECIPES
from tests.server.live import Live
from tests.server.page import ROW, TILE, Page

pytestmark = [NEEDS_RECIPES, pytest.mark.long]
MODELS = {
    "wan": "wan", "audio": "stable-audio", "image": "stable-diffusion", "wan-image": "wan-image-to-video",
}  # fmt: skip
FRAMES, FPS = 17, 16
RATE = 8000
READ_THUMB = """
const done = arguments[0], image = document.querySelector("[data-input=mask_image] .thumb img");
const canvas = document.createElement("canvas");
[canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
canvas.getContext("2d").drawImage(image, 0, 0);
canvas.toBlob(async (blob) => done([...new Uint8Array(await blob.arrayBuffer())]));
"""
PLAYER, SOUND = (f"document.querySelector('#result {name}')" for name in ("video", "audio"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about weight_norm in a VAE for audio
        for name, recipe in MODELS.items():
            pipe: Any = recipes()[recipe].make()
            if name == "audio":  # half a second, at a rate that Chromium plays
                pipe.transformer.register_to_config(sample_size=RATE // 2 // pipe.vae.hop_length)
                pipe.vae.register_to_config(sampling_rate=RATE)
            pipe.save_pretrained(folder / name)
    models = [f"{name}={folder / name}" for name in MODELS]
    options = ("--device", "cpu", "--dtype", "float32", "--sizes", "32x32", "--limit", "max_steps=2000")
    service = Live(tmp_path_factory.mktemp("data"), *models, *options)
    yield service
    assert service.end() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with open_browser() as chrome:
        yield chrome


@pytest.fixture
def page(browser: Chrome, live: Live) -> Iterator[Page]:
    page = Page(browser, live)
    resize(browser, 1440)
    page.load()
    page.wait_for("document.getElementById('model').options.length > 1")
    page.wait_for_images(page.count_stored_results())
    yield page
    assert read_errors(browser) == []


def test_a_video_is_generated_and_plays(page: Page) -> None:
    before = page.count_images()
    page.select("model", "wan")
    assert page.find("#seconds-field").is_displayed()
    assert not page.find("#count-field").is_displayed()
    page.fill("seconds", FRAMES / FPS)
    page.generate("a red fox", steps=2)
    page.wait_for_images(before + 1)
    page.wait_for(f"{PLAYER}?.readyState >= 2")
    assert page.run(f"return {PLAYER}.duration") == pytest.approx(FRAMES / FPS, abs=1 / FPS)
    page.wait_for(f"{PLAYER}.currentTime > 0.1")  # it has no audio, so it plays without a click
    assert page.run(f"return [{PLAYER}.videoWidth, {PLAYER}.videoHeight]") == [32, 32]
    page.click(TILE)
    facts = page.facts()
    assert (facts["Frames"], facts["Length"], facts["Format"]) == (f"{FRAMES}, {FPS} per second", "1.1 s", "mp4")
    assert (page.find("#download").get_attribute("download") or "").endswith(".mp4")


def test_the_settings_of_a_video_are_used_again_after_a_reload(page: Page) -> None:
    before = page.count_images()
    page.select("model", "wan")
    page.fill("seconds", FRAMES / FPS)
    page.fill("seed", 7)
    page.generate("a red fox", steps=2)
    page.wait_for_images(before + 1)
    page.load()
    page.wait_for_images(before + 1)
    page.click(TILE)
    page.click("#again")
    page.wait_for_images(before + 2)
    second, first = (job["request"] for job in page.list_jobs()[:2])
    assert second == first
    page.click(TILE)
    page.click("#reuse")
    values = {name: page.find(f"#{name}").get_property("value") for name in ("model", "prompt", "steps")}
    assert values == {"model": "wan", "prompt": "a red fox", "steps": "2"}
    assert page.run("return seconds.valueAsNumber") == pytest.approx(FRAMES / FPS, abs=0.001)


def test_a_video_is_cancelled(page: Page) -> None:
    page.select("model", "wan")
    page.fill("seconds", FRAMES / FPS)
    page.generate("a slow fox", steps=2000)
    page.wait_for(f"document.querySelector('{ROW} progress')?.value > 0")
    page.click(f"{ROW} .row-actions button")
    page.wait_for(f"document.querySelector('{ROW}').dataset.state === 'cancelled'")
    assert page.list_jobs()[0]["state"] == "cancelled"


def test_a_video_starts_from_a_dropped_image(page: Page) -> None:
    before = page.count_images()
    page.select("model", "wan-image")
    page.drop("photo.png", 64, 64, "[data-input=image]")
    page.wait_for("document.querySelector('[data-input=image] .thumb img')?.naturalWidth")
    page.fill("seconds", FRAMES / FPS)
    page.generate("the fox moves", steps=2)
    page.wait_for_images(before + 1)
    assert page.list_jobs()[0]["request"]["task"] == "edit"
    page.wait_for(f"{PLAYER}?.readyState >= 2")


def test_audio_has_a_player_and_a_waveform(page: Page) -> None:
    before = page.count_images()
    page.select("model", "audio")
    assert not page.find("#size-field").is_displayed()
    page.generate("rain", steps=2)
    page.wait_for_images(before + 1)
    page.wait_for("document.querySelector('#result audio')?.controls")
    page.wait_for("document.querySelector('#result .waveform').naturalWidth")
    page.wait_for(f"{SOUND}.readyState >= 1")
    assert page.run(f"return {SOUND}.duration") == pytest.approx(0.5, abs=0.01)
    assert page.run(f"return [{SOUND}.paused, {SOUND}.currentTime]") == [True, 0], "audio does not start by itself"
    page.run(f"{SOUND}.play()")
    page.wait_for(f"{SOUND}.ended")
    assert page.run(f"return {SOUND}.error") is None


def test_a_painted_mask_limits_the_edit(page: Page) -> None:
    before = page.count_images()
    page.select("model", "image")
    page.drop("photo.png", 32, 32, "[data-input=image]")
    page.wait_for("document.querySelector('[data-input=mask_image]')")
    page.click("[data-input=mask_image] button.link")
    page.wait_for("document.getElementById('mask').open")
    canvas = page.find("#mask-canvas")
    page.drag(canvas, (-0.4, 0), (0.4, 0))
    page.click("#mask-use")
    page.wait_for("document.querySelector('[data-input=mask_image] .thumb img')?.naturalWidth")
    content = bytes(page.chrome.execute_async_script(READ_THUMB))
    with Image.open(BytesIO(content)) as mask:
        assert mask.size == (32, 32)
        assert {color for _, color in mask.convert("L").getcolors() or ()} >= {0, 255}
    page.generate("a cat", steps=2)
    page.wait_for_images(before + 1)
    assert page.list_jobs()[0]["request"]["task"] == "inpaint"


@pytest.mark.parametrize("model", list(MODELS))
def test_the_form_of_every_model_fits_on_a_phone(page: Page, model: str) -> None:
    resize(page.chrome, 390, 844)
    page.select("model", model)
    for name in ("settings", "more"):
        page.open_details(name)
    assert page.measure_overflow("html") == 0
    for tile in page.chrome.find_elements(By.CSS_SELECTOR, TILE)[:1]:
        tile.click()
        assert page.measure_overflow("#viewer") == 0
