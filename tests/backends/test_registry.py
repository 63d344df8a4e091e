"""Backends are found by themselves; plugins are found, shown when broken, and refused when two claim one name."""

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from anyaccel.backends.devices.cpu import SHEET as CPU
from anyaccel.backends.registry import GROUP, Backend, build_registry
from anyaccel.errors import PluginError, UnknownDeviceError

TOASTER = Backend(sheet=replace(CPU, name="toaster", title="Toaster"))


@pytest.fixture
def module() -> Iterator[str]:
    name = "a_plugin_of_the_tests"
    sys.modules[name] = types.SimpleNamespace(TOASTER=TOASTER, NOT_ONE="a string")  # type: ignore[assignment]
    yield name
    del sys.modules[name]


def test_a_plugin_is_found(module: str) -> None:
    registry = build_registry([EntryPoint("toaster", f"{module}:TOASTER", GROUP)])
    assert registry.backend("toaster").sheet.title == "Toaster"
    assert "toaster" in registry.names()


def test_a_plugin_that_cannot_be_imported_is_kept_with_its_error(module: str) -> None:
    registry = build_registry(
        [
            EntryPoint("gone", "no_such_module_anywhere:BACKEND", GROUP),
            EntryPoint("odd", f"{module}:NOT_ONE", GROUP),
            EntryPoint("toaster", f"{module}:TOASTER", GROUP),
        ]
    )
    errors = {plugin.name: plugin.error for plugin in registry.broken}
    assert errors == {
        "gone": "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        "odd": f"{module}:NOT_ONE is a str, not an anyaccel.backends.Backend",
    }
    assert registry.backend("toaster")
    assert registry.backend("cpu")
    with pytest.raises(PluginError, match="No module named 'no_such_module_anywhere'"):
        registry.backend("gone")


def test_two_plugins_that_claim_one_name_are_an_error_for_that_name_alone(module: str) -> None:
    twice = [EntryPoint("toaster", f"{module}:TOASTER", GROUP), EntryPoint("toaster2", f"{module}:TOASTER", GROUP)]
    registry = build_registry(twice)
    with pytest.raises(PluginError, match="'toaster' is claimed by 2 plugins"):
        registry.backend("toaster")
    with pytest.raises(PluginError, match="claimed by 2 plugins"):
        registry.refuse_conflicts()
    assert registry.backend("cpu")


def test_a_plugin_wins_over_a_built_in_backend(module: str) -> None:
    sys.modules[module].MINE = Backend(sheet=replace(CPU, name="mps", title="Mine"))  # type: ignore[attr-defined]
    registry = build_registry([EntryPoint("mps", f"{module}:MINE", GROUP)])
    assert registry.backend("mps").sheet.title == "Mine"


@pytest.mark.parametrize(("asked", "nearest"), [("nueron", "neuron"), ("MPS", "mps"), ("cude", "cuda")])
def test_an_unknown_device_names_the_nearest_and_lists_the_known(asked: str, nearest: str) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        build_registry([]).backend(asked)
    assert f"did you mean {nearest}?" in caught.value.hint
    assert all(name in caught.value.hint for name in ("cpu", "cuda", "rocm", "hpu", "mlu"))


def test_a_variant_is_found_by_its_own_name() -> None:
    assert build_registry([]).backend("rocm").name == "cuda"
