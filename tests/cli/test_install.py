"""`anyaccel devices --install`: prints the command for the hardware, or for a named device."""

import json

import pytest

from anyaccel.backends.device import this_machine
from tests.conftest import RunCli

LINUX = pytest.mark.skipif(this_machine().system != "Linux", reason="the commands for Linux")


@LINUX
def test_named_device_gets_its_command_on_stdout(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("devices", "rtx4090", "--install")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "uv pip install torch torchvision --torch-backend=cu130\n"
    assert "NVIDIA CUDA" in done.stderr
    assert "https://docs.astral.sh/uv/guides/integration/pytorch/" in done.stderr


def test_hardware_found_gets_a_command(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("devices", "--install", "--json")
    commands = json.loads(done.stdout)
    assert commands
    assert all(row["command"] and row["source"].startswith("https://") for row in commands)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("devices", "mlu", "--install"), "no install command for mlu"),
        (("devices", "--install", "--report"), "--install cannot be combined"),
        (("devices", "rtx9999", "--install"), "unknown device 'rtx9999'"),
    ],
)
def test_missing_commands_are_errors(run_cli_forked: RunCli, arguments: tuple[str, ...], message: str) -> None:
    done = run_cli_forked(*arguments)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert done.stdout == ""
