"""Every line of docs/device-names.md matches the parser and the registry."""

from typing import Any

import pytest

from anyaccel.backends.device_spec import DeviceSpec
from anyaccel.backends.registry import build_registry
from anyaccel.errors import UsageError
from tests.conftest import ALL_SHEETS, ROOT

REGISTRY = build_registry([])
PAGE = (ROOT / "docs" / "device-names.md").read_text()

PARSED: dict[str, dict[str, Any]] = {
    "auto": {"name": "auto"},
    "cuda": {"name": "cuda"},
    "hpu:3": {"name": "hpu", "index": 3},
    "gaudi2": {"name": "hpu", "product": "gaudi2"},
    "rtx4090": {"name": "cuda", "product": "rtx4090"},
    "rtx4090-laptop": {"name": "cuda", "product": "rtx4090-laptop"},
    "h200:1": {"name": "cuda", "product": "h200", "index": 1},
    "mps:16GiB": {"name": "mps", "memory": "16GiB"},
    "virtual:neuron": {"name": "neuron", "virtual": True},
    "virtual:neuron,count=2": {"name": "neuron", "virtual": True, "count": 2},
    "virtual:neuron:1,count=2": {"name": "neuron", "virtual": True, "count": 2, "index": 1},
    "virtual:hpu,memory=32GiB": {"name": "hpu", "virtual": True, "memory": "32GiB"},
    "virtual:gaudi2": {"name": "hpu", "virtual": True, "product": "gaudi2"},
    "virtual:hpu,memory=gaudi2": {"name": "hpu", "virtual": True, "product": "gaudi2"},
    "virtual:mps,strict": {"name": "mps", "virtual": True, "strict": True},
}


def read_table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without code marks."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row] for row in rows[2:]]


def test_examples() -> None:
    strings = [row[0] for row in read_table("Examples")]
    assert strings == list(PARSED)
    for text in strings:
        spec = DeviceSpec.parse(text, REGISTRY)
        assert spec == DeviceSpec(**PARSED[text]), text
        assert DeviceSpec.parse(text.upper().replace("GIB", "GiB"), REGISTRY) == spec


def test_names_and_aliases() -> None:
    rows = {name: (aliases, title) for name, aliases, title in read_table("Names and aliases")}
    assert rows.keys() == {sheet.name for sheet in ALL_SHEETS}
    for sheet in ALL_SHEETS:
        aliases, title = rows[sheet.name]
        assert aliases == ", ".join(sheet.aliases), sheet.name
        assert title.split(";")[0] == sheet.title
        for alias in sheet.aliases:
            assert DeviceSpec.parse(alias, REGISTRY) == DeviceSpec(name=sheet.name)


@pytest.mark.parametrize(("text", "hint"), read_table("Strings that are rejected"))
def test_rejected_strings(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        DeviceSpec.parse(text, REGISTRY).require_count()
    assert caught.value.hint.startswith(hint)
