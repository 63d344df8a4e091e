"""Registry of the built-in backends and the backends from installed plugins.

A backend is the `BACKEND` object of a module in `devices`, or an object loaded from an entry point
in the group `anyaccel.backends`. A plugin overrides a built-in backend with the same name; two
plugins with the same name are an error.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from anyaccel.backends.driver import Driver
from anyaccel.backends.evidence_files import load_verifications, merge_evidence
from anyaccel.backends.machine import Machine
from anyaccel.backends.product_names import find_product, suggest_product
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import PluginError, UnknownDeviceError, nearest

__all__ = ["GROUP", "Backend", "BrokenPlugin", "Registry", "load_registry"]

GROUP = "anyaccel.backends"
# The syntax of a device name.
NAME = re.compile(r"[a-z][a-z0-9_]*")
BUILT_IN = "anyaccel"


@dataclass(frozen=True)
class Backend:
    """One accelerator: its sheet and its driver class."""

    sheet: Sheet
    driver: type[Driver] = Driver
    variants: tuple[Sheet, ...] = ()
    """Sheets of other hardware with the same torch device type, selected by the torch build: ROCm for `cuda`."""
    origin: str = BUILT_IN
    """The distribution that provides it; set by the registry."""

    @property
    def name(self) -> str:
        """The device name that users specify."""
        return self.sheet.name

    @property
    def sheets(self) -> tuple[Sheet, ...]:
        """The main sheet and the sheets of its variants, such as ROCm for `cuda`."""
        return (self.sheet, *self.variants)

    def sheet_on(self, machine: Machine) -> Sheet:
        """Return the sheet that matches the torch build on a machine, or the main sheet if none matches."""
        for sheet in self.sheets:
            if sheet.torch_build and sheet.torch_build in machine.torch_builds:
                return sheet
        return self.sheet


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that failed to load; `anyaccel devices` lists it, and other backends are not affected."""

    name: str
    origin: str
    error: str


@dataclass(frozen=True)
class Registry:
    """All backends by name, the plugins that failed to load, and the names that several plugins claim."""

    backends: dict[str, Backend] = field(default_factory=dict)
    broken: tuple[BrokenPlugin, ...] = ()
    conflicts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return all device names that `backend` accepts, including variants such as `rocm`."""
        return [sheet.name for backend in self.backends.values() for sheet in backend.sheets]

    def find_name(self, word: str, given_by: str = "") -> tuple[str, str | None]:
        """Resolve a device name, alias or product to a device name and a product (or None).

        For example, `gaudi2` is resolved to `("hpu", "gaudi2")`, and `rtx 4090` to `("cuda", "rtx4090")`.
        """
        sheets = [sheet for backend in self.backends.values() for sheet in backend.sheets]
        # Device names win over aliases and products of other sheets, which plugins may define.
        for sheet in sheets if word not in self.names() else ():
            if word in sheet.aliases:
                return sheet.name, None
            product = find_product(sheet, word)
            if product is not None:
                return sheet.name, product.name.lower()
        self.backend(word, given_by)
        return word, None

    def list_products(self, name: str) -> list[str]:
        """Return the names of the products on a device's sheet, in lower case."""
        sheet = next(sheet for sheet in self.backend(name).sheets if sheet.name == name)
        return [product.name.lower() for product in sheet.products]

    def backend(self, name: str, origin: str = "") -> Backend:
        """Return the backend for a device or variant name; `rocm` returns the `cuda` backend.

        Raise if the name is unknown, its plugin failed to load, or several plugins claim it.
        """
        self._check_conflict(name)
        if name in self.backends:
            return self.backends[name]
        for backend in self.backends.values():
            if any(sheet.name == name for sheet in backend.variants):
                return backend
        for plugin in self.broken:
            if plugin.name == name:
                raise PluginError(
                    f"the backend {name!r} from {plugin.origin} failed to load: {plugin.error}",
                    hint=f"run `pip install --upgrade {plugin.origin}` or `pip uninstall {plugin.origin}`",
                )
        raise UnknownDeviceError(f"unknown device {name!r}{origin}", hint=self._suggest(name))

    def _suggest(self, word: str) -> str:
        """Return a hint for an unknown device name.

        For an unlisted product, the hint shows how to specify a memory size instead. For the name of a vendor,
        it suggests the devices of that vendor, and otherwise the most similar name.
        """
        if word == "gpu":
            return f"use auto for the best available device; known: {', '.join(self.names())}"
        sheets = [sheet for backend in self.backends.values() for sheet in backend.sheets]
        for sheet in sheets:
            if sheet.product_pattern and re.match(sheet.product_pattern, word):
                return suggest_product(sheet, word)
        # A vendor with several device types, such as Intel, has no alias.
        by_vendor = [sheet.name for sheet in sheets if word == sheet.title.lower().split()[0]]
        if by_vendor:
            return f"did you mean {' or '.join(by_vendor)}? known: {', '.join(self.names())}"
        others = [name for sheet in sheets for name in (*sheet.aliases, *(product.name for product in sheet.products))]
        return nearest(word, self.names(), also=others)

    def check_conflicts(self) -> None:
        """Raise if several plugins claim the same device name."""
        for name in self.conflicts:
            self._check_conflict(name)

    def _check_conflict(self, name: str) -> None:
        if name in self.conflicts:
            claimants = self.conflicts[name]
            raise PluginError(
                f"{len(claimants)} plugins provide the device {name!r}: {', '.join(claimants)}",
                hint=f"uninstall all but one of them, for example: pip uninstall {claimants[-1]}",
            )


