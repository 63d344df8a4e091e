"""The device that is asked about: one that is here, a product by name, or a device with so much memory."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.backends.device import find_device, is_available, open_device
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.registry import load_registry
from anyaccel.backends.sheet import Product, Sheet
from anyaccel.backends.size import parse_size
from anyaccel.errors import NotMeasurableError, UnknownDeviceError, UsageError, nearest

__all__ = ["Target", "find_target"]


@dataclass(frozen=True, kw_only=True)
class Target:
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


def find_target(device: str) -> Target:
    """Read `auto`, `hpu`, `gaudi2`, `cuda:24GiB`, `mps:16GiB` or `cuda:0`."""
    text = str(device).strip()
    product = _find_product(text)
    if product is not None:
        return _of_product(*product)
    name, colon, rest = text.partition(":")
    is_number = _is_number(rest)
    if colon and not is_number:
        return _of_size(name, rest)
    if text == "auto" or (name in load_registry().names() and "." not in rest and is_available(text)):
        return _of_this_machine(text)
    _refuse_what_is_no_device(name, rest)
    if name not in load_registry().names():
        known = [*load_registry().names(), *(product.name for _, product in _products())]
        raise UnknownDeviceError(f"there is no device and no product {text!r}", hint=nearest(text, known))
    if is_number:
        hint = f"did you mean {name}:{rest if float(rest) else 16}GiB? {name} alone is answered too"
        raise UnknownDeviceError(f"there is no {name}:{rest} on this machine", hint=hint)
    return _of_name(name)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and text.isascii()


def _refuse_what_is_no_device(name: str, rest: str) -> None:
    """A product with something after it, and a virtual device."""
    if name.lower() == "virtual":
        words = "nothing is run, and so no virtual device is needed"
        raise UsageError(words, hint=f"ask about the device itself: --device {rest.partition(':')[0]}")
    product = _find_product(name)
    if product is not None and rest:
        sheet, known = product
        size = f"{rest}GiB" if _is_number(rest) else rest
        raise UsageError(
            f"{known.name} is a product, with a memory of its own",
            hint=f"write {known.name} alone, or {sheet.name}:{size} for a device with so much memory",
        )


def _products() -> list[tuple[Sheet, Product]]:
    sheets = [find_sheet(name) for name in load_registry().names()]
    return [(sheet, product) for sheet in sheets for product in sheet.products]


def _find_product(name: str) -> tuple[Sheet, Product] | None:
    return next(((sheet, one) for sheet, one in _products() if one.name == name.lower()), None)


def _of_product(sheet: Sheet, product: Product, *notes: str) -> Target:
    if product.memory_bytes is None:
        return _of_size(sheet.name, "16GiB", f"{product.title}: the memory varies, and 16 GiB are taken")
    told = list(notes)
    if not product.native:
        told.append(f"{product.title} cannot be used as a torch device: {product.software}")
    return Target(
        name=product.name,
        sheet=sheet.on(product=product.name),
        capacity_bytes=sheet.usable_bytes(product.memory_bytes),
        product=product.name,
        notes=tuple(told),
    )


def _of_size(name: str, size: str, *notes: str) -> Target:
    _refuse_what_is_no_device(name, size)
    if name not in load_registry().names():
        raise UnknownDeviceError(f"there is no device {name!r}", hint=nearest(name, load_registry().names()))
    sheet, total = find_sheet(name), parse_size(size)
    usable = sheet.usable_bytes(total)
    return Target(
        name=f"{name} with {size}",
        sheet=sheet,
        capacity_bytes=usable,
        notes=notes if usable == total else (*notes, f"of {size} tensors can have {usable / 2**30:.1f} GiB"),
    )


def _of_this_machine(device: str) -> Target:
    opened = open_device(device)
    name = f"{opened.sheet.name}:{opened.index}"
    try:
        memory = opened.driver.memory(opened.index)
    except NotMeasurableError as error:
        hint = f"say how much it has: --device {opened.sheet.name}:16GiB"
        raise UsageError(f"{name} does not tell how much memory it has", hint=hint) from error
    return Target(
        name=name,
        sheet=opened.sheet,
        capacity_bytes=memory.free_bytes,
        notes=(f"{memory.free_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB are free on this machine",),
        virtual=find_device(opened.sheet.name).virtual,
    )


def _of_name(name: str) -> Target:
    """A device that is not here: the smallest of its products, so that what fits there fits on all."""
    sheet = find_sheet(name)
    known = [product for product in sheet.products if product.memory_bytes is not None and product.native]
    if not known:
        return _of_size(name, "16GiB", f"no product of {name} was named, and 16 GiB are taken")
    smallest = min(known, key=lambda product: product.memory_bytes or 0)
    names = ", ".join(product.name for product in known)
    note = f"{name} is not on this machine: its smallest product is taken, {smallest.title}; others: {names}"
    return _of_product(sheet, smallest, note)
