"""`anyaccel devices`: what is here, what is not and why; for one name, its whole sheet."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from anyaccel.backends.availability import Device
from anyaccel.backends.device import devices, find_device, sheet, this_machine
from anyaccel.backends.machine import Machine
from anyaccel.backends.sheet import Sheet
from anyaccel.backends.sheet_text import describe_sheet, sheet_as_json
from anyaccel.cli.console import colour_verdict, make_console
from anyaccel.errors import UsageError

__all__ = ["show_devices"]


def show_devices(
    name: Annotated[str | None, typer.Argument(help="A device, for its whole sheet: mps, hpu, rocm, …")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Print a block to paste into an issue.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hold the sheet of NAME against the device, and write an evidence file.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="With --verify: where the file goes.")
    ] = None,
    signed_off_by: Annotated[
        str, typer.Option("--signed-off-by", metavar="NAME", help="With --verify: who answers for it.")
    ] = "",
    pipelines: Annotated[
        str, typer.Option("--pipelines", metavar="few|all|none|RECIPE,…", help="With --verify: which ones to run.")
    ] = "few",
    quick: Annotated[bool, typer.Option("--quick", help="With --verify: leave the compiler out.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", metavar="N", help="With --verify: processes that run pipelines.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --verify: write over a file that is there.")] = False,
) -> None:
    """Show which accelerators are here, and exactly why the others are not.

    With --verify, exit status 1 where the device contradicts its sheet or a pipeline is wrong.
    """
    if report and (name or as_json):
        raise UsageError("--report goes with nothing else", hint="anyaccel devices --report")
    if verify:
        from anyaccel.cli.verify import Wanted, verify_device

        wanted = Wanted(pipelines=pipelines, quick=quick, jobs=jobs, signed_off_by=signed_off_by)
        verify_device(name, wanted, output, force=force, as_json=as_json)
    elif output or signed_off_by or pipelines != "few" or quick or jobs is not None or force:
        raise UsageError("--output and the like go with --verify", hint="anyaccel devices NAME --verify")
    elif name is not None:
        asked, found = sheet(name), find_device(name)
        _print_json(_device_as_json(found) | sheet_as_json(asked)) if as_json else _print_sheet(asked, found)
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
    print(json.dumps(document, indent=2, ensure_ascii=True))


def _print_devices(found: list[Device]) -> None:
    console = make_console()
    for device in sorted(found, key=lambda device: not device.available):
        mark = "[green]here[/green]    " if device.available else "[dim]not here[/dim]"
        console.print(f"[bold]{escape(device.name):8}[/bold] {mark}  {escape(device.title)}")
        console.print(f"         {escape(device.reason)}")
        if device.hint:
            console.print(f"         [dim]hint:[/dim] {escape(device.hint)}")
    console.print("\n[dim]anyaccel devices NAME shows what one can do, with sources.[/dim]")


def _print_sheet(asked: Sheet, found: Device) -> None:
    console = make_console()
    console.print(f"[bold]{escape(asked.title)}[/bold]  torch.device({asked.torch_name!r})")
    console.print(escape(asked.documentation), style="dim")
    console.print(f"{'here' if found.available else 'not here'}: {escape(found.reason)}")
    if found.hint:
        console.print(f"hint: {escape(found.hint)}")
    for section in describe_sheet(asked):
        console.print(f"\n[bold]{section.title}[/bold]")
        for row in section.rows:
            console.print(f"  [bold]{escape(row.matter)}[/bold]: {colour_verdict(row.verdict)}")
            console.print(f"      {escape(row.says)}")
            for file in row.files:
                console.print(f"      [dim]hardware: {escape(file)}[/dim]")
            if row.source and row.source not in row.files:
                known = "source" if row.files and row.evidence == "hardware" else row.evidence
                console.print(f"      [dim]{known}: {escape(row.source)}[/dim]")
            if row.contradicted_by:
                console.print(f"      [yellow]contradicted by[/yellow] [dim]{escape(row.contradicted_by)}[/dim]")


def _report(machine: Machine, found: list[Device]) -> str:
    """A block of Markdown with what an issue needs, and nothing that names the user or the machine."""
    lines = ["```text", f"system: {machine.system} on {machine.architecture}"]
    lines += ["translated: yes (Rosetta)"] if machine.translated else []
    lines += [f"{name}: {version}" for name, version in machine.versions.items()]
    lines += [f"torch built for {name}: {version}" for name, version in machine.torch_builds.items()]
    lines += [f"module: {module}" for module in sorted(machine.modules)]
    lines += [f"{pattern}: {count}" for pattern, count in machine.device_files.items() if count]
    lines += [f"{device.name}: {'here' if device.available else 'not here'}: {device.reason}" for device in found]
    home = os.path.expanduser("~")
    safe = [" ".join(line.split()).replace(home, "~").replace("```", "'''") for line in lines[1:]]
    return "\n".join([lines[0], *safe, "```"])
