"""`anyaccel check`: whether a pipeline is portable, on virtual devices, and which lines keep it from being so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyaccel.call_limits import check_steps, parse_image_size
from anyaccel.cli.chart import describe_making
from anyaccel.cli.interrupts import cleanup_on_exit
from anyaccel.cli.progress import Display
from anyaccel.errors import UsageError, nearest
from anyaccel.storage.atomic_write import atomic_write

if TYPE_CHECKING:
    from anyaccel.checking.report import DeviceReport, Report

__all__ = ["check_pipeline"]

_FORMATS = ("text", "json", "github", "sarif")


def check_pipeline(
    subject: Annotated[
        str,
        typer.Argument(metavar="MODEL|FOLDER|RECIPE|MODULE:FUNCTION", help="What to check."),
    ],
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", help="A device; give it several times for several.")
    ] = None,
    all_devices: Annotated[bool, typer.Option("--all", help="Every device that can be virtual.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop where the device would.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Check diffusers alone, without anyaccel.")] = False,
    steps: Annotated[int | None, typer.Option("--steps", help="How many steps.")] = None,
    size: Annotated[str | None, typer.Option("--size", metavar="WxH", help="In pixels.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile, and count the graphs.")] = False,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="FILE", help="An earlier --json: only what is new is told.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help=f"{', '.join(_FORMATS)}.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write a page as well.")] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Your model with its weights on your device, against the CPU.")
    ] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="With --real: the type to run in there.")] = None,
) -> None:
    """Check a pipeline on virtual devices: does it run, is the picture right, and which lines are to be mended.

    Exit status 1 where the answer is no for a device. Virtual devices enforce documented limits; they are no hardware.
    `--real` asks your own device instead, by component and by step: is it silently wrong here?
    """
    if real:
        others: dict[str, Any] = {"--all": all_devices, "--strict": strict, "--plain": plain, "--compile": compiled}
        others |= {"--baseline": baseline, "--html": html, "--format": form != "text"}
        _check_real(subject, device or ["auto"], dtype, _read_call(steps, size), as_json, others)
        return
    if dtype is not None:
        raise UsageError("--dtype goes with --real", hint="a virtual device is checked in float32")
    if device and all_devices:
        raise UsageError("--device and --all are both given", hint="leave one of the two out")
    form = "json" if as_json else form
    if form not in _FORMATS:
        raise UsageError(f"there is no format {form!r}", hint=nearest(form, _FORMATS))
    if html and not html.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {html.absolute().parent}", hint="make it first")
    ways = {"plain": plain, "strict": strict, "compile": compiled}
    report = _check_virtual(subject, device or ["all"], baseline, ways, _read_call(steps, size))
    print(_write(report, form))
    if html:
        from anyaccel.checking.chart.report_page import write_report_page

        atomic_write(html, write_report_page(report, describe_making()))
    if not report.passes:
        raise typer.Exit(1)


def _check_virtual(
    subject: str, devices: list[str], baseline: str | None, ways: dict[str, bool], call: dict[str, Any]
) -> Report:
    # Each device has a process, and each process one core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from anyaccel.checking.baseline import drop_known_failures, read_baseline
    from anyaccel.checking.check import check, find_devices

    known = read_baseline(baseline) if baseline else None
    wanted = find_devices(devices)
    done = 0

    def tell(one: DeviceReport) -> None:
        nonlocal done
        done += 1
        display.count(done, len(wanted), one.device)

    with cleanup_on_exit() as display:
        display.begin(f"checking {subject}")
        report = check(subject, wanted, **ways, told=tell, **call)
    return report if known is None else drop_known_failures(report, known)


def _check_real(
    subject: str, devices: list[str], dtype: str | None, call: dict[str, Any], as_json: bool, others: dict[str, Any]
) -> None:
    unfit = next((name for name, value in others.items() if value), None)
    if unfit or len(devices) > 1:
        raise UsageError(f"--real does not go with {unfit or 'several devices'}", hint="leave one of the two out")
    from anyaccel.checking.on_hardware import check_on_hardware, describe_hardware_report

    report = check_on_hardware(subject, devices[0], dtype=dtype, say=Display().say, **call)
    print(report.to_json() if as_json else "\n".join(describe_hardware_report(report)))
    if not report.right:
        raise typer.Exit(1)


def _write(report: Report, form: str) -> str:
    from anyaccel.checking.ci_formats import as_github, as_sarif

    if form == "github":
        return "\n".join(as_github(report))
    if form == "sarif":
        return as_sarif(report)
    return report.to_json() if form == "json" else str(report)


def _read_call(steps: int | None, size: str | None) -> dict[str, Any]:
    call: dict[str, Any] = {}
    if steps is not None:
        call["num_inference_steps"] = check_steps(steps, hint="for example --steps 2")
    if size is not None:
        call["width"], call["height"] = parse_image_size(size)
    return call
