"""`anyaccel devices NAME --verify`: the sheet held against the device, in a table and in a file."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from anyaccel.backends.device import read_device
from anyaccel.backends.evidence import FOLDER, Finding, PipelineFinding, Verification
from anyaccel.cli.console import colour_verdict, make_console
from anyaccel.errors import UsageError
from anyaccel.storage.atomic_write import atomic_write

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Wanted", "verify_device"]

_COLOURS = {"agrees": "green", "contradicts": "red", "new": "cyan", "not tried": "dim"}
_MOST_LINES = 12
"""With more pipelines than this, only those that are not right have a line."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How a verification is made."""

    pipelines: str = "few"
    quick: bool = False
    jobs: int | None = None
    signed_off_by: str = ""


def verify_device(name: str | None, wanted: Wanted, output: Path | None, *, force: bool, as_json: bool) -> None:
    """Verify one device, print what was seen and write the file; exit status 1 where something does not hold."""
    if name is None:
        raise UsageError("--verify takes the name of one device", hint="anyaccel devices cuda --verify")
    if read_device(name).virtual:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there: a virtual device has a forked process
    file = _choose_file(name, output, force)
    verification = _verify(name, wanted)
    atomic_write(file, verification.to_json())
    if as_json:
        print(verification.to_json(), end="")
    else:
        _print_verification(verification)
    print("\n".join(_advise(verification, file)), file=sys.stderr if as_json else sys.stdout)
    if not verification.holds:
        raise typer.Exit(1)


def _verify(name: str, wanted: Wanted) -> Verification:
    from anyaccel.verification.verify import verify

    asked = [] if wanted.pipelines == "none" else wanted.pipelines
    if isinstance(asked, str) and asked not in ("few", "all"):
        asked = asked.split(",")
    return verify(
        name,
        pipelines=asked,
        quick=wanted.quick,
        jobs=wanted.jobs,
        signed_off_by=wanted.signed_off_by.strip(),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _choose_file(name: str, output: Path | None, force: bool) -> Path:
    """Where the file goes, before minutes are spent on it."""
    file = output or Path(_suggest_name(name))
    if file.exists() and not force:
        raise UsageError(f"{file} is there already", hint="name another one with --output, or add --force")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", hint="make it first, or name another file with --output")
    with tempfile.TemporaryFile(dir=file.absolute().parent):  # a folder that cannot be written to is told of now
        return file


def _suggest_name(name: str) -> str:
    """A name for the file: `anyaccel-evidence-cuda-h200-2026-11-15.json`."""
    from anyaccel.verification.probe_worker import make_probe_context

    spec = read_device(name)
    device = ["virtual"] * spec.virtual + [spec.product or spec.name] + [str(spec.index)] * (spec.index is not None)
    which = [] if spec.virtual else [make_probe_context(name, quick=True).product or platform.machine()]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return "-".join(["anyaccel-evidence", *device, *which, today]) + ".json"


def _print_verification(verification: Verification) -> None:
    console = make_console()
    console.print(f"\n[bold]{escape(verification.device)}[/bold]  {escape(verification.where)}")
    width = max((len(finding.claim) for finding in verification.findings), default=5)
    console.print(f"  {'claim':{width}}  {'sheet says':10}  {'seen':10}  verdict", style="dim")
    for finding in verification.findings:
        console.print(_describe_finding(finding, width))
    _print_pipelines(console, verification.pipelines)


def _describe_finding(finding: Finding, width: int) -> str:
    colour = _COLOURS[finding.verdict]
    seen = f"{finding.seen or '-':10}"
    return (
        f"  [bold]{finding.claim:{width}}[/bold]  {finding.expected:10}  "
        f"{colour_verdict(seen) if finding.seen else seen}  "
        f"[{colour}]{finding.verdict:11}[/{colour}]  [dim]{escape(finding.detail)}[/dim]"
    )


def _print_pipelines(console: Console, pipelines: tuple[PipelineFinding, ...]) -> None:
    from anyaccel.verification.verify import describe_pipeline

    if not pipelines:
        return
    compared = [(one.max_difference, one) for one in pipelines if one.max_difference is not None]
    right = sum(one.right is True for one in pipelines)
    console.print(f"\n[bold]Pipelines[/bold]: {right} of {len(pipelines)} give the CPU's picture in float32")
    if compared:
        difference, one = max(compared, key=lambda pair: pair[0] / pair[1].tolerance)
        console.print(f"  nearest to its bound: {one.recipe} differs by {difference:.1e}, {one.tolerance:.1e} allowed")
    for one in pipelines:
        if len(pipelines) <= _MOST_LINES or one.right is not True:
            colour = {True: "green", False: "red", None: "dim"}[one.right]
            console.print(f"  [{colour}]{escape(describe_pipeline(one))}[/{colour}]")


def _advise(verification: Verification, file: Path) -> list[str]:
    """What was found in one line, where the file is, and what to do with it."""
    counted = Counter(finding.verdict for finding in verification.findings)
    lines = ["", ", ".join(f"{verdict}: {count}" for verdict, count in counted.items())]
    lines.append(f"written: {file}")
    if verification.virtual:
        return [*lines, "virtual: this says what the emulator enforces and nothing of hardware; it is never taken in"]
    if not verification.signed_off_by:
        return [*lines, "nobody signed it off: with --signed-off-by NAME it could be taken in"]
    return [*lines, f"to have it taken in, open a pull request that adds it under {FOLDER}/ (see CONTRIBUTING.md)"]
