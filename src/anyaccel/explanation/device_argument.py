"""Device argument of `explain`: a device on this machine, a product, or a device type and memory size."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.backends.device import find_device, is_available, open_device, read_device
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.device_spec import AUTO, DeviceSpec
from anyaccel.backends.sheet import Product, Sheet
from anyaccel.errors import NotMeasurableError, UnknownDeviceError, UsageError
from anyaccel.units import parse_size

__all__ = ["DeviceTarget", "find_device_target"]

# More products than this are not listed in a note.
_MAX_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class DeviceTarget:
    """Device that a model is planned for; it does not have to be on this machine."""

    name: str
    """Name shown in the plan: `gaudi2`, `mps with 16GiB`, `cuda:0`."""
    sheet: Sheet
    """Sheet of the device, resolved for `product` if it is set."""
    capacity_bytes: int
    """Memory available for tensors."""
    product: str | None = None
    """Product name, for example `gaudi2`; None if it is unknown."""
    notes: tuple[str, ...] = ()
    virtual: bool = False


def find_device_target(device: str) -> DeviceTarget:
    """Return the target for a device string such as `auto`, `hpu`, `gaudi2`, `cuda:24GiB` or `cuda:0`.

    Raises UsageError for virtual devices, and UnknownDeviceError for an index that is not available.
    """
    spec = read_device(device)
    if spec.virtual:
        raise UsageError(
            f"explain does not run the model, so it does not accept the virtual device {device!r}",
            hint=f"use --device {spec.product or spec.name}; the device does not have to be available on this machine",
        )
    # `gaudi2:80` looks like a memory size without a unit, but the product already determines the memory.
    if spec.product is not None and spec.index is not None:
        raise UsageError(
            f"{device!r} is not a valid device: {spec.product} has a fixed memory size",
            hint=f"use {spec.product}, or {spec.name}:{spec.index}GiB for a device with {spec.index} GiB of memory",
        )
    if spec.product is not None:
        sheet = find_sheet(spec)
        return _from_product(sheet, sheet.product(spec.product))
    if spec.memory is not None:
        return _from_size(spec.name, spec.memory)
    if spec.name == AUTO or is_available(spec):
        return _from_this_machine(spec)
    if spec.index is not None:
        # `cuda:80` is far more often a forgotten unit than the 81st device.
        hint = f"did you mean {spec.name}:{spec.index or 16}GiB? if not, use {spec.name} without an index"
        raise UnknownDeviceError(f"{spec} is not available on this machine", hint=hint)
    return _from_name(spec.name)


def _from_product(sheet: Sheet, product: Product, *notes: str) -> DeviceTarget:
    if product.memory_bytes is None:
        return _from_size(sheet.name, "16GiB", f"the memory of {product.title} varies; assuming 16 GiB")
    all_notes = list(notes)
    if not product.native:
        all_notes.append(f"{product.title} cannot be used as a torch device: {product.software}")
    return DeviceTarget(
        name=product.name,
        sheet=sheet.on(product=product.name),
        capacity_bytes=sheet.usable_bytes(product.memory_bytes),
        product=product.name,
        notes=tuple(all_notes),
    )


def _from_size(name: str, size: str, *notes: str) -> DeviceTarget:
    sheet, total = find_sheet(name), parse_size(size)
    # The driver reserves a part, and so does the operating system on unified memory.
    usable = sheet.usable_bytes(total)
    return DeviceTarget(
        name=f"{name} with {size}",
        sheet=sheet,
        capacity_bytes=usable,
        notes=notes if usable == total else (*notes, f"{usable / 2**30:.1f} GiB of {size} is available for tensors"),
    )


def _from_this_machine(spec: DeviceSpec) -> DeviceTarget:
    opened = open_device(spec)
    name = f"{opened.sheet.name}:{opened.index}"
    # Free instead of total memory: other processes may use the device as well.
    try:
        memory = opened.driver.memory(opened.index)
    except NotMeasurableError as error:
        hint = f"pass its memory size, for example --device {opened.sheet.name}:16GiB"
        raise UsageError(f"{name} does not report its memory size", hint=hint) from error
    return DeviceTarget(
        name=name,
        sheet=opened.sheet,
        capacity_bytes=memory.free_bytes,
        notes=(f"{memory.free_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB is free on this machine",),
        virtual=find_device(opened.sheet.name).virtual,
    )


def _from_name(name: str) -> DeviceTarget:
    """Return a target for a device type that is not on this machine: the sheet's product, or the smallest one."""
    sheet = find_sheet(name)
    products = [product for product in sheet.products if product.memory_bytes is not None and product.native]
    if not products:
        return _from_size(name, "16GiB", f"{name} has no product with a known memory size; assuming 16 GiB")
    if sheet.assumed_product:
        product, assumed = sheet.product(sheet.assumed_product), ""
    else:
        # A model that fits on the smallest product fits on all of them.
        product, assumed = min(products, key=lambda product: product.memory_bytes or 0), "its smallest product, "
    names = ", ".join(product.name for product in products)
    listed = f"Products: {names}" if len(products) <= _MAX_LISTED else f"`anyaccel devices {name}` lists its products"
    note = f"{name} is not available on this machine; assuming {assumed}{product.title}. {listed}"
    return _from_product(sheet, product, note)
