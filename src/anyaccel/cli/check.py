"""`anyaccel check`: checks whether a pipeline is portable, and lists the source lines to fix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyaccel.call_limits import check_steps, parse_image_size
from anyaccel.cli.chart import describe_environment
from anyaccel.cli.interrupts import cleanup_on_exit
from anyaccel.cli.progress import Display
from anyaccel.cli.shared_options import Weights
from anyaccel.errors import UsageError, nearest
from anyaccel.storage.atomic_write import atomic_write, check_output_folder

if TYPE_CHECKING:
    from anyaccel.checking.report import DeviceReport, Report

__all__ = ["check_pipeline"]

_FORMATS = ("text", "json", "github", "sarif")


Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|FOLDER|RECIPE|MODULE:FUNCTION",
        help="Pipeline to check: a Hub ID, a folder, a recipe, or a function that returns a pipeline.",
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option("--device", "-d", help="Virtual device to check on; repeat for several. Default: all."),
]
AllDevices = Annotated[bool, typer.Option("--all", help="Check on every virtual device (the default).")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Raise an error at the first operation that the real device would reject.")
]
CheckSteps = Annotated[
    int | None, typer.Option("--steps", help="Number of denoising steps. Default: set by the recipe, otherwise 2.")
]
CheckSize = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="WxH",
        help="Image size in pixels: 640x480, or 512 for a square. Default: set by the recipe or model.",
    ),
]
Compiled = Annotated[bool, typer.Option("--compile", help="Compile the models and count the compiled graphs.")]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help="Output of an earlier run with --json; report only new failures. Default: report all.",
    ),
]
OnHardware = Annotated[
    bool,
    typer.Option(
        "--real", help="Run the model with its weights on a real device on this machine, and compare it with the CPU."
    ),
]
HardwareDtype = Annotated[
    str | None,
    typer.Option("--dtype", help="With --real: dtype on the device. Default: the device's preferred dtype."),
]


def check_pipeline(
    target: Target,
    device: Devices = None,
    all_devices: AllDevices = False,
    strict: Strict = False,
    plain: Annotated[bool, typer.Option("--plain", help="Check stock diffusers, without anyaccel.")] = False,
    steps: CheckSteps = None,
    size: CheckSize = None,
    compiled: Compiled = False,
    baseline: Baseline = None,
    output_format: Annotated[str, typer.Option("--format", help=f"Output format: {', '.join(_FORMATS)}.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Also write an HTML page.")] = None,
    real: OnHardware = False,
    dtype: HardwareDtype = None,
    weights: Weights = None,
) -> None:
    """Check whether a pipeline is portable to other devices.

    The pipeline runs on virtual devices, and its image is compared with the CPU image. The report lists
    the source lines to fix. Virtual devices enforce documented limits; they do not replace a test on
    hardware. With --real, the check runs on a device of this machine instead and compares each
    component at each step. The exit status is 1 if the pipeline fails on a device.
    """
    # Options of the virtual check are rejected with --real; ignoring them would suggest that they took effect.
    if real:
        others: dict[str, Any] = {"--all": all_devices, "--strict": strict, "--plain": plain, "--compile": compiled}
        others |= {"--baseline": baseline, "--html": html, "--format": output_format != "text"}
        placement = {"dtype": dtype, "weights": weights}
        _check_hardware(target, device or ["auto"], placement, _read_call(steps, size), as_json, others)
        return
    if dtype is not None:
        raise UsageError(
            "--dtype requires --real: virtual devices are checked in float32", hint="add --real, or omit --dtype"
        )
    if device and all_devices:
        raise UsageError("--device and --all cannot be combined", hint="omit --device or --all")
    output_format = "json" if as_json else output_format
    if output_format not in _FORMATS:
        raise UsageError(f"unknown value {output_format!r} for --format", hint=nearest(output_format, _FORMATS))
    if html:
        check_output_folder(html)
    modes = {"plain": plain, "strict": strict, "compile": compiled, "weights": weights}
    report = _check_virtual(target, device or ["all"], baseline, modes, _read_call(steps, size))
    # Printed before the page is written: a full disk must not hide the result.
    print(_format_report(report, output_format))
    if html:
        from anyaccel.checking.chart.report_page import write_report_page

        atomic_write(html, write_report_page(report, describe_environment()))
    if not report.passes:
        raise typer.Exit(1)


def _check_virtual(
    target: str, devices: list[str], baseline: str | None, modes: dict[str, Any], call: dict[str, Any]
) -> Report:
    # Virtual devices run in forked processes, and the threads of torch do not survive a fork. torch reads the variable
    # when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from anyaccel.checking.accepted_findings import drop_known_findings, read_baseline
    from anyaccel.checking.check import check, find_devices

    # Read before the check, which takes minutes: the file may be missing.
    known_failures = read_baseline(baseline) if baseline else None
    names = find_devices(devices)
    done = 0

    # `display` is bound by the with statement below; the callback runs only inside of it.
    def show_progress(device_report: DeviceReport) -> None:
        nonlocal done
        done += 1
        display.update_count(done, len(names), device_report.device)

    with cleanup_on_exit() as display:
        display.start_phase(f"Checking {target}")
        report = check(target, names, **modes, on_report=show_progress, **call)
    return report if known_failures is None else drop_known_findings(report, known_failures)


def _check_hardware(
    target: str,
    devices: list[str],
    placement: dict[str, Any],
    call: dict[str, Any],
    as_json: bool,
    others: dict[str, Any],
) -> None:
    conflict = next((name for name, value in others.items() if value), None)
    if conflict:
        raise UsageError(f"--real cannot be combined with {conflict}", hint=f"omit --real or {conflict}")
    if len(devices) > 1:
        raise UsageError(f"--real checks one device, not {len(devices)}", hint=f"pass only --device {devices[0]}")
    from anyaccel.checking.on_hardware import check_on_hardware, describe_hardware_report

    report = check_on_hardware(target, devices[0], **placement, on_message=Display().print_line, **call)
    print(report.to_json() if as_json else "\n".join(describe_hardware_report(report)))
    if not report.right:
        raise typer.Exit(1)


def _format_report(report: Report, output_format: str) -> str:
    from anyaccel.checking.ci_formats import as_github, as_sarif

    if output_format == "github":
        return "\n".join(as_github(report))
    if output_format == "sarif":
        return as_sarif(report)
    return report.to_json() if output_format == "json" else str(report)


def _read_call(steps: int | None, size: str | None) -> dict[str, Any]:
    call: dict[str, Any] = {}
    if steps is not None:
        call["num_inference_steps"] = check_steps(steps, hint="for example --steps 2")
    if size is not None:
        call["width"], call["height"] = parse_image_size(size)
    return call
