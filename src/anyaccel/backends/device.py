"""Devices as users name them: which are here, which one `auto` takes, and opening one to work on."""

from __future__ import annotations

import functools
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyaccel.backends.availability import Device, describe_broken, describe_virtual, examine, find_unmet
from anyaccel.backends.driver import Driver
from anyaccel.backends.machine import Machine, read_machine
from anyaccel.backends.registry import NAME, load_registry
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import DeviceUnavailableError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEVICE_VARIABLE",
    "OpenDevice",
    "devices",
    "find_device",
    "is_available",
    "open_device",
    "sheet",
    "this_machine",
]

DEVICE_VARIABLE = "ANYACCEL_DEVICE"
VIRTUAL_VARIABLE = "ANYACCEL_VIRTUAL"
_VIRTUAL: dict[str, tuple[Sheet, int]] = {}
_SPELLING = re.compile(rf"(?P<name>{NAME.pattern})(:(?P<index>[0-9]{{1,9}}))?")
_MOST = 1024
"""More devices than this in one process is a fault of the driver's."""


@dataclass(frozen=True)
class OpenDevice:
    """A device that is there: its sheet as it reads on this machine, its driver, and which one it is."""

    sheet: Sheet
    driver: Driver
    index: int

    @property
    def torch_device(self) -> torch.device:
        """The device in torch's terms: `torch.device("cuda:0")`."""
        import torch

        self.driver.load()
        return torch.device(self.sheet.torch_name, self.index)


@functools.cache
def this_machine() -> Machine:
    """The machine that this process runs on, read once."""
    return read_machine(sheet for backend in load_registry().backends.values() for sheet in backend.sheets)


def devices() -> list[Device]:
    """Every backend that anyaccel knows, with whether it is here and why, the best first."""
    registry = load_registry()
    registry.refuse_conflicts()
    if os.environ.get(VIRTUAL_VARIABLE):
        import torch  # noqa: F401 - loads the virtual device that the variable asks for
    found = [find_device(name) for name in registry.backends]
    return [*found, *(describe_broken(plugin) for plugin in registry.broken)]


def announce_virtual(sheet: Sheet, count: int) -> None:
    """From now on this process has a virtual device of that name; the emulator says so."""
    _VIRTUAL[sheet.name] = (sheet, count)
    _settle.cache_clear()


def sheet(name: str | torch.device) -> Sheet:
    """The capability sheet of a device, whether it is here or not: `anyaccel.sheet("neuron")`.

    `cuda` gives ROCm's sheet on a machine whose torch was built for it; `rocm` always does.
    """
    asked, _ = _split(name)
    backend = load_registry().backend(asked)
    variants = {variant.name: variant for variant in backend.variants}
    return variants.get(asked) or backend.sheet_on(this_machine())


def find_device(name: str) -> Device:
    """Whether one kind of device is here, and why or why not."""
    asked, _ = _split(name)
    if asked in _VIRTUAL:
        return describe_virtual(*_VIRTUAL[asked])
    origin = load_registry().backend(asked).origin
    return examine(sheet(asked), this_machine(), _name_all(asked), origin, asked)


def is_available(name: str | torch.device) -> bool:
    """Whether a device of that name is here: `anyaccel.is_available("xpu")`, `anyaccel.is_available("hpu:7")`."""
    asked, index = _split(name)
    count = _count(asked)
    return isinstance(count, int) and (index or 0) < count


def open_device(device: str | torch.device = "auto") -> OpenDevice:
    """The device to work on: a name, a name with an index, a `torch.device` or `auto`.

    `auto` takes what `ANYACCEL_DEVICE` says, and the best device that is here otherwise. Without an index it is the
    one that the process has made its current one.
    """
    asked, said_by = str(device), ""
    if asked == "auto":
        asked, said_by = os.environ.get(DEVICE_VARIABLE) or "auto", f" (from {DEVICE_VARIABLE})"
    if asked == "auto":
        return _open_best()
    name, index = _split(asked, said_by)
    if name not in load_registry().names():
        load_registry().backend(name, said_by)
    count = _count(name)
    if isinstance(count, str) or count == 0:
        found = find_device(name)
        raise DeviceUnavailableError(f"{name} is not available{said_by}: {found.reason}", hint=found.hint)
    if index is not None and index >= count:
        raise DeviceUnavailableError(
            f"there is no {name}:{index}{said_by}: this process sees {count} of them, counted from 0",
            hint=f"take {name}:{count - 1} or lower",
        )
    return _settle(name, _driver(name).current_index() if index is None else index)


def _open_best() -> OpenDevice:
    registry = load_registry()
    names = [name for name in registry.backends if name not in registry.conflicts]
    here = [name for name in names if is_available(name)]
    if not here:
        host = find_device("cpu")
        raise DeviceUnavailableError(f"no device is available, not even cpu: {host.reason}", hint=host.hint)
    best = max(here, key=lambda name: sheet(name).preference)
    return _settle(best, _driver(best).current_index())


@functools.cache
def _settle(name: str, index: int) -> OpenDevice:
    """An available device with what its sheet leaves open settled: by version and product, then by the device."""
    make_driver = load_registry().backend(name).driver
    if name in _VIRTUAL:
        settled = _VIRTUAL[name][0]
        return OpenDevice(sheet=settled, driver=make_driver(settled), index=index)
    product = make_driver(sheet(name)).product(index)
    read = make_driver(sheet(name).on(product=product, versions=this_machine().versions))
    device = OpenDevice(sheet=read.sheet, driver=read, index=index)
    asked = read.settle(device.torch_device)
    return OpenDevice(sheet=asked, driver=make_driver(asked), index=index)


def _driver(name: str) -> Driver:
    return load_registry().backend(name).driver(sheet(name))


def _count(name: str) -> int | str:
    """How many devices there are, or the words of the vendor's software for why it fails."""
    return _VIRTUAL[name][1] if name in _VIRTUAL else _count_real(name)


@functools.cache
def _count_real(name: str) -> int | str:
    """Asked only if the requirements are met; starts no device, so that a process may still fork."""
    if find_unmet(sheet(name), this_machine()):
        return 0
    try:
        with redirect_stdout(sys.stderr):  # what a vendor's import prints is no result of ours
            count = _driver(name).count()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a vendor's import may raise anything: its words are kept
        return f"{type(error).__name__}: {error}"
    return count if 0 <= count <= _MOST else f"it counts {count} devices"


@functools.cache
def _name_all(name: str) -> tuple[str, ...] | str:
    """What each device calls itself, or why that cannot be said."""
    count = _count(name)
    if isinstance(count, str):
        return count
    try:
        return tuple(_driver(name).device_name(index) for index in range(count))
    except Exception as error:  # noqa: BLE001 - a vendor's software may raise anything: its words are kept
        return f"{type(error).__name__}: {error}"


def _split(device: str | torch.device, said_by: str = "") -> tuple[str, int | None]:
    """`("hpu", 3)` for `hpu:3`; the index is None where none is given."""
    match = _SPELLING.fullmatch(str(device).lower())
    if match is None:
        raise UsageError(
            f"{str(device)!r} is not how a device is written{said_by}",
            hint=f"write a name, or a name and a number: cuda, hpu:3; known: {', '.join(load_registry().names())}",
        )
    return match["name"], None if match["index"] is None else int(match["index"])
