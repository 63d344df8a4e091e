"""Option `--verbose` of the commands: without it, they hide the warnings of libraries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from anyaccel.library_logging import quiet_command

__all__ = ["with_verbose_option"]

_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also print the warnings of libraries.")]


def with_verbose_option(command: Callable[..., None]) -> Callable[..., None]:
    """Return the function of a command with the additional option `--verbose`."""
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(*args: Any, verbose: bool, **kwargs: Any) -> None:
        with nullcontext() if verbose else quiet_command():
            command(*args, **kwargs)

    verbose = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Verbose)
    parameters = [*signature.parameters.values(), verbose]
    # typer reads both: the signature for the defaults, and the annotations for the types.
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
