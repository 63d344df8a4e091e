"""Registry of backends: discovery, broken plugins and name conflicts."""

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
    name = "plugin_of_these_tests"
    sys.modules[name] = types.SimpleNamespace(TOASTER=TOASTER, NOT_ONE="a string")  # type: ignore[assignment]
    yield name
    del sys.modules[name]


def test_plugin_is_found(module: str) -> None:
    registry = build_registry([EntryPoint("toaster", f"{module}:TOASTER", GROUP)])
    assert registry.backend("toaster").sheet.title == "Toaster"
    assert "toaster" in registry.names()


def test_plugin_that_fails_to_load_is_listed_with_its_error(module: str) -> None:
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


def test_two_plugins_with_the_same_name_raise_for_that_name_only(module: str) -> None:
    twice = [EntryPoint("toaster", f"{module}:TOASTER", GROUP), EntryPoint("toaster2", f"{module}:TOASTER", GROUP)]
    registry = build_registry(twice)
    with pytest.raises(PluginError, match="2 plugins provide the device 'toaster'"):
        registry.backend("toaster")
    with pytest.raises(PluginError, match="2 plugins provide the device"):
        registry.check_conflicts()
    assert registry.backend("cpu")


def test_plugin_overrides_a_built_in_backend(module: str) -> None:
    sys.modules[module].MINE = Backend(sheet=replace(CPU, name="mps", title="Mine"))  # type: ignore[attr-defined]
    registry = build_registry([EntryPoint("mps", f"{module}:MINE", GROUP)])
    assert registry.backend("mps").sheet.title == "Mine"


@pytest.mark.parametrize(("misspelled", "nearest"), [("nueron", "neuron"), ("MPS", "mps"), ("cude", "cuda")])
def test_unknown_device_suggests_the_nearest_and_lists_all(misspelled: str, nearest: str) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        build_registry([]).backend(misspelled)
    assert f"did you mean {nearest}?" in caught.value.hint
    assert all(name in caught.value.hint for name in ("cpu", "cuda", "rocm", "hpu", "mlu"))


def test_variant_is_found_by_name() -> None:
    assert build_registry([]).backend("rocm").name == "cuda"
