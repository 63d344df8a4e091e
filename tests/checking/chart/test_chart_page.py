"""The chart and report pages in a real browser, and their content without a browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from anyaccel.checking.chart.badge import make_badge
from anyaccel.checking.chart.chart import Attempt, Chart, ChartCell, ChartRow, CodeLine, LimitFinding
from anyaccel.checking.chart.chart_json import as_document
from anyaccel.checking.chart.page import write_page
from anyaccel.checking.chart.report_page import write_report_page
from anyaccel.checking.report import DeviceReport, Graphs, Report, State, Violation
from tests.browser import count_colors, open_browser, read_errors, resize

WIDTHS = pytest.mark.parametrize("width", [390, 1440])
NASTY = 'x = "</script><script>window.broken = 1</script><!--\u2028{{style}}"'
ROUND_TRIP = LimitFinding(
    "host_round_trip", "slow", CodeLine("diffusers/schedulers/scheduling_ddim.py", 282, NASTY), 9, 0
)
NARROWED = LimitFinding(
    "dtypes.int64", "narrowed", CodeLine("diffusers/pipelines/flux/pipeline_flux.py", 41, "ids.to(x)"), 2, None
)
HINT = "keep the scheduler's timesteps on the CPU and call set_begin_index"

CLIPBOARD = ["clipboardReadWrite", "clipboardSanitizedWrite"]

WORKS = Attempt("works", max_difference=0.0, waits_per_step=0.0, findings=(NARROWED,))
WAITS = Attempt("waits", max_difference=1e-6, waits_per_step=4.5, findings=(ROUND_TRIP, NARROWED))
WRONG = Attempt("wrong", max_difference=float("inf"), waits_per_step=0.0)
STOPS = Attempt("stops", error="RuntimeError: <no> float64 & no way")
NAMES = {
    "alpha": ("AlphaPipeline", "flux"),
    "beta": ("BetaImg2ImgPipeline", "flux"),
    "delta": ("DeltaPipeline", "wan"),
    "unclip": ("UnCLIPPipeline", "unclip"),
    "zeta": ("ZetaPipeline", "adapter"),
}


def make_document() -> dict[str, Any]:
    """Return a chart of five pipelines on two devices. When placed, all work on neuron and two fail on mps."""
    on_mps = {"unclip": ChartCell("mps", WRONG, WRONG), "beta": ChartCell("mps", STOPS, STOPS)}
    lines = tuple(
        ChartRow(
            name,
            pipeline,
            family,
            (on_mps.get(name, ChartCell("mps", WAITS, WORKS)), ChartCell("neuron", STOPS, WORKS)),
        )
        for name, (pipeline, family) in NAMES.items()
    )
    environment = {"date": "2026-11-15", "versions": {"diffusers": "0.42.1", "torch": "2.13.0"}}
    document = as_document(Chart(("mps", "neuron"), lines, 12.5, environment))
    ran = {"runs": True, "right": True, "max_difference": 1e-6, "error": ""}
    machine = {
        "name": "NVIDIA H200",
        "date": "2026-11-14",
        "versions": {"torch": "2.11.0"},
        "pipelines": {"alpha": ran},
    }
    return document | {"hardware": {"cuda": [machine]}}


def make_report() -> Report:
    violation = Violation(
        limit="host_round_trip", effect="slow", operation="aten::_local_scalar_dense", file="mine/pipe.py", line=7,
        code=NASTY, count=3, step=0, says="The queue drains.", source="https://example.org/thread",
        evidence="documented", hint=HINT,
    )  # fmt: skip
    graphs = Graphs(compiled=2, recompiled_for=(("float32[1, 4]",),), breaks=("mine/pipe.py:9: a value is read",))
    waits = DeviceReport(
        device="mps", virtual=True, placed=True, finished=True, max_difference=0.0, host_round_trips_per_step=3.0,
        violations=(violation,), graphs=graphs,
    )  # fmt: skip
    stops = DeviceReport(device="neuron", virtual=True, placed=True, finished=False, error="TypeError: no")
    return Report(target="<mine>", pipeline="Mine", devices={"mps": waits, "neuron": stops}, notes=("It is small.",))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "chart.html").write_text(write_page(make_document()), encoding="utf-8")
    (folder / "report.html").write_text(write_report_page(make_report()), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with open_browser() as chrome:
        yield chrome


class Page:
    """The chart page in a browser, with the actions of a user."""

    def __init__(self, chrome: Chrome, address: str, width: int) -> None:
        self.chrome = chrome
        resize(chrome, width)
        chrome.get("about:blank")
        read_errors(chrome)
        chrome.get(address)

    def text(self, selector: str) -> str:
        return self.chrome.find_element(By.CSS_SELECTOR, selector).text

    def rows(self) -> list[str]:
        rows = self.chrome.find_elements(By.CSS_SELECTOR, "tr[data-recipe]")
        return [row.get_attribute("data-recipe") or "" for row in rows if row.is_displayed()]

    def choose(self, name: str, value: str) -> None:
        Select(self.chrome.find_element(By.ID, name)).select_by_value(value)

    def click(self, selector: str) -> None:
        self.chrome.find_element(By.CSS_SELECTOR, selector).click()

    def open_cell(self, recipe: str, device: str) -> str:
        self.click(f'tr[data-recipe="{recipe}"] td[data-device="{device}"]')
        return self.text("#panel")

    def press(self, *keys: str) -> None:
        ActionChains(self.chrome).send_keys(*keys).perform()

    def is_open(self) -> bool:
        return self.chrome.find_element(By.ID, "panel").is_displayed()

    def wait_for_hash(self, part: str) -> None:
        WebDriverWait(self.chrome, 60).until(lambda chrome: part in chrome.current_url)

    def fits(self) -> bool:
        return bool(self.chrome.execute_script("return document.documentElement.scrollWidth <= innerWidth"))


@pytest.fixture
def chart(browser: Chrome, pages: Path, request: pytest.FixtureRequest) -> Page:
    width = request.node.callspec.params["width"] if hasattr(request.node, "callspec") else 1440
    return Page(browser, (pages / "chart.html").as_uri(), width)


@WIDTHS
def test_the_chart_is_drawn_and_fits(chart: Page, width: int) -> None:
    assert sorted(chart.rows()) == sorted(NAMES)
    assert chart.fits()
    assert count_colors(chart.chrome) > 60
    assert "5 tiny diffusers pipelines on 2 virtual accelerators" in chart.text("#what")
    assert "virtual, not hardware" in chart.text("#evidence")
    assert "0 of 5" in chart.text('.device[data-device="mps"] .rate.plain')
    assert "3 of 5" in chart.text('.device[data-device="mps"] .rate:not(.plain)')
    assert "0 → 8" in chart.text('#legend [data-state="works"]')
    assert read_errors(chart.chrome) == []


@WIDTHS
def test_a_cell_opens_its_ledger(chart: Page, width: int) -> None:
    ledger = chart.open_cell("alpha", "mps")
    assert chart.is_open()
    assert "scheduling_ddim.py:282" in ledger
    assert HINT in ledger
    assert chart.chrome.execute_script("return document.querySelector('#panel .code').textContent") == NASTY
    assert "9×" in ledger
    assert "waits" in ledger
    assert "anyaccel check alpha --device mps --plain" in ledger
    links = chart.chrome.find_elements(By.CSS_SELECTOR, "#panel a.site-file")
    assert "blob/v0.42.1/src/diffusers/schedulers/scheduling_ddim.py#L282" in (links[0].get_attribute("href") or "")
    assert chart.fits()
    chart.press(Keys.ESCAPE)
    assert not chart.is_open()
    assert chart.chrome.execute_script("return window.broken") is None
    assert read_errors(chart.chrome) == []


@WIDTHS
def test_filters_narrow_the_rows(chart: Page, width: int) -> None:
    box = chart.chrome.find_element(By.ID, "q")
    box.send_keys("img2img")
    assert chart.rows() == ["beta"]
    box.send_keys(Keys.CONTROL, "a", Keys.DELETE)
    chart.choose("family", "flux")
    assert chart.rows() == ["alpha", "beta"]
    chart.click("#reset")
    chart.click('.device[data-device="mps"] button')
    assert sorted(chart.rows()) == ["beta", "unclip"]
    assert chart.text("#shown") == "2 of 5 pipelines"
    chart.choose("device", "neuron")
    assert chart.rows() == []
    assert chart.text("#nothing") == "Every pipeline works placed by anyaccel on neuron."
    chart.click("#reset")
    chart.choose("way", "plain")
    chart.click('#legend [data-state="wrong"]')
    assert chart.rows() == ["unclip"]
    chart.wait_for_hash("state=wrong")
    assert read_errors(chart.chrome) == []


def test_sorting_changes_the_order(chart: Page) -> None:
    assert chart.rows() == ["zeta", "alpha", "beta", "unclip", "delta"], "by family first"
    chart.click("#grouped")
    assert chart.rows() == ["alpha", "beta", "delta", "unclip", "zeta"]
    chart.click('[data-sort="name"]')
    assert chart.rows() == ["zeta", "unclip", "delta", "beta", "alpha"]
    chart.click('[data-sort="mps"]')
    assert chart.rows()[:2] == ["beta", "unclip"], "the worst come first"
    chart.click('[data-sort="mps"]')
    assert chart.rows()[-2:] == ["unclip", "beta"]
    chart.click('[data-sort="count"]')
    assert chart.rows() == ["beta", "unclip", "alpha", "delta", "zeta"]
    chart.click('[data-sort="family"]')
    assert chart.rows() == ["zeta", "alpha", "beta", "unclip", "delta"]


def test_the_chart_works_with_the_keyboard_only(chart: Page) -> None:
    chart.click('tr[data-recipe="alpha"] td[data-device="mps"]')
    chart.press(Keys.ESCAPE)
    focused = (
        "const cell = document.activeElement; return `${cell.closest('tr')?.dataset.recipe}@${cell.dataset.device}`"
    )
    assert chart.chrome.execute_script(focused) == "alpha@mps"
    chart.press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert chart.chrome.execute_script(focused) == "beta@neuron"
    chart.press(Keys.ENTER)
    assert chart.text("#panel-title") == "beta"
    chart.press(Keys.ARROW_LEFT)
    assert "RuntimeError: <no> float64 & no way" in chart.text("#panel"), "the panel shows the selected cell"
    chart.wait_for_hash("cell=beta%40mps")
    chart.press(Keys.ESCAPE, "/", "wan")
    assert chart.rows() == ["delta"]


@WIDTHS
def test_a_link_restores_the_view(chart: Page, pages: Path, width: int) -> None:
    link = (pages / "chart.html").as_uri() + "#state=not&device=mps&sort=-name&flat=1&cell=unclip%40mps&nonsense=1"
    page = Page(chart.chrome, link, width)
    assert page.rows() == ["unclip", "beta"]
    ledger = page.text("#panel")
    assert "Reason: diffusers selects another interpolation mode" in ledger
    assert "infinite" in ledger
    page.chrome.execute_script("location.hash = '#q=zeta'")
    WebDriverWait(page.chrome, 60).until(lambda _: page.rows() == ["zeta"])
    assert not page.is_open()
    assert read_errors(page.chrome) == []


def test_hardware_results_are_marked(chart: Page) -> None:
    assert chart.chrome.find_elements(By.CSS_SELECTOR, 'tr[data-recipe="alpha"] td[data-device="cuda"] .seen')
    ledger = chart.open_cell("alpha", "cuda")
    assert "NVIDIA H200: correct image" in ledger
    assert "2026-11-14 · torch 2.11.0 · largest difference 1.0e-6" in ledger
    assert "1 of 1" in chart.text('.device[data-device="cuda"]')


def test_badges_are_copied(chart: Page) -> None:
    chart.open_cell("unclip", "mps")
    chart.chrome.execute_cdp_cmd("Browser.grantPermissions", {"permissions": CLIPBOARD})
    chart.click("#copy-badges")
    WebDriverWait(chart.chrome, 60).until(lambda _: chart.text(".share [role=status]") == "copied")
    copied = chart.chrome.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == "![mps: wrong (virtual)](badges/mps.svg)\n![neuron: works (virtual)](badges/neuron.svg)"


@WIDTHS
def test_the_report_is_drawn_and_fits(browser: Chrome, pages: Path, width: int) -> None:
    page = Page(browser, (pages / "report.html").as_uri(), width)
    text = page.text("body")
    assert page.fits()
    assert count_colors(browser) > 60
    assert browser.title == "anyaccel check: <mine>"
    for part in ("Passes on 1 of 2 devices", "It is small.", "pipe.py:7", HINT, "3×", "aten::_local_scalar_dense"):
        assert part in text
    for part in ("TypeError: no", "virtual, not hardware", "mine/pipe.py:9: a value is read", "float32[1, 4]"):
        assert part in text
    assert browser.execute_script("return window.broken") is None
    assert read_errors(browser) == []


def read_data(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


def test_the_embedded_data_can_be_read_back() -> None:
    document = make_document()
    page = write_page(document)
    data = read_data(page)
    assert data["sites"] == document["sites"]
    assert data["lines"][0] == document["lines"][0]
    assert NASTY in [code for _, _, code in data["sites"]]
    assert page.count("</script>") == 3, "the tag in the data is escaped"
    assert "\u2028" not in page


def test_values_that_are_not_finite_become_words() -> None:
    document = make_document() | {"more": [float("nan"), float("-inf"), 1.5]}
    assert read_data(write_page(document))["more"] == ["not a number", "infinite", 1.5]


@pytest.mark.parametrize("page", [write_page(make_document()), write_report_page(make_report())])
def test_the_pages_load_nothing_from_the_network(page: str) -> None:
    assert "default-src 'none'" in page
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"', page) == []
    assert "@import" not in page
    assert "{{" not in page.replace("{{style}}", "", 1), "every placeholder is filled"


@pytest.mark.parametrize("state", ["works", "waits", "wrong", "stops", None])
def test_a_badge_has_text_and_enough_contrast(state: State | None) -> None:
    drawn = ElementTree.fromstring(make_badge("mps", f"{state} (virtual)", state))
    assert drawn.get("aria-label") == f"mps: {state} (virtual)"
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["mps", f"{state} (virtual)"]
    for path in drawn.iter("{http://www.w3.org/2000/svg}path"):
        assert contrast_with_white(path.get("fill") or "") >= 4.5


def contrast_with_white(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


def test_a_badge_accepts_any_text() -> None:
    drawn = ElementTree.fromstring(make_badge('<a> & "b"\x00', "漢字\u2028"))
    assert drawn.get("aria-label") == '<a> & "b": 漢字'
    short, long = (ElementTree.fromstring(make_badge("mps", text)) for text in ("works", "works and works"))
    assert int(short.get("width") or 0) < int(long.get("width") or 0)
