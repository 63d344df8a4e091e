"""Is a device there, and if not why: decided from data alone, so that it is tested for machines nobody here has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from anyaccel.backends.machine import Machine
from anyaccel.backends.registry import BUILT_IN, BrokenPlugin
from anyaccel.backends.requirement import Requirement, SystemIs
from anyaccel.backends.sheet import Sheet

__all__ = ["Device", "describe_broken", "describe_virtual", "examine", "find_unmet"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator on this machine: there, or not and why."""

    name: str
    title: str
    available: bool
    reason: str
    """Why it is or is not available."""
    hint: str
    """What would help; empty where nothing is amiss."""
    names: tuple[str, ...] = ()
    """What each device calls itself: `("NVIDIA H200",)`."""
    origin: str = BUILT_IN
    """`anyaccel`, or the distribution of the plugin."""
    sheet: Sheet | None = None
    """None for a plugin that could not be loaded."""
    virtual: bool = False
    """Whether it is a virtual one: the CPU, enforcing the documented limits."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.names)


def find_unmet(sheet: Sheet, machine: Machine) -> list[Requirement]:
    """The requirements that a machine does not meet; on the wrong system nothing else is worth saying."""
    unmet = [requirement for requirement in sheet.requirements if requirement.unmet(machine) is not None]
    wrong_system = any(isinstance(requirement, SystemIs) for requirement in unmet)
    return unmet[:1] if wrong_system else unmet


def examine(
    sheet: Sheet, machine: Machine, seen: tuple[str, ...] | str, origin: str = BUILT_IN, name: str = ""
) -> Device:
    """Decide whether a device is there, from the machine and from what its software sees: names, or an error."""
    absence = _explain_absence(sheet, machine, seen)
    names = () if absence or isinstance(seen, str) else seen
    if absence:
        reason, hint = absence
    else:
        counted = Counter(names)
        reason = "found: " + ", ".join(f"{count} × {name}" for name, count in counted.items())
        hint = "; ".join(text for need in sheet.requirements if (text := need.advice(machine)) is not None)
    return Device(
        name=name or sheet.name,
        title=sheet.title,
        available=not absence,
        reason=reason,
        hint=hint,
        names=names,
        origin=origin,
        sheet=sheet,
    )


def describe_virtual(sheet: Sheet, count: int) -> Device:
    """A virtual device, which is never mistaken for a real one."""
    return Device(
        name=sheet.name,
        title=f"{sheet.title}, virtual",
        available=True,
        reason=f"virtual: {count} on the CPU, enforcing the documented limits",
        hint="",
        names=(f"virtual {sheet.title}",) * count,
        sheet=sheet,
        virtual=True,
    )


def describe_broken(plugin: BrokenPlugin) -> Device:
    """A plugin that could not be loaded, shown as a device that is not there."""
    return Device(
        name=plugin.name,
        title=f"plugin of {plugin.origin}",
        available=False,
        reason=f"the plugin could not be loaded: {plugin.error}",
        hint=f"update or uninstall {plugin.origin}",
        origin=plugin.origin,
    )


def _explain_absence(sheet: Sheet, machine: Machine, seen: tuple[str, ...] | str) -> tuple[str, str] | None:
    """Reason and hint; None where the device is there."""
    unmet = find_unmet(sheet, machine)
    if unmet:
        reasons = "; ".join(str(requirement.unmet(machine)) for requirement in unmet)
        hints = "; ".join(requirement.hint for requirement in unmet)
        return f"{reasons}{_describe_hardware(sheet, machine)}", hints
    if isinstance(seen, str):
        return f"its software is installed and fails: {seen}", f"see {sheet.documentation}"
    if not seen:
        hidden = f"check that {sheet.visible_devices} does not hide it; " if sheet.visible_devices else ""
        reason = f"its software is installed and finds no device{_describe_hardware(sheet, machine)}"
        return reason, f"{hidden}see {sheet.documentation}"
    return None


def _describe_hardware(sheet: Sheet, machine: Machine) -> str:
    """Tell a machine without the card from one whose software is missing, where Linux shows it."""
    if machine.system != "Linux" or not sheet.device_files:
        return ""
    seen = [pattern for pattern in sheet.device_files if machine.device_files.get(pattern)]
    if seen:
        return f"; the hardware is there ({', '.join(seen)})"
    return f"; no hardware is seen either ({', '.join(sheet.device_files)})"
