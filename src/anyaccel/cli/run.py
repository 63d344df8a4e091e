"""`anyaccel run SCRIPT.py`: runs an unmodified CUDA script on another device."""

from __future__ import annotations

from typing import Annotated

import typer

from anyaccel.errors import UsageError

__all__ = ["CONTEXT", "run_program"]

# Options after SCRIPT belong to the script.
CONTEXT = {"allow_interspersed_args": False}
_OPTION = "--device"


def run_program(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script written for CUDA.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments for the script.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(_OPTION, help="Device that replaces 'cuda': auto, mps, hpu:3, virtual:neuron. Default: auto."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List the mapped CUDA calls with their line numbers.")
    ] = False,
) -> None:
    """Run an unmodified CUDA script on any device.

    --device may also follow the script's arguments. If the script has its own --device option, put
    anyaccel's --device before the script, or put the script's --device after --.
    """
    script_arguments = list(arguments or [])
    if device is None:
        device, script_arguments = split_device(script_arguments)
    from anyaccel.cuda_scripts.run_script import run_script

    raise SystemExit(run_script(script, script_arguments, device or "auto", verbose))


def split_device(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of `--device`, or None, and the remaining script arguments.

    Arguments after `--` belong to the script and are not searched.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    searched, after_separator = arguments[:end], arguments[end + 1 :]
    device, others = None, []
    # An iterator, because the option consumes the argument after it.
    remaining = iter(searched)
    for argument in remaining:
        if argument == _OPTION:
            device = next(remaining, "")
        elif argument.startswith(f"{_OPTION}="):
            device = argument.partition("=")[2]
        else:
            others.append(argument)
    if device == "":
        raise UsageError(
            f"{_OPTION} requires a device name", hint=f"for example: anyaccel run SCRIPT.py {_OPTION} virtual:neuron"
        )
    return device, others + after_separator
