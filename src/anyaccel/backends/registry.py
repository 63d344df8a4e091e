"""Which backends there are: the files of this folder, and the plugins that are installed.

A backend is found by itself: a module here with a `BACKEND`, or an entry point of the group `anyaccel.backends`
that leads to one. A plugin wins over a built-in backend of its name; two plugins of one name are an error.
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
from anyaccel.backends.evidence import load_verifications, merge_evidence
from anyaccel.backends.machine import Machine
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import PluginError, UnknownDeviceError, nearest

__all__ = ["GROUP", "Backend", "BrokenPlugin", "Registry", "load_registry"]

GROUP = "anyaccel.backends"
NAME = re.compile(r"[a-z][a-z0-9_]*")
"""How the name of a device is written."""
BUILT_IN = "anyaccel"


@dataclass(frozen=True)
class Backend:
    """One accelerator: what it can do, and how things are done there."""

    sheet: Sheet
    driver: type[Driver] = Driver
    variants: tuple[Sheet, ...] = ()
    """Other hardware behind the same torch device, told apart by the build of torch: ROCm behind `cuda`."""
    origin: str = BUILT_IN
    """The distribution that brings it; the registry fills it in."""

    @property
    def name(self) -> str:
        """The name that users write."""
        return self.sheet.name

    @property
    def sheets(self) -> tuple[Sheet, ...]:
        """The main sheet and its variants."""
        return (self.sheet, *self.variants)

    def sheet_on(self, machine: Machine) -> Sheet:
        """The sheet of the hardware that this machine's torch was built for."""
        for sheet in self.sheets:
            if sheet.torch_build and sheet.torch_build in machine.torch_builds:
                return sheet
        return self.sheet


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that could not be loaded: shown, and nothing else suffers."""

    name: str
    origin: str
    error: str


@dataclass(frozen=True)
class Registry:
    """The backends by name, the broken plugins, and the names that several plugins claim."""

    backends: dict[str, Backend] = field(default_factory=dict)
    broken: tuple[BrokenPlugin, ...] = ()
    conflicts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Every name that `backend` answers to, variants included."""
        return [sheet.name for backend in self.backends.values() for sheet in backend.sheets]

    def find_name(self, word: str, given_by: str = "") -> tuple[str, str | None]:
        """Return the sheet's name, and the product if `word` is one: `("hpu", "gaudi2")` for `gaudi2`."""
        sheets = [sheet for backend in self.backends.values() for sheet in backend.sheets]
        for sheet in sheets if word not in self.names() else ():
            if word in self.list_products(sheet.name):
                return sheet.name, word
            if word in sheet.aliases:
                return sheet.name, None
        self.backend(word, given_by)
        return word, None

    def list_products(self, name: str) -> list[str]:
        """Return the names of the products on the sheet of that name."""
        sheet = next(sheet for sheet in self.backend(name).sheets if sheet.name == name)
        return [product.name.lower() for product in sheet.products]

    def backend(self, name: str, origin: str = "") -> Backend:
        """The backend of that name, or of a variant's: `rocm` is `cuda`'s."""
        self._refuse_conflict(name)
        if name in self.backends:
            return self.backends[name]
        for backend in self.backends.values():
            if any(sheet.name == name for sheet in backend.variants):
                return backend
        for plugin in self.broken:
            if plugin.name == name:
                raise PluginError(
                    f"the backend {name!r} of {plugin.origin} could not be loaded: {plugin.error}",
                    hint=f"update or uninstall {plugin.origin}",
                )
        raise UnknownDeviceError(f"unknown device {name!r}{origin}", hint=self._suggest(name))

    def _suggest(self, word: str) -> str:
        """What to write instead: the memory for a product that no sheet lists, else the most similar word."""
        sheets = [sheet for backend in self.backends.values() for sheet in backend.sheets]
        for sheet in sheets:
            if sheet.product_pattern and re.match(sheet.product_pattern, word):
                listed = ", ".join(product.name for product in sheet.products)
                return f"give the memory: {sheet.name}:24GiB; products of {sheet.name} by name: {listed}"
        words = [word for sheet in sheets for word in (*sheet.aliases, *(one.name for one in sheet.products))]
        return nearest(word, self.names(), also=words)

    def refuse_conflicts(self) -> None:
        """Raise if two plugins claim one name."""
        for name in self.conflicts:
            self._refuse_conflict(name)

    def _refuse_conflict(self, name: str) -> None:
        if name in self.conflicts:
            claimants = self.conflicts[name]
            raise PluginError(
                f"the device {name!r} is claimed by {len(claimants)} plugins: {', '.join(claimants)}",
                hint=f"uninstall all but one of them, for example: pip uninstall {claimants[-1]}",
            )


