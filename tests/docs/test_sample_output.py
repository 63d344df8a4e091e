"""The documentation shows real output, and its Python code runs."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NEEDS_RECIPES
from tools.sample_output import DOCS, _select, import_libraries, list_pages, read_blocks, run_page

pytestmark = NEEDS_RECIPES


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    import_libraries()
    yield
    logger.setLevel(level)  # import_libraries changes it, and tests of log messages run in the same process


def run_page_in_a_new_process(page: Path) -> str:
    program = (
        "import sys; from tools import sample_output; sample_output.import_libraries(); "
        "print(sample_output.run_page(sample_output.Path(sys.argv[1])), end='')"
    )
    command = [sys.executable, "-c", program, str(page)]
    return subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.long
@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_blocks_run_and_show_their_real_output(page: Path) -> None:
    expected = run_page(page)
    if page.read_text() != expected:  # a fork of this process, whose state other tests may have changed
        expected = run_page_in_a_new_process(page)
    assert page.read_text() == expected, f"run: python -m tools.sample_output {page.relative_to(DOCS.parent)}"


def test_a_block_that_is_out_of_date_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.sample_output.DOCS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- output -->\n```console\n$ anyaccel devices abacus\nold\n```\n\n"
        "<!-- run -->\n```python\nprint(6 * 7)\n```\n\n<!-- output -->\n```text\n41\n```\n"
    )
    text = run_page(page)
    assert "$ anyaccel devices abacus\nerror: unknown device 'abacus'\nhint: " in text
    assert "\nold\n" not in text
    assert text.endswith("<!-- output -->\n```text\n42\n```\n")


def test_a_block_that_fails_names_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.sample_output.DOCS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- run -->\n```python\nprint(1)\n1 / 0\n```\n")
    with pytest.raises(SystemExit, match=r'page.md", line 6(.|\n)*ZeroDivisionError'):
        run_page(page)


def test_only_keeps_lines_with_their_continuation() -> None:
    text = "head\n  dtype: float16. The reason\n    goes on\n  noise: cpu\n\n  memory: all\n    of it\n"
    assert _select(text, ("dtype", "memory")) == (
        "…\n  dtype: float16. The reason\n    goes on\n…\n  memory: all\n    of it\n"
    )


def test_blocks_are_read_with_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n<!-- output: only a b -->\n```text\na\n```\n\n```python\nx = 1\n```\n")
    sample, code = read_blocks(page)
    assert (sample.language, sample.prefixes, sample.text) == ("text", ("a", "b"), "a\n")
    assert (code.language, code.marker) == ("python", "")
