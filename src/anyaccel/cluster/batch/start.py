"""Batch entry point: reads the input, starts local or Ray workers, and generates the images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anyaccel.backends.device_spec import AUTO, DeviceSpec
from anyaccel.cluster.batch.image_worker import WorkerSettings
from anyaccel.cluster.batch.local_worker_pool import LocalWorkerPool, WorkerPool
from anyaccel.cluster.batch.manifest import OutputFolder
from anyaccel.cluster.batch.rows import BatchRow, read_rows
from anyaccel.cluster.batch.runner import BatchRun, BatchSummary
from anyaccel.cluster.device_slots import DeviceSlots, check_workers, find_device_slots, share_threads, slots_from_name
from anyaccel.embedded.motion import VIDEO_NAME, choose_name, fit_video_call
from anyaccel.errors import UsageError
from anyaccel.progress import ProgressListener

__all__ = ["BatchJob", "run_batch"]


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """Options for `run_batch`: input file, output folder, worker settings, worker count and Ray address."""

    source: str
    """Path of the JSONL file, or `-` for stdin."""
    out: Path
    settings: WorkerSettings
    workers: int | None = None
    """Number of workers; None is one per device."""
    ray: str | None = None
    """Address of a Ray cluster; None uses only this machine."""


def run_batch(job: BatchJob, listener: ProgressListener) -> BatchSummary:
    """Generate an image for each input row that has no image in the output folder yet."""
    from anyaccel.generation.model_name import resolve_model
    from anyaccel.planning.options import check_speed, check_weights

    # Everything cheap is checked before workers are found, and before the folder is created.
    check_speed(job.settings.speed)
    check_weights(job.settings.weights)
    rows, digest = read_rows(job.source)
    name = _choose_model(job.settings.model, rows)
    job = replace(job, settings=replace(job.settings, model=name))
    model = resolve_model(name)
    pool, workers, slots = _create_pool(job)
    run = {
        "input": digest,
        "rows": len(rows),
        "model": model.name,
        "device": str(DeviceSpec(name=slots.name, virtual=slots.virtual)),
        "asked_dtype": job.settings.dtype,
        "speed": job.settings.speed,
        "weights": job.settings.weights,
    }
    # Locked until the end, so that a second process cannot write to the same folder.
    with OutputFolder(job.out, run) as folder:
        summary = BatchRun(folder, rows, pool, workers, listener).run()
        folder.compact()
        return summary


def _choose_model(name: str | None, rows: Sequence[BatchRow]) -> str | None:
    """Return the model name for the rows: the embedded model uses its motion module if they are videos."""
    chosen = {choose_name(name, row.call): row for row in rows}
    if len(chosen) > 1:
        image = next(row for model, row in chosen.items() if model == name)
        raise UsageError(
            f"line {image.number} is an image, and other lines are videos",
            hint="write images and videos of the embedded model to separate files, or add frames to this line",
        )
    if next(iter(chosen)) == VIDEO_NAME:
        for row in rows:
            _check_frames(row)
    return str(next(iter(chosen))) if None not in chosen else None


def _check_frames(row: BatchRow) -> None:
    try:
        fit_video_call(row.call)
    except UsageError as error:
        raise UsageError(f"line {row.number}: {error.message}", hint=error.hint) from error


def _create_pool(job: BatchJob) -> tuple[WorkerPool, Sequence[WorkerSettings], DeviceSlots]:
    return _create_local_pool(job) if job.ray is None else _create_ray_pool(job, job.ray)


def _create_local_pool(job: BatchJob) -> tuple[WorkerPool, Sequence[WorkerSettings], DeviceSlots]:
    slots = find_device_slots(job.settings.device)
    count = check_workers(slots, job.workers)
    shared = replace(job.settings, device=slots.device, threads=share_threads(count))
    # CPU workers have no device index; they share the cores.
    if slots.on_host:
        return LocalWorkerPool(), [shared] * count, slots
    indices = range(count) if slots.index is None else [slots.index]
    return LocalWorkerPool(), [replace(shared, index=index) for index in indices], slots


def _create_ray_pool(job: BatchJob, address: str) -> tuple[WorkerPool, Sequence[WorkerSettings], DeviceSlots]:
    """Create a pool of Ray workers on the cluster nodes that have the requested device.

    Ray assigns the devices. Raises UsageError if the cluster has fewer devices than requested workers.
    """
    from anyaccel.backends.device import sheet
    from anyaccel.cluster.batch.ray_worker_pool import RayWorkerPool
    from anyaccel.cluster.ray_cluster import check_slots, count_slots, join, resources_for

    if job.settings.device == AUTO:
        raise UsageError(
            "--ray requires --device with a device name, not auto",
            hint="pass the device type of the cluster, for example --device hpu",
        )
    slots = slots_from_name(job.settings.device)
    join(address)
    device_sheet = sheet(slots.name)
    count = job.workers or count_slots(device_sheet, slots.virtual)
    # At least one, so that a cluster without such devices raises an error instead of starting no worker.
    check_slots(device_sheet, slots.virtual, max(count, 1))
    settings = replace(job.settings, device=slots.device)
    workers = [replace(settings, index=_device_index(slots, number)) for number in range(count)]
    counted_by_ray = slots.virtual or bool(device_sheet.ray_resource)
    return RayWorkerPool(resources_for(device_sheet, slots.virtual), counted_by_ray), workers, slots


def _device_index(slots: DeviceSlots, number: int) -> int | None:
    """Return the index of a worker's virtual device, or None for a real device, which Ray assigns."""
    if slots.index is not None:
        return slots.index
    return number % slots.count if slots.virtual else None
