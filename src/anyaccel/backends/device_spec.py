"""The parser for device strings.

Examples: `auto`, `hpu`, `hpu:3`, `mps:16GiB`, `gaudi2`, `RTX 4090` and `virtual:hpu,count=8,strict`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from anyaccel.errors import UsageError
from anyaccel.units import parse_size

if TYPE_CHECKING:
    from anyaccel.backends.registry import Registry

__all__ = ["AUTO", "VIRTUAL_PREFIX", "DeviceSpec", "read_device_name"]

AUTO = "auto"
VIRTUAL_PREFIX = "virtual:"
# Product names may have spaces: `RTX 4090`.
_WORD = re.compile(r"[a-z0-9][a-z0-9_. -]*")
_INDEX = re.compile(r"[0-9]{1,9}")
_COUNT = re.compile(r"[0-9]{1,3}")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")
_OPTIONS = {"count": "count=N", "memory": "memory=SIZE", "strict": "strict"}
_FORMS = "use auto, NAME, NAME:INDEX, NAME:MEMORY or virtual:NAME[,count=N][,memory=SIZE][,strict]"
_EXAMPLES = "cuda, hpu:3, mps:16GiB, virtual:neuron,count=2"


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A parsed device string. Parsing does not check whether the device is available."""

    name: str
    """The name of a sheet, or `auto`."""
    index: int | None = None
    product: str | None = None
    """`gaudi2`, if the string names a product."""
    memory: str | None = None
    """A memory size as written: `16GiB`. It describes a device for `explain` and limits a virtual device."""
    virtual: bool = False
    count: int | None = None
    """The number of virtual devices to start; None means one."""
    strict: bool = False
    """Whether virtual devices raise where the real device raises."""
    given_by: str = field(default="", compare=False)
    """The source for error messages: ` (from ANYACCEL_DEVICE)`; empty for an argument."""

    @classmethod
    def parse(cls, device: object, registry: Registry, given_by: str = "") -> DeviceSpec:
        """Parse a device string or a `torch.device`, using the names, products and aliases in the registry."""
        if isinstance(device, DeviceSpec):
            return device
        text = str(device).strip()
        if text.lower() == AUTO:
            return cls(name=AUTO, given_by=given_by)
        virtual = text.lower().startswith(VIRTUAL_PREFIX)
        # The part before the first comma is name[:suffix]; virtual devices have options after it.
        head, *options = (text[len(VIRTUAL_PREFIX) :] if virtual else text).split(",")
        word, colon, suffix = head.partition(":")
        if _WORD.fullmatch(word.lower()) is None:
            raise _invalid(text, given_by, "the name is missing" if not word else f"{word!r} is not a valid name")
        # Names, aliases and products share one namespace, which tests keep free of duplicates.
        name, product = registry.find_name(word.lower(), given_by)
        spec = cls(name=name, product=product, virtual=virtual, given_by=given_by)
        if colon:
            spec = _read_suffix(spec, suffix, text)
        return _read_options(spec, options, text, registry) if options else spec

    def __str__(self) -> str:
        head = (VIRTUAL_PREFIX if self.virtual else "") + (self.product or self.name)
        if self.index is not None:
            head += f":{self.index}"
        if self.memory is not None and not self.virtual:
            head += f":{self.memory}"
        options = [f"count={self.count}"] if self.count is not None else []
        options += [f"memory={self.memory}"] if self.memory is not None and self.virtual else []
        options += ["strict"] if self.strict else []
        return ",".join([head, *options])

    def with_index(self, index: int) -> DeviceSpec:
        """Return a copy of the spec with the given device index."""
        if index < 0:
            raise UsageError(f"{index} is not a valid device index", hint="use an index of 0 or higher")
        return replace(self, index=index)

    def require_name(self) -> str:
        """Return the device name; raise if the spec also has an index, product, memory size or option."""
        if self != DeviceSpec(name=self.name, virtual=self.virtual):
            raise UsageError(
                f"expected a device name without an index, product, memory size or options, got {self}{self.given_by}",
                hint=f"use {DeviceSpec(name=self.name, virtual=self.virtual)}",
            )
        return self.name

    def require_count(self) -> int:
        """Return the number of virtual devices to start; raise if the index is out of range."""
        count = self.count or 1
        if self.index is not None and self.index >= count:
            raise UsageError(
                f"device index {self.index} in {self} is out of range{self.given_by}: the device count is {count}",
                hint=self.count_hint(),
            )
        return count

    def count_hint(self) -> str:
        """Return a hint that explains how to request several virtual devices.

        In version 0.1, the number after the colon was the device count; now it is the device index.
        """
        count = self.index or 2
        return (
            f"use {VIRTUAL_PREFIX}{self.name},count={count} to create {count} devices, "
            f"then select the last one with {self.name}:{count - 1}"
        )


