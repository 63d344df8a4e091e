"""`anyaccel batch`: generates one image per row of a JSONL file on all devices, and can be resumed."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anyaccel.cli.completion import complete_device
from anyaccel.cli.interrupts import INTERRUPTED, TERMINATED
from anyaccel.cli.progress import Display
from anyaccel.cli.shared_options import Dtype, Model, RayAddress, Speed, Weights
from anyaccel.processes.signals import TerminatedError, raising_on_sigterm

__all__ = ["generate_batch"]

Source = Annotated[
    str, typer.Argument(metavar="INPUT.jsonl", help="File with one JSON object per line; - reads stdin.")
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the images and manifest.jsonl.")]
BatchDevice = Annotated[
    str,
    typer.Option(
        "--device",
        "-d",
        help="Device to use: auto, cuda, hpu:3, virtual:neuron,count=2.",
        autocompletion=complete_device,
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", "-w", min=1, help="Number of worker processes. Default: one per device.")
]
RowsPerCall = Annotated[
    int | None,
    typer.Option(
        "--rows-per-call",
        min=1,
        max=256,
        help="Maximum number of rows per pipeline call; only rows with the same size and settings are combined. "
        "Default: chosen for the device.",
    ),
]


def generate_batch(
    source: Source,
    out: Out,
    model: Model = None,
    device: BatchDevice = "auto",
    workers: Workers = None,
    ray: RayAddress = None,
    dtype: Dtype = None,
    speed: Speed = "exact",
    weights: Weights = None,
    rows_per_call: RowsPerCall = None,
    # Name of --rows-per-call in version 0.1.
    rows_a_call: Annotated[int | None, typer.Option("--rows-a-call", min=1, max=256, hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Generate an image for every row of a JSONL file.

    A row looks like {"prompt": "a red apple", "seed": 7, "num_inference_steps": 8}. To resume an
    interrupted batch, run the same command again. The exit status is 1 if any row failed.
    """
    from anyaccel.cluster.batch.image_worker import WorkerSettings
    from anyaccel.cluster.batch.start import BatchJob, run_batch
    from anyaccel.cluster.ray_cluster import leave

    settings = WorkerSettings(
        model=model,
        device=device,
        dtype=dtype,
        speed=speed,
        weights=weights,
        rows_per_call=rows_per_call or rows_a_call,
    )
    display = Display()
    # Shown before the first event: starting the workers takes seconds.
    display.start_phase("Starting")
    try:
        # Ray prints the output of its workers to stdout, which is reserved for the summary.
        with raising_on_sigterm(), redirect_stdout(sys.stderr):
            job = BatchJob(source=source, out=out.expanduser(), settings=settings, workers=workers, ray=ray)
            summary = run_batch(job, display)
            if ray is not None:
                leave()
    except (KeyboardInterrupt, TerminatedError) as error:
        raise typer.Exit(_report_interruption(error, display)) from None
    finally:
        display.clear()
    manifest = out / "manifest.jsonl"
    if as_json:
        print(json.dumps({**asdict(summary), "manifest": str(manifest)}, indent=2))
    else:
        failed = f", {summary.failed} failed" if summary.failed else ""
        earlier = f" ({summary.done - summary.made} from an earlier run)" if summary.done > summary.made else ""
        print(f"{summary.done} of {summary.rows} images{earlier}{failed}: {manifest}")
    if summary.failed:
        raise typer.Exit(1)


def _report_interruption(error: BaseException, display: Display) -> int:
    """Print how many rows are finished, and return the exit status."""
    # Before the input is read, the total is 0 and there is nothing to resume.
    progress = (
        f": {display.done} of {display.total} rows are finished; run the same command again to resume"
        if display.total
        else ""
    )
    outcome, status = ("terminated", TERMINATED) if isinstance(error, TerminatedError) else ("interrupted", INTERRUPTED)
    display.print_line(f"{outcome}{progress}")
    return status
