"""Activation of a virtual accelerator: `with anyaccel.virtual("neuron") as v:`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from anyaccel.backends.device import allow_auto, find_device, register_virtual, this_machine
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.device_spec import DeviceSpec
from anyaccel.backends.registry import load_registry
from anyaccel.backends.sheet import Sheet
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.collectives import install_collectives
from anyaccel.emulator.compiler_stub import install_compiler
from anyaccel.emulator.device_from_int import install_ordinal_devices
from anyaccel.emulator.dispatch import dispatch
from anyaccel.emulator.generator import install_generator
from anyaccel.emulator.gradients import install_gradients
from anyaccel.emulator.predispatch_patches import install_device_patches
from anyaccel.emulator.registration import register_device
from anyaccel.emulator.tensor import activate
from anyaccel.emulator.vendor_modules import install_vendor_packages, make_device_module
from anyaccel.errors import UsageError, VirtualDeviceError
from anyaccel.units import parse_size
from anyaccel.upstream.torch_compile_internals import load_dynamo

__all__ = ["start", "start_spec", "virtual"]

_STARTED: list[VirtualAccelerator] = []


@contextmanager
def virtual(
    name: str, count: int = 1, memory: str | int | None = None, strict: bool = False
) -> Iterator[VirtualAccelerator]:
    """Activate a virtual accelerator inside a `with` block: `with anyaccel.virtual("hpu") as v: …`.

    `memory` is a size (`"16GiB"` or a number of bytes) or a product on the sheet (`"gaudi2"`). Limits are
    enforced, and `auto` selects the device, until the block exits; the device type stays registered until the
    process ends. With `strict`, limits with the effect "error" raise an exception.
    """
    accelerator = start(name, count=count, memory=memory, strict=strict)
    try:
        yield accelerator
    finally:
        accelerator.enforcing = False
        allow_auto(accelerator.sheet.name, False)


def start(name: str, count: int = 1, memory: str | int | None = None, strict: bool = False) -> VirtualAccelerator:
    """Start a virtual accelerator that remains active until the process ends."""
    spec = DeviceSpec.parse(name, load_registry())
    name = (replace(spec, product=None) if memory is None else spec).require_name()
    memory = spec.product if memory is None else memory
    _check_count(count)
    if not isinstance(memory, str | int | None):
        raise UsageError(
            f"{memory!r} is not a valid memory size", hint="use a size such as 16GiB or 96GB, or a number of bytes"
        )
    sheet, capacity = _read_product(find_sheet(name), memory)
    if not sheet.can_be_virtual:
        raise UsageError(
            f"{name} is not available as a virtual device", hint=f"use one of {', '.join(_list_virtual_names())}"
        )
    # torch cannot unregister a device type, so there is one accelerator per process and it is reused.
    if not _STARTED:
        _STARTED.append(_install(VirtualAccelerator(sheet, count, capacity, strict)))
    else:
        _restart(_STARTED[0], sheet, count, capacity, strict)
    allow_auto(sheet.name, True)
    return _STARTED[0]


def start_spec(spec: DeviceSpec) -> DeviceSpec:
    """Start the virtual devices that a spec describes, unless they are already running.

    Returns the spec of the device to open. Raises VirtualDeviceError if the devices are running with
    other options than those in the spec.
    """
    if not find_device(spec.name).virtual:
        start(spec.name, count=spec.require_count(), memory=spec.product or spec.memory, strict=spec.strict)
        # `virtual:NAME` names a device for one placement. A later `auto` means the hardware.
        allow_auto(spec.name, False)
    else:
        _check_options(spec, _STARTED[0])
    return DeviceSpec(name=spec.name, index=spec.index, given_by=spec.given_by)


def _check_options(spec: DeviceSpec, running: VirtualAccelerator) -> None:
    """Raise VirtualDeviceError if an option in a spec differs from the options of the running devices."""
    memory = spec.product or spec.memory
    sheet, capacity = _read_product(find_sheet(spec.name), memory)
    differences = [f"count={spec.count}"] if spec.count not in (None, running.count) else []
    differences += ["strict"] if spec.strict and not running.strict else []
    if memory is not None and (capacity != running.capacity_bytes or (spec.product and sheet != running.sheet)):
        differences.append(memory if spec.product else f"memory={memory}")
    if differences:
        raise VirtualDeviceError(
            f"{spec} cannot be started with {', '.join(differences)}{spec.given_by}: this process already has virtual "
            f"{spec.name} devices with other options (count={running.count})",
            hint=f"use {DeviceSpec(name=spec.name, index=spec.index, virtual=True)}, or start a separate process",
        )


def _install(accelerator: VirtualAccelerator) -> VirtualAccelerator:
    load_dynamo()  # before the patches: at import, Dynamo compares torch.Tensor.__new__ with its own copy
    module = make_device_module(accelerator)
    # An operation with a limit must reach dispatch as called, or its limit would never be checked.
    undecomposed = [name for name in accelerator.limits.operations if "." not in name]
    register_device(accelerator.name, module, undecomposed)
    activate(accelerator, dispatch)
    install_vendor_packages(accelerator, module)
    install_generator(accelerator)
    install_gradients(accelerator)
    # After `register_device`: some of these patches read the functions of the registered module.
    install_device_patches(accelerator)
    install_ordinal_devices(accelerator)
    install_compiler(accelerator)
    install_collectives(accelerator)
    register_virtual(accelerator.sheet, accelerator.count)
    return accelerator


def _restart(running: VirtualAccelerator, sheet: Sheet, count: int, capacity: int | None, strict: bool) -> None:
    """Restart the process's only virtual accelerator with new options and an empty ledger.

    Raises VirtualDeviceError if it is still active, has a different device type, or has fewer than
    `count` devices.
    """
    if running.name != sheet.torch_name:
        raise VirtualDeviceError(
            f"this process already has a virtual {running.name} device, and torch cannot unregister a device type",
            hint=f"use the virtual {sheet.torch_name} device in a separate process",
        )
    if running.enforcing:
        raise VirtualDeviceError(
            f"a virtual {running.name} device is already active",
            hint="exit its `with` block before you start another virtual device",
        )
    if count > running.count:
        raise VirtualDeviceError(
            f"count cannot be increased to {count}: this process started with count={running.count}",
            hint=f"use count={count} when the process first starts the virtual device",
        )
    # The sheet may be narrowed to another product, so the registered device changes with it.
    running.restart(sheet, capacity, strict)
    register_virtual(sheet, running.count)


def _read_product(sheet: Sheet, memory: str | int | None) -> tuple[Sheet, int | None]:
    """Return the sheet and the memory capacity in bytes; `memory` is a size, a product name or None.

    If `memory` is a product name, the sheet contains only the limits for that product.
    """
    versions = this_machine().versions
    if memory is None:
        return sheet.on(versions=versions), None
    if isinstance(memory, int):
        return sheet.on(versions=versions), parse_size(str(memory))
    if memory.lower() in {product.name for product in sheet.products}:
        product = sheet.product(memory)
        return sheet.on(product=product.name, versions=versions), product.memory_bytes
    return sheet.on(versions=versions), parse_size(memory)


def _check_count(count: int) -> None:
    if not isinstance(count, int) or count < 1:
        raise UsageError(f"count={count!r} is not a positive integer", hint="use count=1 or higher")


def _list_virtual_names() -> list[str]:
    return [backend.name for backend in load_registry().backends.values() if backend.sheet.can_be_virtual]
