"""Availability checks for devices, with the reason why a device is not available.

The checks use a `Machine` description instead of the real system, so tests can cover any machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from anyaccel.backends.machine import Machine
from anyaccel.backends.registry import BUILT_IN, BrokenPlugin
from anyaccel.backends.requirement import Requirement, SystemIs
from anyaccel.backends.sheet import Sheet

__all__ = ["Device", "check_availability", "find_unmet", "make_broken_device", "make_virtual_device"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """The availability of one device type on this machine."""

    name: str
    title: str
    available: bool
    reason: str
    """Why it is or is not available."""
    hint: str
    """How to make it available; empty if nothing is wrong."""
    names: tuple[str, ...] = ()
    """The name that each device reports: `("NVIDIA H200",)`."""
    origin: str = BUILT_IN
    """`anyaccel`, or the distribution of the plugin."""
    sheet: Sheet | None = None
    """None for a plugin that could not be loaded."""
    virtual: bool = False
    """Whether it is a virtual device: the CPU, enforcing documented limits."""

    @property
    def count(self) -> int:
        """The number of devices of this type that are available."""
        return len(self.names)


def find_unmet(sheet: Sheet, machine: Machine) -> list[Requirement]:
    """Return a sheet's requirements that a machine does not meet.

    If the operating system is not supported, return only the first unmet requirement.
    """
    unmet = [requirement for requirement in sheet.requirements if requirement.unmet(machine) is not None]
    # On the wrong operating system, hints to install packages would mislead.
    wrong_system = any(isinstance(requirement, SystemIs) for requirement in unmet)
    return unmet[:1] if wrong_system else unmet


def check_availability(
    sheet: Sheet, machine: Machine, reported: tuple[str, ...] | str, origin: str = BUILT_IN, name: str = ""
) -> Device:
    """Return a device's availability on a machine, with the reason and a hint.

    `reported` is a tuple of device names from the vendor's software, or its error message.
    """
    problem = _find_problem(sheet, machine, reported)
    names = () if problem or isinstance(reported, str) else reported
    if problem:
        reason, hint = problem
    else:
        counts = Counter(names)
        reason = "found: " + ", ".join(f"{count} × {name}" for name, count in counts.items())
        advice = [requirement.advice(machine) for requirement in sheet.requirements]
        hint = "; ".join(text for text in advice if text is not None)
    return Device(
        name=name or sheet.name,
        title=sheet.title,
        available=not problem,
        reason=reason,
        hint=hint,
        names=names,
        origin=origin,
        sheet=sheet,
    )


def make_virtual_device(sheet: Sheet, count: int) -> Device:
    """Return the `Device` entry for a virtual device, which is always available.

    The title, the reason and the device names contain the word `virtual`.
    """
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


def make_broken_device(plugin: BrokenPlugin) -> Device:
    """Return a `Device` that is marked as not available because its plugin failed to load."""
    return Device(
        name=plugin.name,
        title=f"plugin from {plugin.origin}",
        available=False,
        reason=f"the plugin failed to load: {plugin.error}",
        hint=f"run `pip install --upgrade {plugin.origin}` or `pip uninstall {plugin.origin}`",
        origin=plugin.origin,
    )


def _find_problem(sheet: Sheet, machine: Machine, reported: tuple[str, ...] | str) -> tuple[str, str] | None:
    """Return the reason why a device is not available and a hint, or None if it is available."""
    unmet = find_unmet(sheet, machine)
    if unmet:
        reasons = "; ".join(str(requirement.unmet(machine)) for requirement in unmet)
        hints = "; ".join(requirement.hint for requirement in unmet)
        return f"{reasons}{_format_hardware(sheet, machine)}", hints
    # A vendor package that is installed but broken, for example for another torch version.
    if isinstance(reported, str):
        return (
            f"the required software is installed but raises an error: {reported}",
            f"reinstall it for the installed torch version; see {sheet.documentation}",
        )
    # The requirements are met, so the usual cause is a visibility variable or a driver problem.
    if not reported:
        hidden = f"check that {sheet.visible_devices} does not hide the device; " if sheet.visible_devices else ""
        reason = f"the required software is installed but finds no device{_format_hardware(sheet, machine)}"
        return reason, f"{hidden}check that the driver is installed; see {sheet.documentation}"
    return None


def _format_hardware(sheet: Sheet, machine: Machine) -> str:
    """Return a note that says whether Linux device files for the hardware exist.

    The note is empty on other operating systems and for hardware without device files.
    """
    # Device files exist without the vendor's user-space software, so they tell missing hardware from missing packages.
    if machine.system != "Linux" or not sheet.device_files:
        return ""
    present = [pattern for pattern in sheet.device_files if machine.device_files.get(pattern)]
    if present:
        return f"; the hardware is present ({', '.join(present)})"
    return f"; no hardware was detected ({', '.join(sheet.device_files)})"
