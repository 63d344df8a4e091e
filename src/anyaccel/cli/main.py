"""The `anyaccel` command: its subcommands and its error handling.

Results go to stdout; progress, logs and errors go to stderr. The exit status is 0 for success, 1
for a negative result, 2 for a usage error, 3 for a failure, 130 after Ctrl-C and 143 after SIGTERM.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from anyaccel.cli.batch import generate_batch
from anyaccel.cli.bench import bench_models
from anyaccel.cli.cache import cache_app
from anyaccel.cli.chart import show_chart
from anyaccel.cli.check import check_pipeline
from anyaccel.cli.command import with_verbose_option
from anyaccel.cli.config_file import read_option_defaults
from anyaccel.cli.devices import show_devices
from anyaccel.cli.explain import explain_model
from anyaccel.cli.generate.command import run_generate
from anyaccel.cli.help_sections import SectionedCommand
from anyaccel.cli.run import CONTEXT, run_program
from anyaccel.cli.serve import serve_models
from anyaccel.cli.warm import warm_model
from anyaccel.errors import AnyaccelError

__all__ = ["app", "main"]

app = typer.Typer(
    name="anyaccel",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help without panels, which can be piped and searched.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("batch")(with_verbose_option(generate_batch))
app.command("bench")(with_verbose_option(bench_models))
app.add_typer(cache_app, name="cache")
app.command("chart")(with_verbose_option(show_chart))
app.command("check")(with_verbose_option(check_pipeline))
app.command("devices")(with_verbose_option(show_devices))
app.command("explain")(with_verbose_option(explain_model))
app.command("generate", cls=SectionedCommand)(with_verbose_option(run_generate))
app.command("run", context_settings=CONTEXT)(run_program)
app.command("serve")(with_verbose_option(serve_models))
app.command("warm")(with_verbose_option(warm_model))


def _show_version(requested: bool) -> None:
    if requested:
        import anyaccel

        typer.echo(f"anyaccel {anyaccel.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Any diffusion pipeline, any accelerator, the same picture.

    Default values of options can be set in ~/.config/anyaccel/config.toml, in a table for each command:
    [generate] and steps = 20. ANYACCEL_CONFIG sets another file.
    """
    context.default_map = read_option_defaults(context)


def main() -> NoReturn:
    """Run the `anyaccel` command, and convert every error to a message and an exit status."""
    _prepare_output()
    try:
        app(prog_name="anyaccel")
    except KeyboardInterrupt:
        _exit("interrupted", 130)
    except SystemExit as end:
        if _was_interrupted(end):
            print("interrupted", file=sys.stderr)
        raise
    except AnyaccelError as error:
        _exit(f"error: {error}", error.exit_status)
    except OSError as error:
        if os.environ.get("ANYACCEL_TRACEBACK"):
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        _exit(f"error: system error: {reason}\nhint: check the free disk space and the file permissions", 3)
    except Exception as error:
        if os.environ.get("ANYACCEL_TRACEBACK"):
            raise
        _exit(
            f"error: {type(error).__name__}: {error}\n"
            "hint: this is a bug in anyaccel; set ANYACCEL_TRACEBACK=1 to see the traceback, and attach the output of "
            "`anyaccel devices --report` to an issue",
            3,
        )
    sys.exit(0)


def _was_interrupted(end: SystemExit) -> bool:
    """Return whether typer converted Ctrl-C to an exit without a message.

    Commands that handle Ctrl-C themselves print their own message.
    """
    # typer raises Exit(130) from the KeyboardInterrupt, and SystemExit while it handles that (typer 0.29, core.py).
    return isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt)


def _prepare_output() -> None:
    """Configure stdout and stderr so that printing never raises an encoding error.

    Characters that the terminal cannot encode are printed as `?`. A closed stream is replaced by the
    null device.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Python sets a stream to None if its file descriptor is closed, as after `>&-` in a shell.
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open until the process exits
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _exit(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(status)