@functools.cache
def load_registry() -> Registry:
    """Find every backend, once a process."""
    return build_registry(importlib.metadata.entry_points(group=GROUP))


def build_registry(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Registry:
    """The built-in backends and those of the given entry points."""
    backends = {backend.name: backend for backend in _find_built_in()}
    broken: list[BrokenPlugin] = []
    plugins: dict[str, list[Backend]] = {}
    for entry_point in entry_points:
        loaded = _load_plugin(entry_point)
        if isinstance(loaded, BrokenPlugin):
            broken.append(loaded)
        else:
            plugins.setdefault(loaded.name, []).append(loaded)
    conflicts = {name: tuple(rival.origin for rival in rivals) for name, rivals in plugins.items() if len(rivals) > 1}
    backends |= {name: rivals[0] for name, rivals in plugins.items()}
    backends = dict(sorted(backends.items(), key=lambda item: (-item[1].sheet.preference, item[0])))
    return Registry(backends=backends, broken=tuple(broken), conflicts=conflicts)


def _find_built_in() -> list[Backend]:
    package = importlib.import_module(f"{__package__}.devices")
    modules = [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return [_take_in_evidence(module.BACKEND) for module in modules]


def _take_in_evidence(backend: Backend) -> Backend:
    """The backend with what was seen on real devices on its sheets."""
    seen = load_verifications()
    variants = tuple(merge_evidence(sheet, seen) for sheet in backend.variants)
    return replace(backend, sheet=merge_evidence(backend.sheet, seen), variants=variants)


def _load_plugin(entry_point: importlib.metadata.EntryPoint) -> Backend | BrokenPlugin:
    origin = entry_point.dist.name if entry_point.dist else entry_point.value
    try:
        loaded = entry_point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything; its error is shown
        return BrokenPlugin(name=entry_point.name, origin=origin, error=f"{type(error).__name__}: {error}")
    problem = _find_fault(loaded, entry_point.value)
    if problem:
        return BrokenPlugin(name=entry_point.name, origin=origin, error=problem)
    return Backend(sheet=loaded.sheet, driver=loaded.driver, variants=loaded.variants, origin=origin)


def _find_fault(loaded: object, where: str) -> str:
    """What is wrong with what a plugin gave; empty where nothing is. One plugin must not spoil the others."""
    if not isinstance(loaded, Backend):
        return f"{where} is a {type(loaded).__name__}, not an anyaccel.backends.Backend"
    try:
        for sheet in loaded.sheets:
            if NAME.fullmatch(sheet.name) is None:
                return f"{sheet.name!r} is no name for a device: small letters, digits and _, a letter first"
            probe_sheet(sheet)
        loaded.driver(loaded.sheet)
    except Exception as error:  # noqa: BLE001 - whatever a plugin's data does, its error is shown
        return f"{type(error).__name__}: {error}"
    return ""


def probe_sheet(sheet: Sheet) -> None:
    """Ask a sheet everything that is asked of one, so that a fault in it shows at once."""
    nowhere = Machine(system="", architecture="", versions={"torch": "1.0", "python": "1.0", "macos": "1.0"})
    sheet.on(versions=nowhere.versions)
    for requirement in sheet.requirements:
        requirement.unmet(nowhere)
    for pattern in (sheet.product_pattern, *(product.reported_as for product in sheet.products)):
        re.compile(pattern)
    if not isinstance(sheet.preference, int):
        raise TypeError(f"the preference of {sheet.name} is {sheet.preference!r}, not a whole number")
