"""`anyaccel devices NAME --verify`: compares a device with its sheet and writes an evidence file."""

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
from anyaccel.backends.evidence_files import FOLDER, Finding, PipelineFinding, Verification
from anyaccel.cli.console import color_verdict, make_console
from anyaccel.errors import UsageError
from anyaccel.storage.atomic_write import atomic_write

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["VerifyOptions", "verify_device"]

_COLORS = {"agrees": "green", "contradicts": "red", "new": "cyan", "not tried": "dim"}
# If there are more pipelines, only those that fail are listed.
_MAX_PIPELINE_LINES = 12


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options for `anyaccel devices NAME --verify`."""

    pipelines: str = "few"
    quick: bool = False
    compiled: bool = False
    jobs: int | None = None
    signed_off_by: str = ""


def verify_device(name: str | None, options: VerifyOptions, output: Path | None, *, force: bool, as_json: bool) -> None:
    """Verify a device, write the evidence file and print the result.

    Exit with status 1 if the device contradicts its sheet or a pipeline produces a wrong image.
    """
    if name is None:
        raise UsageError("--verify requires a device name", hint="for example: anyaccel devices cuda --verify")
    if read_device(name).virtual:
        # A virtual device runs in a forked process, and the threads of torch do not survive a fork.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    file = _choose_file(name, output, force)
    partial = file.with_name(f".{file.name}.partial")
    verification = _verify(name, options, partial)
    # Written before it is printed: a closed pipe must not lose the results.
    atomic_write(file, verification.to_json())
    partial.unlink(missing_ok=True)
    if as_json:
        print(verification.to_json(), end="")
    else:
        _print_verification(verification)
    print("\n".join(_summarize(verification, file)), file=sys.stderr if as_json else sys.stdout)
    if not verification.holds:
        raise typer.Exit(1)


def _verify(name: str, options: VerifyOptions, partial: Path) -> Verification:
    from anyaccel.verification.verify import verify

    pipelines = [] if options.pipelines == "none" else options.pipelines
    if isinstance(pipelines, str) and pipelines not in ("few", "all"):
        pipelines = pipelines.split(",")
    return verify(
        name,
        pipelines=pipelines,
        quick=options.quick,
        compiled=options.compiled,
        jobs=options.jobs,
        signed_off_by=options.signed_off_by.strip(),
        partial_file=partial,
        on_message=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _choose_file(name: str, output: Path | None, force: bool) -> Path:
    """Return the path for the evidence file; raise if the file exists or cannot be written."""
    file = output or Path(_default_file_name(name))
    if file.exists() and not force:
        raise UsageError(f"{file} already exists", hint="pass a different file to --output, or add --force")
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UsageError(
            f"the folder {file.parent} does not exist",
            hint=f"create it with `mkdir -p {file.parent}`, or pass a different file to --output",
        )
    # Permission bits are not reliable (ACLs, read-only mounts, root), so create a file to find out.
    with tempfile.TemporaryFile(dir=folder):
        return file


def _default_file_name(name: str) -> str:
    """Return the default name for the evidence file.

    An example is `anyaccel-evidence-cuda-h200-2026-11-15.json`.
    """
    from anyaccel.verification.probe_worker import make_probe_context

    spec = read_device(name)
    device = ["virtual"] * spec.virtual + [spec.product or spec.name] + [str(spec.index)] * (spec.index is not None)
    product = [] if spec.virtual else [make_probe_context(name, quick=True).product or platform.machine()]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return "-".join(["anyaccel-evidence", *device, *product, today]) + ".json"


def _print_verification(verification: Verification) -> None:
    console = make_console()
    console.print(f"\n[bold]{escape(verification.device)}[/bold]  {escape(verification.where)}")
    width = max((len(finding.claim) for finding in verification.findings), default=5)
    console.print(f"  {'claim':{width}}  {'sheet':10}  {'device':10}  verdict", style="dim")
    for finding in verification.findings:
        console.print(_format_finding(finding, width))
    _print_pipelines(console, verification.pipelines)


def _format_finding(finding: Finding, width: int) -> str:
    color = _COLORS[finding.verdict]
    # Padded before it is colored: markup would count as width.
    seen = f"{finding.seen or '-':10}"
    return (
        f"  [bold]{finding.claim:{width}}[/bold]  {finding.expected:10}  "
        f"{color_verdict(seen) if finding.seen else seen}  "
        f"[{color}]{finding.verdict:11}[/{color}]  [dim]{escape(finding.detail)}[/dim]"
    )


def _print_pipelines(console: Console, pipelines: tuple[PipelineFinding, ...]) -> None:
    from anyaccel.verification.verify import describe_pipeline

    if not pipelines:
        return
    compared = [(finding.max_difference, finding) for finding in pipelines if finding.max_difference is not None]
    console.print("\n[bold]Pipelines[/bold], in float32")
    for mode in dict.fromkeys(finding.mode for finding in pipelines):
        console.print(f"  {_summarize_mode(mode, [finding for finding in pipelines if finding.mode == mode])}")
    if compared:
        # Relative to its tolerance: recipes have different tolerances.
        difference, closest = max(compared, key=lambda pair: pair[0] / pair[1].tolerance)
        console.print(
            f"  closest to its tolerance: {closest.recipe} differs by {difference:.1e} of {closest.tolerance:.1e}"
        )
    for finding in pipelines:
        if len(pipelines) <= _MAX_PIPELINE_LINES or finding.right is not True:
            color = {True: "green", False: "red", None: "dim"}[finding.right]
            console.print(f"  [{color}]{escape(describe_pipeline(finding))}[/{color}]")


def _summarize_mode(mode: str, findings: list[PipelineFinding]) -> str:
    """Return one line of text with the number of correct pipelines and of fallbacks in one mode."""
    correct = sum(finding.right is True for finding in findings)
    if mode == "fast":
        return f"fast: {correct} of {len(findings)} run and give finite values"
    fallbacks = sum(bool(finding.fallback) for finding in findings)
    text = f"{mode}: {correct} of {len(findings)} match the CPU image"
    return f"{text}; {fallbacks} with a fallback" if fallbacks else text


def _summarize(verification: Verification, file: Path) -> list[str]:
    """Return summary lines: the count of each verdict, the file path and how to contribute the file."""
    counts = Counter(finding.verdict for finding in verification.findings)
    lines = ["", ", ".join(f"{verdict}: {count}" for verdict, count in counts.items())]
    lines.append(f"written: {file}")
    if verification.virtual:
        return [*lines, "virtual device: the file records what the emulator enforces; it is never accepted as evidence"]
    if not verification.signed_off_by:
        return [*lines, "not signed off: add --signed-off-by NAME to contribute the file"]
    return [*lines, f"to contribute the file, open a pull request that adds it to {FOLDER}/ (see CONTRIBUTING.md)"]
