"""The web page of `anyaccel serve` in a browser, with the actions of a user."""

import json
from typing import Any

from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from tests.server.live import Live

__all__ = ["ROW", "TILE", "Page"]

ROW, TILE = "#rows > li", "#gallery .tile img"
"""Selectors of running jobs and of results."""
SHORT = 6
# Chromium offers no way to drop or paste a file from the outside.
ADD_FILE = """
const [name, width, height, target, kind, done] = arguments;
const canvas = Object.assign(document.createElement("canvas"), { width, height });
const context = canvas.getContext("2d");
context.fillStyle = "orange";
context.fillRect(0, 0, width / 2, height);
canvas.toBlob((blob) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([blob ?? "text"], name, { type: blob ? "image/png" : "text/plain" }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "drop"
    ? new DragEvent("drop", { dataTransfer, ...options })
    : new ClipboardEvent("paste", { clipboardData: dataTransfer, ...options });
  document.querySelector(target).dispatchEvent(event);
  done();
});
"""
READ_COLORS = """
const element = document.querySelector(arguments[0]);
let background = element;
while (getComputedStyle(background).backgroundColor === "rgba(0, 0, 0, 0)") background = background.parentElement;
const colors = [getComputedStyle(element).color, getComputedStyle(background).backgroundColor];
return colors.map((color) => color.match(/\\d+/g));
"""
LUMA = (0.2126, 0.7152, 0.0722)


class Page:
    """The page and the actions of a user."""

    def __init__(self, chrome: Chrome, live: Live) -> None:
        self.chrome, self.live = chrome, live

    def load(self) -> None:
        self.chrome.get(self.live.address)

    def unlock(self, key: str) -> None:
        self.find("#key").send_keys(key, Keys.ENTER)

    def find(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def hover(self, selector: str) -> None:
        """Move the pointer over an element."""
        ActionChains(self.chrome).move_to_element(self.find(selector)).perform()

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

    def select(self, name: str, value: str) -> None:
        """Select an option by its value."""
        Select(self.find(f"#{name}")).select_by_value(value)

    def drag(self, element: WebElement, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag inside an element, between positions relative to its center and size."""
        (x0, y0), (x1, y1) = (
            (int(x * element.size["width"]), int(y * element.size["height"])) for x, y in (start, end)
        )
        actions = ActionChains(self.chrome).move_to_element_with_offset(element, x0, y0).click_and_hold()
        actions.move_to_element_with_offset(element, x1, y1).release().perform()

    def generate(self, prompt: str, steps: int = SHORT) -> None:
        self.fill("steps", steps)
        self.fill("prompt", prompt)
        self.press(Keys.ENTER)

    def open_details(self, name: str) -> None:
        self.run(f"document.getElementById({name!r}).open = true")

    def drop(self, name: str, width: int, height: int, target: str = "body") -> None:
        """Drop a file on an element: an image of this size, or a text if it is empty."""
        self.chrome.execute_async_script(ADD_FILE, name, width, height, target, "drop")

    def paste(self, name: str, width: int, height: int, target: str = "body") -> None:
        """Paste a file while an element has the focus: an image of this size, or a text if it is empty."""
        self.chrome.execute_async_script(ADD_FILE, name, width, height, target, "paste")

    def measure_contrast(self, selector: str) -> float:
        """Return the contrast ratio of an element's text and background."""
        text, background = (
            sum(weight * _linearize(int(part)) for weight, part in zip(LUMA, color, strict=True))
            for color in self.chrome.execute_script(READ_COLORS, selector)
        )
        return (max(text, background) + 0.05) / (min(text, background) + 0.05)

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

    def count_stored_results(self) -> int:
        """Return the number of results from the API."""
        return sum(len(job.get(kind, ())) for job in self.list_jobs() for kind in ("images", "videos", "audios"))


def _linearize(value: int) -> float:
    share = value / 255
    return share / 12.92 if share <= 0.04045 else float(((share + 0.055) / 1.055) ** 2.4)
