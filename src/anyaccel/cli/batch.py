"""`anyaccel batch INPUT.jsonl --out DIR`: a picture of every row, over all devices, and on again where it stopped."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anyaccel.cli.interrupts import ENDED, INTERRUPTED
from anyaccel.cli.progress import Display
from anyaccel.processes.signals import TerminatedError, raising_on_sigterm

__all__ = ["make_batch"]

Text = str | None


def make_batch(
    source: Annotated[str, typer.Argument(metavar="INPUT.jsonl", help="A row a line; - is stdin.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="For pictures and the manifest.")],
    model: Annotated[Text, typer.Option("--model", "-m", help="A hub id or a folder; else the embedded one.")] = None,
    device: Annotated[str, typer.Option("--device", "-d", help="auto, NAME, hpu:3, virtual:neuron,count=2.")] = "auto",
    workers: Annotated[int | None, typer.Option("--workers", "-w", min=1, help="Else one a device.")] = None,
    ray: Annotated[Text, typer.Option("--ray", metavar="ADDRESS|auto", help="Let Ray's machines work.")] = None,
    dtype: Annotated[Text, typer.Option("--dtype", help="float32, bf16, fp16; else the device's best.")] = None,
    speed: Annotated[str, typer.Option("--speed", help="exact; fast and draft are not quite the same.")] = "exact",
    rows_a_call: Annotated[
        int | None, typer.Option("--rows-a-call", min=1, max=256, help="Rows of one shape made at once; else decided.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Make a picture of every row: {"prompt": "a red apple", "seed": 7, "num_inference_steps": 8}.

    The same command goes on where it was stopped. Ends with 0 if every row has its picture, with 1 if rows failed.
    """
    from anyaccel.cluster.batch.image_worker import WorkerSettings
    from anyaccel.cluster.batch.start import BatchJob, run_batch
    from anyaccel.cluster.ray_cluster import leave

    settings = WorkerSettings(model=model, device=device, dtype=dtype, speed=speed, rows_a_call=rows_a_call)
    display = Display()
    display.begin("starting")
    try:
        with raising_on_sigterm(), redirect_stdout(sys.stderr):  # stdout is for the summary, and Ray tells of workers
            job = BatchJob(source=source, out=out.expanduser(), settings=settings, workers=workers, ray=ray)
            summary = run_batch(job, display)
            if ray is not None:
                leave()
    except (KeyboardInterrupt, TerminatedError) as error:
        told = (
            f": {display.done} of {display.total} rows are over; the same command goes on from there"
            if display.total
            else ""
        )
        word, status = ("ended", ENDED) if isinstance(error, TerminatedError) else ("interrupted", INTERRUPTED)
        display.say(f"{word}{told}")
        raise typer.Exit(status) from None
    finally:
        display.clear()
    manifest = out / "manifest.jsonl"
    if as_json:
        print(json.dumps({**asdict(summary), "manifest": str(manifest)}, indent=2))
    else:
        failed = f", {summary.failed} failed" if summary.failed else ""
        earlier = f" ({summary.done - summary.made} of them before)" if summary.done > summary.made else ""
        print(f"{summary.done} of {summary.rows} pictures{earlier}{failed}: {manifest}")
    if summary.failed:
        raise typer.Exit(1)
