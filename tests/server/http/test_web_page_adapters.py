"""LoRAs, a ControlNet and an IP-Adapter on the web page, with a tiny Stable Diffusion in a real browser."""

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.browser import open_browser, read_errors, resize
from tests.conftest import NEEDS_RECIPES
from tests.generation.adapter_files import save_controlnet, save_ip_adapter, save_lora
from tests.generation.models import save_model
from tests.server.live import Live
from tests.server.page import ROW, TILE, Page

pytestmark = [NEEDS_RECIPES, pytest.mark.long]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("adapters")
    service = Live(
        folder / "data", f"tiny={save_model('ip-adapter-base')}", "--device", "cpu", "--dtype", "float32",
        "--sizes", "32x32", "--lora", f"ink={save_lora(folder / 'ink.safetensors', recipe='ip-adapter')}",
        "--control-model", save_controlnet(folder / "controlnet"),
        "--ip-adapter", f"{save_ip_adapter(folder / 'adapter.safetensors')}:0.8",
    )  # fmt: skip
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
    page.wait_for("steps.value")
    yield page
    assert [error for error in read_errors(browser) if "400 (Bad Request)" not in error] == []


def test_an_image_with_a_lora_a_control_image_and_an_ip_adapter_image(page: Page) -> None:
    before = page.count_images()
    labels = {
        zone.get_attribute("data-input"): zone.find_element(By.CSS_SELECTOR, ".label").text
        for zone in page.chrome.find_elements(By.CSS_SELECTOR, "[data-input]")
    }
    assert labels["control_image"] == "Control image"
    assert labels["ip_adapter_image"] == "IP-Adapter image"
    page.drop("edges.png", 32, 32)
    page.wait_for("document.querySelector('[data-input=control_image] .thumb img')?.naturalWidth === 32")
    page.paste("style.png", 48, 48)
    page.wait_for("document.querySelector('[data-input=ip_adapter_image] .thumb img')?.naturalWidth === 48")
    page.hover("[data-input=ip_adapter_image]")
    page.paste("other.png", 40, 40)
    page.wait_for("document.querySelector('[data-input=ip_adapter_image] .thumb img')?.naturalWidth === 40")
    page.hover("#prompt")
    page.open_details("settings")
    page.open_details("more")
    page.select("lora", "ink")
    page.fill("lora-scale", 0.5)
    page.generate("a cat", steps=2)
    page.wait_for_images(before + 1)
    request = page.list_jobs()[0]["request"]
    assert (request["task"], request["lora"], request["lora_scale"]) == ("generate", "ink", 0.5)
    page.click(TILE)
    assert page.facts()["LoRA"].startswith("ink")


def test_a_missing_control_image_is_reported(page: Page) -> None:
    page.generate("a cat", steps=2)
    page.wait_for(f"document.querySelector('{ROW}')?.dataset.state === 'failed'")
    assert "requires the input control_image" in page.find(f"{ROW} .row-state").text
