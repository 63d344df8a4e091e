"""Quirks: those that code handles are on a sheet, and all others are marked as information only."""

import ast

import pytest

from anyaccel.backends import quirks
from anyaccel.backends.claim import Quirk
from anyaccel.backends.quirks import KNOWN_QUIRKS
from anyaccel.errors import UsageError
from tests.conftest import ALL_SHEETS, SOURCE
from tests.source_trees import parse

CONSTANTS = {name: value for name, value in vars(quirks).items() if name.isupper() and isinstance(value, str)}
CONSUMERS = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "backends"]


def make_quirk(name: str, information_only: bool = False) -> Quirk:
    return Quirk(
        name=name,
        information_only=information_only,
        says="It differs.",
        source="https://example.com",
        evidence="documented",
        effect="wrong",
        hint="avoid it",
    )


def test_every_known_quirk_is_a_constant_and_on_a_sheet() -> None:
    assert set(CONSTANTS.values()) == KNOWN_QUIRKS
    assert all(value.upper() == name for name, value in CONSTANTS.items())
    assert {quirk.name for sheet in ALL_SHEETS for quirk in sheet.quirks if not quirk.information_only} == KNOWN_QUIRKS


def test_code_reacts_to_every_known_quirk() -> None:
    used = {node.id for path in CONSUMERS for node in ast.walk(parse(path.read_text())) if isinstance(node, ast.Name)}
    assert set(CONSTANTS) - used == set()


def test_code_uses_constants_for_quirk_names() -> None:
    names = {quirk.name for sheet in ALL_SHEETS for quirk in sheet.quirks}
    literals = {
        f"{path.relative_to(SOURCE)}: {node.value}"
        for path in CONSUMERS
        for node in ast.walk(parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.removeprefix("quirks.") in names
    }
    assert literals == set()


def test_misspelled_quirk_raises_when_the_sheet_is_defined() -> None:
    with pytest.raises(UsageError, match="unknown quirk 'float32_atention'") as caught:
        make_quirk("float32_atention")
    assert "did you mean float32_attention?" in caught.value.hint
    assert make_quirk("rattles", information_only=True).information_only
    with pytest.raises(
        UsageError,
        match="the quirk 'float32_attention' cannot have information_only=True: anyaccel has code that handles it",
    ):
        make_quirk("float32_attention", information_only=True)
