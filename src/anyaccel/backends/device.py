"""Functions that list, look up and open devices by name, such as `cuda`, `hpu:3` or `auto`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyaccel.backends.availability import (
    Device,
    check_availability,
    find_unmet,
    make_broken_device,
    make_virtual_device,
)
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
# The virtual devices of this process by name: sheet and count. The emulator registers them: it imports this
# package, so this package cannot import the emulator.
_VIRTUAL: dict[str, tuple[Sheet, int]] = {}
# Virtual devices that `auto` must not select: those started only because a device string named them.
_ONLY_BY_NAME: set[str] = set()
# A larger device count is treated as a driver error.
_MAX_DEVICES = 1024


@dataclass(frozen=True)
class OpenDevice:
    """An opened device: its driver, its index, and its sheet for this product and software version."""

    sheet: Sheet
    driver: Driver
    index: int

    @property
    def torch_device(self) -> torch.device:
        """The `torch.device`, including the index: `torch.device("cuda:0")`."""
        import torch

        self.driver.load()
        return torch.device(self.sheet.torch_name, self.index)

    @property
    def tensor_device(self) -> torch.device:
        """The device that `tensor.device` returns for tensors on this device; for the CPU, it has no index."""
        import torch

        return torch.device(self.sheet.torch_name) if self.sheet.is_host else self.torch_device


@functools.cache
def this_machine() -> Machine:
    """Return a description of the machine that this process runs on."""
    return read_machine(sheet for backend in load_registry().backends.values() for sheet in backend.sheets)


def devices() -> list[Device]:
    """Return all known devices with their availability, in order of preference."""
    registry = load_registry()
    registry.check_conflicts()
    if os.environ.get(VIRTUAL_VARIABLE):
        import torch  # noqa: F401 - the import starts the virtual device of the variable
    listed = [find_device(name) for name in registry.backends]
    return [*listed, *(make_broken_device(plugin) for plugin in registry.broken)]


def register_virtual(sheet: Sheet, count: int) -> None:
    """Register `count` virtual devices with this sheet in this process; called by the emulator."""
    _VIRTUAL[sheet.name] = (sheet, count)
    _open_at.cache_clear()  # the name may have been opened as a real device before


def allow_auto(name: str, allowed: bool) -> None:
    """Set whether `auto` may select a virtual device; called by the emulator."""
    if allowed:
        _ONLY_BY_NAME.discard(name)
    else:
        _ONLY_BY_NAME.add(name)


def read_device(device: str | int | torch.device | DeviceSpec) -> DeviceSpec:
    """Parse a device argument into a `DeviceSpec`.

    An integer is a device index for the device type that `auto` selects. `auto` is replaced by the
    value of `ANYACCEL_DEVICE`, if it is set. Available devices are queried only for an integer.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        spec = read_device(AUTO)
        kind = DeviceSpec(name=_find_best()) if spec.name == AUTO else spec
        return kind.with_index(device)
    spec = DeviceSpec.parse(device, load_registry())
    variable = os.environ.get(_DEVICE_VARIABLE) if spec.name == AUTO else None
    return DeviceSpec.parse(variable, load_registry(), f" (from {_DEVICE_VARIABLE})") if variable else spec


def sheet(name: str | torch.device | DeviceSpec) -> Sheet:
    """Return the capability sheet for a device or product, even if the device is not available.

    For example, use `anyaccel.sheet("neuron")`. `cuda` returns the ROCm sheet if torch is a ROCm build;
    `rocm` always returns the ROCm sheet.
    """
    spec = DeviceSpec.parse(name, load_registry())
    backend = load_registry().backend(spec.name)
    if spec.product is not None:
        return next(entry for entry in backend.sheets if entry.name == spec.name).on(product=spec.product)
    variants = {variant.name: variant for variant in backend.variants}
    return variants.get(spec.name) or backend.sheet_on(this_machine())


def find_device(name: str | DeviceSpec) -> Device:
    """Return the availability of a device type, with the reason, a hint and the device names."""
    device_name = DeviceSpec.parse(name, load_registry()).name
    if device_name in _VIRTUAL:
        return make_virtual_device(*_VIRTUAL[device_name])
    origin = load_registry().backend(device_name).origin
    return check_availability(sheet(device_name), this_machine(), _read_names(device_name), origin, device_name)


def is_available(name: str | torch.device | DeviceSpec) -> bool:
    """Return whether a device is available: `anyaccel.is_available("hpu:7")`."""
    spec = DeviceSpec.parse(name, load_registry())
    count = _count(spec.name)
    if not isinstance(count, int) or (spec.virtual and spec.name not in _VIRTUAL):
        return False
    return (spec.index or 0) < count and bool(_filter_by_product(spec, count))


def open_device(device: str | torch.device | DeviceSpec = AUTO) -> OpenDevice:
    """Open a device given by its name (`cuda` or `cuda:1`), its product, a `torch.device` or `auto`.

    `auto` selects the device named by `ANYACCEL_DEVICE` or, if it is not set, the best available
    device. Without an index, the current device is opened. A virtual device must be started first.
    Raises `DeviceUnavailableError` if the device is not available.
    """
    spec = DeviceSpec.parse(device, load_registry())
    spec = read_device(spec) if spec.name == AUTO else spec
    if spec.name == AUTO:
        best = _find_best()
        return _open_at(best, _driver(best).current_index())
    indices = _list_indices(spec)
    # torch's current device may not be the requested product.
    current = _driver(spec.name).current_index() if len(indices) > 1 else indices[0]
    return _open_at(spec.name, current if current in indices else indices[0])


