"""The command `anyaccel`: its commands, and how errors end it.

Results go to stdout; progress, logs and errors to stderr. Exit status: 0 fine, 1 the answer is no, 2 the call was
wrong, 3 something broke, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from anyaccel.cli.batch import make_batch
from anyaccel.cli.bench import bench_models
from anyaccel.cli.cache import cache_app
from anyaccel.cli.chart import show_chart
from anyaccel.cli.check import check_pipeline
from anyaccel.cli.devices import show_devices
from anyaccel.cli.explain import explain_model
from anyaccel.cli.generate.command import generate_pictures
from anyaccel.cli.run import CONTEXT, run_program
from anyaccel.cli.serve import serve_models
from anyaccel.cli.warm import warm_model
from anyaccel.errors import AnyaccelError
from anyaccel.library_logging import quiet_libraries

__all__ = ["app", "main"]

app = typer.Typer(
    name="anyaccel",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("batch")(make_batch)
app.command("bench")(bench_models)
app.add_typer(cache_app, name="cache")
app.command("chart")(show_chart)
app.command("check")(check_pipeline)
app.command("devices")(show_devices)
app.command("explain")(explain_model)
app.command("generate")(generate_pictures)
app.command("run", context_settings=CONTEXT)(run_program)
app.command("serve")(serve_models)
app.command("warm")(warm_model)


def _show_version(wanted: bool) -> None:
    if wanted:
        import anyaccel

        typer.echo(f"anyaccel {anyaccel.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Any diffusion pipeline, any accelerator, the same picture."""
    if context.invoked_subcommand != "run":  # whose script is the user's, and so are its warnings
        context.with_resource(quiet_libraries())


def main() -> NoReturn:
    """Run the command line and turn every error into a message and an exit status."""
    _prepare_output()
    try:
        app()
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except SystemExit as end:
        if _was_interrupted(end):
            print("interrupted", file=sys.stderr)
        raise
    except AnyaccelError as error:
        _end(f"error: {error}", error.exit_status)
    except OSError as error:
        if os.environ.get("ANYACCEL_TRACEBACK"):
            raise
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        _end(f"error: the system refuses: {what}\nhint: is there space left, and may it be used?", 3)
    except Exception as error:
        if os.environ.get("ANYACCEL_TRACEBACK"):
            raise
        _end(
            f"error: {type(error).__name__}: {error}\n"
            "hint: this is a fault of anyaccel's; ANYACCEL_TRACEBACK=1 shows where, and "
            "`anyaccel devices --report` prints what an issue needs",
            3,
        )
    sys.exit(0)


def _was_interrupted(end: SystemExit) -> bool:
    """Whether typer turned Ctrl-C into an exit, which says nothing; a command that ended by itself has said it."""
    return isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt)


def _prepare_output() -> None:
    """A terminal that cannot show a character shows a ? instead, and a closed output swallows what is written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lasts as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _end(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(status)