def read_device_name(text: str) -> str:
    """Return the device name from a string such as `hpu:3`.

    The name is not validated, because the plugin that provides the device may not be installed.
    """
    return text.partition(":")[0]


def _read_suffix(spec: DeviceSpec, suffix: str, text: str) -> DeviceSpec:
    """Return a copy of the spec with the device index or memory size that follows the colon."""
    if _INDEX.fullmatch(suffix):
        return replace(spec, index=int(suffix))
    word = spec.product or spec.name
    if _NUMBER.fullmatch(suffix):  # mps:1.5, or an index that is too long
        raise _invalid(
            text, spec.given_by, f"{suffix!r} is not a valid device index", f"did you mean {spec.name}:{suffix}GiB?"
        )
    # Only validated here. The spec stores the text, so it prints like the input.
    try:
        parse_size(suffix)
    except UsageError:
        reason = f"{suffix!r} is neither a device index nor a memory size"
        raise _invalid(text, spec.given_by, reason) from None
    if spec.product is not None:
        raise UsageError(
            f"the memory size of {word} is fixed and cannot be set to {suffix}{spec.given_by}",
            hint=f"use {word}, or {spec.name}:{suffix} for a device with that much memory",
        )
    if spec.virtual:
        hint = f"use {VIRTUAL_PREFIX}{word},memory={suffix}"
        raise _invalid(text, spec.given_by, "the memory size of a virtual device must be passed as an option", hint)
    return replace(spec, memory=suffix)


def _read_options(spec: DeviceSpec, options: list[str], text: str, registry: Registry) -> DeviceSpec:
    """Return a copy of the spec with virtual device options, such as `count=2` or `strict`."""
    if not spec.virtual:
        raise _invalid(text, spec.given_by, "only virtual devices accept options", f"use {VIRTUAL_PREFIX}{text}")
    seen: set[str] = set()
    for option in options:
        key, equals, value = option.strip().partition("=")
        key = key.lower()
        if key not in _OPTIONS or bool(equals) != ("=" in _OPTIONS[key]):
            hint = f"supported options: {', '.join(_OPTIONS.values())}"
            raise _invalid(text, spec.given_by, f"unknown option {option!r}", hint)
        if key in seen:
            raise _invalid(text, spec.given_by, f"duplicate option {key}", f"set {key} only once")
        seen.add(key)
        if key == "count":
            spec = replace(spec, count=_read_count(value, spec))
        elif key == "memory":
            spec = _read_memory(spec, value, text, registry)
        else:
            spec = replace(spec, strict=True)
    # After all options: the count may follow other options, and the index precedes them.
    if spec.count is not None:
        spec.require_count()
    return spec


def _read_count(value: str, spec: DeviceSpec) -> int:
    if _COUNT.fullmatch(value) is None or int(value) < 1:
        raise UsageError(
            f"the number of virtual devices must be between 1 and 999, not {value}{spec.given_by}",
            hint=f"for example {VIRTUAL_PREFIX}{spec.name},count=2",
        )
    return int(value)


def _read_memory(spec: DeviceSpec, value: str, text: str, registry: Registry) -> DeviceSpec:
    """Return a copy of the spec with the value of the `memory` option.

    The value is a memory size, or a product, which determines both the memory size and the limits.
    """
    if spec.product is not None:
        hint = f"use {VIRTUAL_PREFIX}{spec.product}, or {VIRTUAL_PREFIX}{spec.name},memory={value}"
        raise _invalid(text, spec.given_by, f"the memory size of {spec.product} is fixed", hint)
    # memory=gaudi2 also applies the limits of that product, unlike memory=96GB.
    if value.lower() in registry.list_products(spec.name):
        return replace(spec, product=value.lower())
    parse_size(value)
    return replace(spec, memory=value)


def _invalid(text: str, given_by: str, reason: str, hint: str = "") -> UsageError:
    return UsageError(
        f"{text!r} is not a valid device{given_by}: {reason}",
        hint=hint or f"{_FORMS}; for example {_EXAMPLES}",
    )
