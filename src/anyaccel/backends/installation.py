"""Commands that install the torch build of a device; they are printed and never executed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyaccel.backends.claim import Claim

if TYPE_CHECKING:
    from anyaccel.backends.machine import Machine
    from anyaccel.backends.sheet import Sheet

__all__ = ["InstallCommand", "find_install_commands"]


@dataclass(frozen=True, kw_only=True)
class InstallCommand(Claim):
    """The shell command that installs the vendor's build of torch."""

    command: str
    systems: tuple[str, ...]
    """Values of `platform.system()`: `("Linux", "Windows")`."""
    architectures: tuple[str, ...] = ()
    """Values of `platform.machine()`; empty for any."""
    device_files: tuple[str, ...] = ()
    """Patterns of device files that prove that the hardware is present, if the sheet's are not specific enough."""

    def suits(self, machine: Machine) -> bool:
        """Return whether the command is for the operating system and the architecture of a machine."""
        return machine.system in self.systems and machine.architecture in (self.architectures or machine.architecture)

    def finds_hardware(self, sheet: Sheet, machine: Machine) -> bool:
        """Return whether the machine has the hardware that the command is for."""
        patterns = self.device_files or sheet.device_files
        # Apple silicon has no device file: the system and the architecture are enough.
        return any(machine.device_files.get(pattern) for pattern in patterns) if patterns else bool(self.architectures)


def find_install_commands(sheets: Iterable[Sheet], machine: Machine) -> list[tuple[Sheet, InstallCommand]]:
    """Return the command for each device whose hardware is present, or else that for the CPU."""
    suitable = [(sheet, command) for sheet in sheets for command in sheet.installation if command.suits(machine)]
    present = [(sheet, command) for sheet, command in suitable if command.finds_hardware(sheet, machine)]
    return present or [(sheet, command) for sheet, command in suitable if sheet.is_host]
