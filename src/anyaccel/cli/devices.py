"""`anyaccel devices`: the list of devices, and the capability sheet of one device."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from anyaccel.backends.availability import Device
from anyaccel.backends.device import devices, find_device, sheet, this_machine
from anyaccel.backends.machine import Machine
from anyaccel.backends.sheet import Sheet
from anyaccel.backends.sheet_text import describe_sheet, sheet_as_json
from anyaccel.cli.completion import complete_device
from anyaccel.cli.console import color_verdict, make_console
from anyaccel.cli.shared_options import AsJson
from anyaccel.errors import UsageError

__all__ = ["show_devices"]


Name = Annotated[
    str | None,
    typer.Argument(
        help="Print the capability sheet of this device, for example mps, hpu or rocm.",
        autocompletion=complete_device,
    ),
]
Report = Annotated[bool, typer.Option("--report", help="Print a summary of this machine for a bug report.")]
Install = Annotated[
    bool,
    typer.Option("--install", help="Print the command that installs torch for the hardware found, or for NAME."),
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Verify the capability sheet against the device and write an evidence file."),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="With --verify: evidence file to write."),
]
SignedOffBy = Annotated[
    str,
    typer.Option(
        "--signed-off-by", metavar="NAME", help="With --verify: name of the person who signs off on the evidence."
    ),
]
Pipelines = Annotated[
    str, typer.Option("--pipelines", metavar="few|all|none|RECIPE,…", help="With --verify: tiny pipelines to run.")
]
Compiled = Annotated[
    bool,
    typer.Option("--compile", help="With --verify: also run the pipelines compiled, captured and with speed=fast."),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", metavar="N", help="With --verify: number of processes that run pipelines.")
]


def show_devices(
    name: Name = None,
    as_json: AsJson = False,
    report: Report = False,
    install: Install = False,
    verify: Verify = False,
    output: Output = None,
    signed_off_by: SignedOffBy = "",
    pipelines: Pipelines = "few",
    compiled: Compiled = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --verify: skip the compiler probes.")] = False,
    jobs: Jobs = None,
    force: Annotated[bool, typer.Option("--force", help="With --verify: overwrite an existing file.")] = False,
) -> None:
    """List the devices on this machine, or print the capability sheet of one device.

    Devices that are not available are listed with the reason.

    With --verify, the exit status is 1 if the device contradicts its sheet or an image is wrong.
    """
    if install and (report or verify):
        raise UsageError(
            "--install cannot be combined with --report or --verify", hint="use `anyaccel devices --install`"
        )
    if report and (name or as_json):
        raise UsageError("--report cannot be combined with NAME or --json", hint="use `anyaccel devices --report`")
    if install:
        from anyaccel.cli.install import print_install_commands

        print_install_commands(name, as_json=as_json)
    elif verify:
        from anyaccel.cli.verify import VerifyOptions, verify_device

        options = VerifyOptions(
            pipelines=pipelines, quick=quick, compiled=compiled, jobs=jobs, signed_off_by=signed_off_by
        )
        verify_device(name, options, output, force=force, as_json=as_json)
    # Without --verify these options have no effect; reject them instead of ignoring them.
    elif output or signed_off_by or pipelines != "few" or compiled or quick or jobs is not None or force:
        raise UsageError(
            "--output, --signed-off-by, --pipelines, --compile, --quick, --jobs and --force require --verify",
            hint="add --verify: `anyaccel devices NAME --verify`",
        )
    else:
        _show(name, report=report, as_json=as_json)


def _show(name: str | None, *, report: bool, as_json: bool) -> None:
    """Print the list of devices, one sheet or a report."""
    if name is not None:
        device_sheet, device = sheet(name), find_device(name)
        if as_json:
            _print_json(_device_as_json(device) | sheet_as_json(device_sheet))
        else:
            _print_sheet(device_sheet, device)
    elif report:
        print(_report(this_machine(), devices()))
    elif as_json:
        _print_json([_device_as_json(device) for device in devices()])
    else:
        _print_devices(devices())


def _device_as_json(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "title": device.title,
        "available": device.available,
        "reason": device.reason,
        "hint": device.hint,
        "count": device.count,
        "names": list(device.names),
        "origin": device.origin,
        "virtual": device.virtual,
    }


def _print_json(document: object) -> None:
    # ASCII only: other characters would become `?` on a terminal that cannot encode them.
    print(json.dumps(document, indent=2, ensure_ascii=True))


def _print_devices(devices: list[Device]) -> None:
    console = make_console()
    columns = shutil.get_terminal_size((100, 24)).columns
    width = max(len(device.name) for device in devices) + 2
    available = [device for device in devices if device.available]
    missing = [device for device in devices if not device.available]
    console.print("[bold]available[/bold]")
    for device in available:
        console.print(f"  [green]{escape(f'{device.name:{width}}')}[/green]{escape(device.title)} ({device.reason})")
        if device.hint:
            console.print(f"  {'':{width}}[dim]{escape(device.hint)}[/dim]")
    if missing:
        console.print("\n[bold]not available on this machine[/bold]")
    for device in missing:
        # The first unmet requirement is enough here; `anyaccel devices NAME` prints all of them with their hints.
        text = f"{device.title}: {device.reason.partition('; ')[0]}"
        console.print(f"  [dim]{escape(f'{device.name:{width}}')}[/dim]{escape(_shorten(text, columns - width - 2))}")
    console.print("\nanyaccel devices NAME  prints the capabilities, limits and setup hints of a device")
    console.print("ANYACCEL_VIRTUAL=NAME  emulates a device on the CPU")


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def _print_sheet(sheet: Sheet, device: Device) -> None:
    console = make_console()
    console.print(f"[bold]{escape(sheet.title)}[/bold]  torch.device({sheet.torch_name!r})")
    console.print(escape(sheet.documentation), style="dim")
    console.print(f"{'available' if device.available else 'not available'}: {escape(device.reason)}")
    if device.hint:
        console.print(f"hint: {escape(device.hint)}")
    # Texts are escaped: rich would interpret the brackets of `pip install package[extra]` as markup.
    for section in describe_sheet(sheet):
        console.print(f"\n[bold]{section.title}[/bold]")
        for row in section.rows:
            console.print(f"  [bold]{escape(row.subject)}[/bold]: {color_verdict(row.verdict)}")
            console.print(f"      {escape(row.says)}")
            for file in row.files:
                console.print(f"      [dim]hardware: {escape(file)}[/dim]")
            if row.source and row.source not in row.files:
                evidence = "source" if row.files and row.evidence == "hardware" else row.evidence
                console.print(f"      [dim]{evidence}: {escape(row.source)}[/dim]")
            if row.contradicted_by:
                console.print(f"      [yellow]contradicted by[/yellow] [dim]{escape(row.contradicted_by)}[/dim]")


def _report(machine: Machine, devices: list[Device]) -> str:
    """Return a Markdown block for bug reports, without data that identifies the user or the machine."""
    lines = ["```text", f"system: {machine.system} on {machine.architecture}"]
    lines += ["translated: yes (Rosetta)"] if machine.translated else []
    lines += [f"{name}: {version}" for name, version in machine.versions.items()]
    lines += [f"torch built for {name}: {version}" for name, version in machine.torch_builds.items()]
    lines += [f"module: {module}" for module in sorted(machine.modules)]
    lines += [f"{pattern}: {count}" for pattern, count in machine.device_files.items() if count]
    lines += [
        f"{device.name}: {'available' if device.available else 'not available'}: {device.reason}" for device in devices
    ]
    # Error texts of vendor modules can contain paths, line breaks and a fence that would end the block early.
    home = os.path.expanduser("~")
    safe = [" ".join(line.split()).replace(home, "~").replace("```", "'''") for line in lines[1:]]
    return "\n".join([lines[0], *safe, "```"])