def _find_best() -> str:
    """Return the name of the available device type with the highest `preference` on its sheet."""
    registry = load_registry()
    # A name that several plugins claim raises when it is opened, and must not break `auto`.
    names = [name for name in registry.backends if name not in registry.conflicts and name not in _ONLY_BY_NAME]
    available = [name for name in names if is_available(name)]
    if not available:
        cpu = find_device("cpu")
        raise DeviceUnavailableError(f"no device is available, not even cpu: {cpu.reason}", hint=cpu.hint)
    return max(available, key=lambda name: sheet(name).preference)


def _list_indices(spec: DeviceSpec) -> Sequence[int]:
    """Return the device indices that match a spec; raise if there are none."""
    name = spec.name
    if spec.virtual and name not in _VIRTUAL:
        raise DeviceUnavailableError(
            f"the virtual device {spec} has not been started in this process{spec.given_by}",
            hint=f'use `with anyaccel.virtual("{name}"):`, or set {VIRTUAL_VARIABLE}={name} before the program starts',
        )
    if spec.memory is not None and not spec.virtual:
        raise UsageError(
            f"{spec} includes a memory size{spec.given_by}, but the memory of a real device cannot be changed",
            hint=f"use {name}, or `anyaccel explain MODEL --device {spec}` to plan for a device with this memory size",
        )
    count = _count(name)
    if isinstance(count, str) or count == 0:
        device = find_device(name)
        raise DeviceUnavailableError(f"{name} is not available{spec.given_by}: {device.reason}", hint=device.hint)
    if spec.index is not None and spec.index >= count:
        raise DeviceUnavailableError(
            f"{name}:{spec.index} is not available{spec.given_by}: this process has only {count} {name} "
            f"device{'s' * (count != 1)}, and indices start at 0",
            hint=f"use {name}:{count - 1} or lower" if count > 1 else f"use {name}:0",
        )
    indices = _filter_by_product(spec, count)
    if not indices:
        plain = DeviceSpec(name=name, index=spec.index)
        reason = f"no {name} device in this process has" if spec.index is None else f"{plain} does not have"
        raise DeviceUnavailableError(
            f"{spec} is not available{spec.given_by}: {reason} the product name {spec.product}",
            hint=f"use {plain} to run on the available product",
        )
    return indices


def _filter_by_product(spec: DeviceSpec, count: int) -> Sequence[int]:
    """Return the device indices that match the index and the product in a spec, if they are set."""
    indices = range(count) if spec.index is None else [spec.index]
    if spec.product is None or spec.virtual:  # a virtual device was started as that product
        return indices
    return [index for index in indices if _driver(spec.name).product(index) == spec.product]


@functools.cache
def _open_at(name: str, index: int) -> OpenDevice:
    """Open one available device and resolve the conditional limits on its sheet.

    The conditions are resolved by product, then by software version, then by probing the device.
    """
    # Probing comes last: it runs on the device, so it covers only what product and versions leave open.
    make_driver = load_registry().backend(name).driver
    if name in _VIRTUAL:
        virtual_sheet = _VIRTUAL[name][0]
        return OpenDevice(sheet=virtual_sheet, driver=make_driver(virtual_sheet), index=index)
    product = make_driver(sheet(name)).product(index)
    driver = make_driver(sheet(name).on(product=product, versions=this_machine().versions))
    device = OpenDevice(sheet=driver.sheet, driver=driver, index=index)
    resolved = driver.resolve_conditions(device.torch_device)
    return OpenDevice(sheet=resolved, driver=make_driver(resolved), index=index)


def _driver(name: str) -> Driver:
    return load_registry().backend(name).driver(sheet(name))


def _count(name: str) -> int | str:
    """Return the number of devices of one type, or the error message from the vendor's software."""
    return _VIRTUAL[name][1] if name in _VIRTUAL else _count_real(name)


@functools.cache
def _count_real(name: str) -> int | str:
    """Return the number of physical devices of one type, or the vendor software's error message.

    Return 0 if this machine does not meet the device's requirements.
    """
    # Counting must not initialize a device: the process may still fork.
    if find_unmet(sheet(name), this_machine()):
        return 0
    try:
        with redirect_stdout(sys.stderr):  # vendor imports print banners, which must not mix with JSON output
            count = _driver(name).count()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a vendor's import may raise anything
        return f"{type(error).__name__}: {error}"
    return count if 0 <= count <= _MAX_DEVICES else f"it reports {count} devices"


@functools.cache
def _read_names(name: str) -> tuple[str, ...] | str:
    """Return the name that each device of one type reports, or an error message."""
    count = _count(name)
    if isinstance(count, str):
        return count
    try:
        return tuple(_driver(name).device_name(index) for index in range(count))
    except Exception as error:  # noqa: BLE001 - a vendor's software may raise anything
        return f"{type(error).__name__}: {error}"
