"""`anyaccel run SCRIPT.py`: a script that was written for CUDA, on the device that is here."""

from __future__ import annotations

from typing import Annotated

import typer

from anyaccel.errors import UsageError

__all__ = ["CONTEXT", "run_program"]

CONTEXT = {"allow_interspersed_args": False}
"""What stands behind the script is the script's."""
_OPTION = "--device"


def run_program(
    script: Annotated[str, typer.Argument(help="A Python script that was written for CUDA.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    device: Annotated[
        str | None, typer.Option(_OPTION, help="What 'cuda' means: auto, a name, hpu:3, virtual:neuron.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say line by line what was mapped.")] = False,
) -> None:
    """Run a script that was written for CUDA, unedited, on the device that is here.

    --device may also stand behind the script's own arguments. If the script has an option of that name, give ours
    before the script, or the script's behind --.
    """
    given = list(arguments or [])
    if device is None:
        device, given = split_device(given)
    from anyaccel.cuda_scripts.run_script import run_script

    raise SystemExit(run_script(script, given, device or "auto", verbose))


def split_device(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Our `--device` among a script's arguments, up to a `--`, and the arguments without it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours, rest = arguments[:end], arguments[end + 1 :]
    device, kept = None, []
    words = iter(ours)
    for word in words:
        if word == _OPTION:
            device = next(words, "")
        elif word.startswith(f"{_OPTION}="):
            device = word.partition("=")[2]
        else:
            kept.append(word)
    if device == "":
        raise UsageError(f"{_OPTION} names no device", hint=f"anyaccel run SCRIPT.py {_OPTION} virtual:neuron")
    return device, kept + rest
