"""Devices as users name them: which are here, which one `auto` takes, and opening one to work on."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyaccel.backends.availability import Device, describe_broken, describe_virtual, examine, find_unmet
from anyaccel.backends.device_spec import AUTO, DeviceSpec
from anyaccel.backends.driver import Driver
from anyaccel.backends.machine import Machine, read_machine
from anyaccel.backends.registry import load_registry
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import DeviceUnavailableError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "OpenDevice",
    "devices",
    "find_device",
    "is_available",
    "open_device",
    "read_device",
    "sheet",
    "this_machine",
]

_DEVICE_VARIABLE = "ANYACCEL_DEVICE"
VIRTUAL_VARIABLE = "ANYACCEL_VIRTUAL"
_VIRTUAL: dict[str, tuple[Sheet, int]] = {}
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

    @property
    def tensor_device(self) -> torch.device:
        """The device as its tensors report it: without an index on the CPU."""
        import torch

        return torch.device(self.sheet.torch_name) if self.sheet.is_host else self.torch_device


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


def register_virtual(sheet: Sheet, count: int) -> None:
    """From now on this process has a virtual device of that name; the emulator says so."""
    _VIRTUAL[sheet.name] = (sheet, count)
    _settle.cache_clear()


def read_device(device: str | int | torch.device | DeviceSpec) -> DeviceSpec:
    """Return what a device argument says: an integer is an index of the `auto` device.

    `auto` becomes what `ANYACCEL_DEVICE` says. Nothing is opened, except to find the kind that an integer counts.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        spec = read_device(AUTO)
        kind = DeviceSpec(name=_find_best()) if spec.name == AUTO else spec
        return kind.with_index(device)
    spec = DeviceSpec.parse(device, load_registry())
    variable = os.environ.get(_DEVICE_VARIABLE) if spec.name == AUTO else None
    return DeviceSpec.parse(variable, load_registry(), f" (from {_DEVICE_VARIABLE})") if variable else spec


def sheet(name: str | torch.device | DeviceSpec) -> Sheet:
    """The capability sheet of a device or a product, whether it is here or not: `anyaccel.sheet("neuron")`.

    `cuda` gives ROCm's sheet on a machine whose torch was built for it; `rocm` always does.
    """
    spec = DeviceSpec.parse(name, load_registry())
    backend = load_registry().backend(spec.name)
    if spec.product is not None:
        return next(one for one in backend.sheets if one.name == spec.name).on(product=spec.product)
    variants = {variant.name: variant for variant in backend.variants}
    return variants.get(spec.name) or backend.sheet_on(this_machine())


def find_device(name: str | DeviceSpec) -> Device:
    """Whether one kind of device is here, and why or why not."""
    asked = DeviceSpec.parse(name, load_registry()).name
    if asked in _VIRTUAL:
        return describe_virtual(*_VIRTUAL[asked])
    origin = load_registry().backend(asked).origin
    return examine(sheet(asked), this_machine(), _name_all(asked), origin, asked)


def is_available(name: str | torch.device | DeviceSpec) -> bool:
    """Whether a device of that name is here: `anyaccel.is_available("xpu")`, `anyaccel.is_available("hpu:7")`."""
    spec = DeviceSpec.parse(name, load_registry())
    count = _count(spec.name)
    if not isinstance(count, int) or (spec.virtual and spec.name not in _VIRTUAL):
        return False
    return (spec.index or 0) < count and bool(_keep_product(spec, count))


def open_device(device: str | torch.device | DeviceSpec = AUTO) -> OpenDevice:
    """The device to work on: a name, a name with an index, a product, a `torch.device` or `auto`.

    `auto` takes what `ANYACCEL_DEVICE` says, and the best device that is here otherwise. Without an index it is the
    one that the process has made its current one. A virtual device must have been started.
    """
    spec = DeviceSpec.parse(device, load_registry())
    spec = read_device(spec) if spec.name == AUTO else spec
    if spec.name == AUTO:
        best = _find_best()
        return _settle(best, _driver(best).current_index())
    indices = _list_indices(spec)
    current = _driver(spec.name).current_index() if len(indices) > 1 else indices[0]
    return _settle(spec.name, current if current in indices else indices[0])


def _find_best() -> str:
    """The name of the best device that is available."""
    registry = load_registry()
    names = [name for name in registry.backends if name not in registry.conflicts]
    here = [name for name in names if is_available(name)]
    if not here:
        host = find_device("cpu")
        raise DeviceUnavailableError(f"no device is available, not even cpu: {host.reason}", hint=host.hint)
    return max(here, key=lambda name: sheet(name).preference)


def _list_indices(spec: DeviceSpec) -> Sequence[int]:
    """The indices of the devices that a spec may mean; raise if there is none."""
    name = spec.name
    if spec.virtual and name not in _VIRTUAL:
        raise DeviceUnavailableError(
            f"{spec} was not started in this process{spec.given_by}",
            hint=f'with anyaccel.virtual("{name}"): ..., or {VIRTUAL_VARIABLE}={name} before the program starts',
        )
    if spec.memory is not None and not spec.virtual:
        raise UsageError(
            f"{spec} describes a device by its memory, and a device is not opened by it{spec.given_by}",
            hint=f"write {name}",
        )
    count = _count(name)
    if isinstance(count, str) or count == 0:
        found = find_device(name)
        raise DeviceUnavailableError(f"{name} is not available{spec.given_by}: {found.reason}", hint=found.hint)
    if spec.index is not None and spec.index >= count:
        raise DeviceUnavailableError(
            f"there is no {name}:{spec.index}{spec.given_by}: this process sees {count} of them, counted from 0",
            hint=f"take {name}:{count - 1} or lower",
        )
    indices = _keep_product(spec, count)
    if not indices:
        device = DeviceSpec(name=name, index=spec.index)
        raise DeviceUnavailableError(f"{device} is not a {spec.product}{spec.given_by}", hint=f"write {device}")
    return indices


def _keep_product(spec: DeviceSpec, count: int) -> Sequence[int]:
    """The indices that are of the spec's product, where it names one; a virtual device was started as it."""
    indices = range(count) if spec.index is None else [spec.index]
    if spec.product is None or spec.virtual:
        return indices
    return [index for index in indices if _driver(spec.name).product(index) == spec.product]


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
