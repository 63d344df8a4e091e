"""How a device compiles, and how it executes."""

from __future__ import annotations

from typing import Any

import pytest

from anyaccel.backends.sheet import Compiler, Mode
from anyaccel.errors import UsageError
from anyaccel.planning import PlacementOptions
from anyaccel.planning.compiler import choose_compiler, choose_mode
from tests.planning.sheets import NAMES, limit, real_sheet, without_limits

KNOWN: dict[str, Any] = {"says": "It compiles.", "source": "https://example.org", "evidence": "documented"}


def test_where_no_compiler_is_known_the_plan_says_so() -> None:
    chosen = choose_compiler(without_limits())
    assert chosen.value.backend == ""
    assert str(chosen) == "not known here"
    assert chosen.reason == "No compiler was found."


@pytest.mark.parametrize(
    ("dynamic", "static_shapes", "expected"), [(True, False, False), (False, False, True), (True, True, True)]
)
def test_sizes_are_fixed_where_the_compiler_or_the_device_needs_it(
    dynamic: bool, static_shapes: bool, expected: bool
) -> None:
    compiler = Compiler(backend="b", dynamic=dynamic, fullgraph=True, cache_variable="CACHE", **KNOWN)
    shapes = {"data_dependent_shapes": limit("error")} if static_shapes else {}
    rule = choose_compiler(without_limits(compiler=compiler, **shapes)).value
    assert (rule.backend, rule.fullgraph, rule.static, rule.cache_variable) == ("b", True, expected, "CACHE")
    assert ("a graph for each size" in str(rule)) is expected
    assert "whole graphs" in str(rule)


def test_the_sheets_name_a_compiler_or_say_that_none_is_known() -> None:
    rules = {name: choose_compiler(real_sheet(name)) for name in NAMES}
    assert all(rule.reason for rule in rules.values())
    assert rules["neuron"].value.static
    assert rules["neuron"].value.backend
    assert not rules["cuda"].value.static


MODES = (
    Mode(name="eager", settings=(("LAZY", "0"),), **KNOWN),
    Mode(name="lazy", settings=(("LAZY", "1"),), **KNOWN),
)


def test_the_first_way_unless_another_is_asked_for_or_set() -> None:
    sheet = without_limits(modes=MODES)
    assert choose_mode(sheet, PlacementOptions(), {}).value == "eager"
    asked = choose_mode(sheet, PlacementOptions(mode="lazy"), {})
    assert asked.value == "lazy"
    assert asked.reason.startswith("asked for")
    by_environment = choose_mode(sheet, PlacementOptions(), {"LAZY": "1"})
    assert by_environment.value == "lazy"
    assert "LAZY=1" in by_environment.reason
    assert choose_mode(sheet, PlacementOptions(mode="eager"), {"LAZY": "1"}).value == "eager"
    assert choose_mode(sheet, PlacementOptions(), {"LAZY": "7"}).value == "eager"


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="has no mode 'graph'") as caught:
        choose_mode(without_limits(modes=MODES), PlacementOptions(mode="graph"), {})
    assert "eager, lazy" in caught.value.hint
    with pytest.raises(UsageError, match="one way only"):
        choose_mode(without_limits(), PlacementOptions(mode="lazy"), {})
    assert choose_mode(without_limits(), PlacementOptions(mode="eager"), {}).value == "eager"
    assert choose_mode(without_limits(), PlacementOptions(), {}).value == "eager"
