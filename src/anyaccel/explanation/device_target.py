"""The device that is asked about: one that is here, a product by name, or a device with so much memory."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.backends.device import find_device, is_available, open_device, read_device
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.device_spec import AUTO, DeviceSpec
from anyaccel.backends.sheet import Product, Sheet
from anyaccel.errors import NotMeasurableError, UnknownDeviceError, UsageError
from anyaccel.units import parse_size

__all__ = ["DeviceTarget", "find_device_target"]


@dataclass(frozen=True, kw_only=True)
class DeviceTarget:
    """A device to explain a model on."""

    name: str
    """As the plan names it: `gaudi2`, `mps with 16 GiB`, `cuda:0`."""
    sheet: Sheet
    """Settled for the product, where one is known."""
    capacity_bytes: int
    """What tensors can have."""
    product: str | None = None
    """`gaudi2`; None where none is known."""
    notes: tuple[str, ...] = ()
    virtual: bool = False


def find_device_target(device: str) -> DeviceTarget:
    """Read `auto`, `hpu`, `gaudi2`, `cuda:24GiB`, `mps:16GiB` or `cuda:0`."""
    spec = read_device(device)
    if spec.virtual:
        words = "nothing is run, and so no virtual device is needed"
        raise UsageError(words, hint=f"ask about the device itself: --device {spec.product or spec.name}")
    if spec.product is not None and spec.index is not None:
        raise UsageError(
            f"{spec.product} is a product, with a memory of its own",
            hint=f"write {spec.product}, or {spec.name}:{spec.index}GiB for a device with that much memory",
        )
    if spec.product is not None:
        sheet = find_sheet(spec)
        return _of_product(sheet, sheet.product(spec.product))
    if spec.memory is not None:
        return _of_size(spec.name, spec.memory)
    if spec.name == AUTO or is_available(spec):
        return _of_this_machine(spec)
    if spec.index is not None:
        hint = f"did you mean {spec.name}:{spec.index or 16}GiB? {spec.name} alone is answered too"
        raise UnknownDeviceError(f"there is no {spec} on this machine", hint=hint)
    return _of_name(spec.name)


def _of_product(sheet: Sheet, product: Product, *notes: str) -> DeviceTarget:
    if product.memory_bytes is None:
        return _of_size(sheet.name, "16GiB", f"{product.title}: the memory varies, and 16 GiB are taken")
    told = list(notes)
    if not product.native:
        told.append(f"{product.title} cannot be used as a torch device: {product.software}")
    return DeviceTarget(
        name=product.name,
        sheet=sheet.on(product=product.name),
        capacity_bytes=sheet.usable_bytes(product.memory_bytes),
        product=product.name,
        notes=tuple(told),
    )


def _of_size(name: str, size: str, *notes: str) -> DeviceTarget:
    sheet, total = find_sheet(name), parse_size(size)
    usable = sheet.usable_bytes(total)
    return DeviceTarget(
        name=f"{name} with {size}",
        sheet=sheet,
        capacity_bytes=usable,
        notes=notes if usable == total else (*notes, f"of {size} tensors can have {usable / 2**30:.1f} GiB"),
    )


def _of_this_machine(spec: DeviceSpec) -> DeviceTarget:
    opened = open_device(spec)
    name = f"{opened.sheet.name}:{opened.index}"
    try:
        memory = opened.driver.memory(opened.index)
    except NotMeasurableError as error:
        hint = f"say how much it has: --device {opened.sheet.name}:16GiB"
        raise UsageError(f"{name} does not tell how much memory it has", hint=hint) from error
    return DeviceTarget(
        name=name,
        sheet=opened.sheet,
        capacity_bytes=memory.free_bytes,
        notes=(f"{memory.free_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB are free on this machine",),
        virtual=find_device(opened.sheet.name).virtual,
    )


def _of_name(name: str) -> DeviceTarget:
    """A device that is not here: the smallest of its products, so that what fits there fits on all."""
    sheet = find_sheet(name)
    known = [product for product in sheet.products if product.memory_bytes is not None and product.native]
    if not known:
        return _of_size(name, "16GiB", f"no product of {name} was named, and 16 GiB are taken")
    smallest = min(known, key=lambda product: product.memory_bytes or 0)
    names = ", ".join(product.name for product in known)
    note = f"{name} is not on this machine: its smallest product is taken, {smallest.title}; others: {names}"
    return _of_product(sheet, smallest, note)