@functools.cache
def load_registry() -> Registry:
    """Return the cached registry of built-in backends and installed plugins."""
    return build_registry(importlib.metadata.entry_points(group=GROUP))


def build_registry(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Registry:
    """Return a registry with the built-in backends and the given plugins."""
    backends = {backend.name: backend for backend in _find_built_in()}
    broken: list[BrokenPlugin] = []
    plugins: dict[str, list[Backend]] = {}
    for entry_point in entry_points:
        loaded = _load_plugin(entry_point)
        if isinstance(loaded, BrokenPlugin):
            broken.append(loaded)
        else:
            plugins.setdefault(loaded.name, []).append(loaded)
    conflicts = {
        name: tuple(backend.origin for backend in claimants)
        for name, claimants in plugins.items()
        if len(claimants) > 1
    }
    # A conflict is an error only if the name is used, so one bad plugin does not block other devices.
    backends |= {name: claimants[0] for name, claimants in plugins.items()}
    # The order of `anyaccel devices`: preferred devices first.
    backends = dict(sorted(backends.items(), key=lambda item: (-item[1].sheet.preference, item[0])))
    return Registry(backends=backends, broken=tuple(broken), conflicts=conflicts)


def _find_built_in() -> list[Backend]:
    # A new module in devices/ is found without being listed anywhere.
    package = importlib.import_module(f"{__package__}.devices")
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return [_merge_verifications(module.BACKEND) for module in modules]


def _merge_verifications(backend: Backend) -> Backend:
    """Return the backend with the packaged verification results merged into its sheets."""
    verifications = load_verifications()
    variants = tuple(merge_evidence(sheet, verifications) for sheet in backend.variants)
    return replace(backend, sheet=merge_evidence(backend.sheet, verifications), variants=variants)


def _load_plugin(entry_point: importlib.metadata.EntryPoint) -> Backend | BrokenPlugin:
    # `dist` is None for entry points that are not from an installed distribution, as in tests.
    origin = entry_point.dist.name if entry_point.dist else entry_point.value
    try:
        loaded = entry_point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything, and must not break the others
        return BrokenPlugin(name=entry_point.name, origin=origin, error=f"{type(error).__name__}: {error}")
    problem = _find_problem(loaded, entry_point.value)
    if problem:
        return BrokenPlugin(name=entry_point.name, origin=origin, error=problem)
    return Backend(sheet=loaded.sheet, driver=loaded.driver, variants=loaded.variants, origin=origin)


def _find_problem(loaded: object, where: str) -> str:
    """Return what is wrong with an object loaded from a plugin, or an empty string if it is valid."""
    if not isinstance(loaded, Backend):
        return f"{where} is a {type(loaded).__name__}, not an anyaccel.backends.Backend"
    try:
        for sheet in loaded.sheets:
            if NAME.fullmatch(sheet.name) is None:
                rule = "use lower-case letters, digits and _, starting with a letter"
                return f"{sheet.name!r} is not a valid device name: {rule}"
            probe_sheet(sheet)
        loaded.driver(loaded.sheet)  # the constructor must not raise either
    except Exception as error:  # noqa: BLE001 - a plugin's data may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def probe_sheet(sheet: Sheet) -> None:
    """Evaluate all conditions and patterns in a sheet, so errors are raised when its plugin is loaded."""
    machine = Machine(system="", architecture="", versions={"torch": "1.0", "python": "1.0", "macos": "1.0"})
    sheet.on(versions=machine.versions)
    for requirement in sheet.requirements:
        requirement.unmet(machine)
    for pattern in (sheet.product_pattern, *(product.reported_as for product in sheet.products)):
        re.compile(pattern)
    if not isinstance(sheet.preference, int):
        raise TypeError(f"the preference of {sheet.name} must be an integer, not {sheet.preference!r}")
