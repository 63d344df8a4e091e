"""`anyaccel devices --install`: the command that installs torch for the hardware of this machine."""

from __future__ import annotations

import json
import sys

from anyaccel.backends.device import find_device, sheet, this_machine
from anyaccel.backends.installation import InstallCommand, find_install_commands
from anyaccel.backends.machine import Machine
from anyaccel.backends.registry import load_registry
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import UsageError

__all__ = ["print_install_commands"]


def print_install_commands(name: str | None, *, as_json: bool) -> None:
    """Print the install commands for the hardware found, or for one device; nothing is executed.

    The commands go to stdout, and what they are for to stderr.
    """
    machine = this_machine()
    sheets = [sheet for backend in load_registry().backends.values() for sheet in backend.sheets]
    commands = find_install_commands(sheets, machine) if name is None else [_find_command(sheet(name), machine)]
    if as_json:
        print(json.dumps([_as_json(*command) for command in commands], indent=2))
        return
    for device_sheet, command in commands:
        device = find_device(device_sheet.name)
        print(f"{device_sheet.title}: {command.says} {command.source}", file=sys.stderr)
        if device.available:
            print(f"already available: {device.reason}", file=sys.stderr)
        print(command.command, flush=True)
    if name is None and all(device_sheet.is_host for device_sheet, _ in commands):
        print("no accelerator was found; for another device, run `anyaccel devices NAME --install`", file=sys.stderr)


def _find_command(device_sheet: Sheet, machine: Machine) -> tuple[Sheet, InstallCommand]:
    for command in device_sheet.installation:
        if command.suits(machine):
            return device_sheet, command
    raise UsageError(
        f"no install command for {device_sheet.name} on {machine.system} {machine.architecture} is known",
        hint=f"see {device_sheet.documentation}",
    )


def _as_json(device_sheet: Sheet, command: InstallCommand) -> dict[str, object]:
    return {
        "device": device_sheet.name,
        "command": command.command,
        "note": command.says,
        "source": command.source,
        "available": find_device(device_sheet.name).available,
    }
