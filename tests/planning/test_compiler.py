"""Choice of the compiler and of the execution mode."""

from __future__ import annotations

from typing import Any

import pytest

from anyaccel.backends.sheet import Compiler, Mode
from anyaccel.errors import UsageError
from anyaccel.planning import PlacementOptions
from anyaccel.planning.compiler import choose_compiler, choose_mode
from tests.planning.sheets import NAMES, limit, real_sheet, without_limits

CLAIM: dict[str, Any] = {"says": "It compiles.", "source": "https://example.org", "evidence": "documented"}


def test_plan_reports_an_unknown_compiler() -> None:
    chosen = choose_compiler(without_limits())
    assert chosen.value.backend == ""
    assert str(chosen) == "unknown"
    assert chosen.reason == "No compiler was found."


@pytest.mark.parametrize(
    ("dynamic", "static_shapes", "expected"), [(True, False, False), (False, False, True), (True, True, True)]
)
def test_shapes_are_static_if_the_compiler_or_the_device_requires_it(
    dynamic: bool, static_shapes: bool, expected: bool
) -> None:
    compiler = Compiler(backend="b", dynamic=dynamic, fullgraph=True, cache_variable="CACHE", **CLAIM)
    shapes = {"data_dependent_shapes": limit("error")} if static_shapes else {}
    rule = choose_compiler(without_limits(compiler=compiler, **shapes)).value
    assert (rule.backend, rule.fullgraph, rule.static, rule.cache_variable) == ("b", True, expected, "CACHE")
    assert ("one graph per size" in str(rule)) is expected
    assert "full graph" in str(rule)


def test_built_in_sheets_explain_the_compiler() -> None:
    rules = {name: choose_compiler(real_sheet(name)) for name in NAMES}
    assert all(rule.reason for rule in rules.values())
    assert rules["neuron"].value.static
    assert rules["neuron"].value.backend
    assert not rules["cuda"].value.static


MODES = (
    Mode(name="eager", settings=(("LAZY", "0"),), **CLAIM),
    Mode(name="lazy", settings=(("LAZY", "1"),), **CLAIM),
)


def test_first_mode_is_the_default_unless_requested_or_set_in_the_environment() -> None:
    sheet = without_limits(modes=MODES)
    assert choose_mode(sheet, PlacementOptions(), {}).value == "eager"
    requested = choose_mode(sheet, PlacementOptions(mode="lazy"), {})
    assert requested.value == "lazy"
    assert requested.reason.startswith("mode=")
    by_environment = choose_mode(sheet, PlacementOptions(), {"LAZY": "1"})
    assert by_environment.value == "lazy"
    assert "LAZY=1" in by_environment.reason
    assert choose_mode(sheet, PlacementOptions(mode="eager"), {"LAZY": "1"}).value == "eager"
    assert choose_mode(sheet, PlacementOptions(), {"LAZY": "7"}).value == "eager"


def test_unknown_mode_raises() -> None:
    with pytest.raises(UsageError, match="does not support mode='graph'") as caught:
        choose_mode(without_limits(modes=MODES), PlacementOptions(mode="graph"), {})
    assert caught.value.hint == "use mode='eager' or mode='lazy', or omit mode"
    with pytest.raises(UsageError, match="supports only mode='eager', not 'lazy'"):
        choose_mode(without_limits(), PlacementOptions(mode="lazy"), {})
    assert choose_mode(without_limits(), PlacementOptions(mode="eager"), {}).value == "eager"
    assert choose_mode(without_limits(), PlacementOptions(), {}).value == "eager"
