"""Install commands: chosen by the hardware of a machine, and complete on every sheet."""

import pytest

from anyaccel.backends.installation import find_install_commands
from anyaccel.backends.machine import Machine
from tests.conftest import ALL_SHEETS


def find(system: str, architecture: str, device_files: dict[str, int]) -> dict[str, str]:
    machine = Machine(system=system, architecture=architecture, device_files=device_files)
    return {sheet.name: command.command for sheet, command in find_install_commands(ALL_SHEETS, machine)}


@pytest.mark.parametrize(
    ("system", "architecture", "device_files", "device", "end"),
    [
        ("Linux", "x86_64", {"/dev/nvidia[0-9]*": 8}, "cuda", "=cu130"),
        ("Linux", "x86_64", {"/dev/kfd": 1}, "rocm", "=rocm7.2"),
        ("Linux", "x86_64", {"/dev/dri/renderD*": 1}, "xpu", "=xpu"),
        ("Linux", "x86_64", {"/dev/accel/accel[0-9]*": 8}, "hpu", "--type pytorch"),
        ("Linux", "x86_64", {"/dev/neuron[0-9]*": 1}, "neuron", " nki"),
        ("Linux", "aarch64", {"/dev/davinci[0-9]*": 8}, "npu", "torch torch-npu"),
        ("Darwin", "arm64", {}, "mps", "torch torchvision"),
        ("Darwin", "x86_64", {}, "cpu", "torch torchvision"),
        ("Linux", "x86_64", {"/dev/nvidia[0-9]*": 0}, "cpu", "=cpu"),
        ("Windows", "AMD64", {}, "cpu", "=cpu"),
    ],
)
def test_command_is_that_of_the_hardware(
    system: str, architecture: str, device_files: dict[str, int], device: str, end: str
) -> None:
    commands = find(system, architecture, device_files)
    assert list(commands) == [device]
    assert commands[device].endswith(end)


def test_a_machine_with_two_kinds_of_gpus_gets_both_commands() -> None:
    assert set(find("Linux", "x86_64", {"/dev/nvidia[0-9]*": 1, "/dev/dri/renderD*": 1})) == {"cuda", "xpu"}


def test_patterns_are_read_from_the_machine() -> None:
    for sheet in ALL_SHEETS:
        for command in sheet.installation:
            assert set(command.device_files) <= set(sheet.device_files)
            assert "\n" not in command.command
