"""A batch from its command to its end: what is wrong is said first, then workers are found, here or on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anyaccel.backends.device_spec import AUTO, DeviceSpec
from anyaccel.cluster.batch.image_worker import WorkerSettings
from anyaccel.cluster.batch.manifest import OutputFolder
from anyaccel.cluster.batch.rows import read_rows
from anyaccel.cluster.batch.runner import BatchRun, BatchSummary
from anyaccel.cluster.batch.worker_pool import LocalWorkerPool, WorkerPool
from anyaccel.cluster.device_slots import DeviceSlots, check_workers, find_device_slots, share_threads, slots_from_name
from anyaccel.errors import UsageError
from anyaccel.progress import ProgressListener

__all__ = ["BatchJob", "run_batch"]


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What was asked for."""

    source: str
    """The file with the rows."""
    out: Path
    settings: WorkerSettings
    workers: int | None = None
    """None is one a device."""
    ray: str | None = None
    """The address of a Ray cluster; None works on this machine alone."""


def run_batch(job: BatchJob, listener: ProgressListener) -> BatchSummary:
    """Make a picture of every row that has none yet."""
    from anyaccel.generation.model_name import resolve_model
    from anyaccel.planning.options import check_speed

    rows, digest = read_rows(job.source)
    named = resolve_model(job.settings.model)
    check_speed(job.settings.speed)
    crew, workers, places = _find_crew(job)
    run = {
        "input": digest,
        "rows": len(rows),
        "model": named.name,
        "device": str(DeviceSpec(name=places.name, virtual=places.virtual)),
        "asked_dtype": job.settings.dtype,
        "speed": job.settings.speed,
    }
    with OutputFolder(job.out, run) as folder:
        summary = BatchRun(folder, rows, crew, workers, listener).run()
        folder.tidy()
        return summary


def _find_crew(job: BatchJob) -> tuple[WorkerPool, Sequence[WorkerSettings], DeviceSlots]:
    return _find_local(job) if job.ray is None else _find_on_ray(job, job.ray)


def _find_local(job: BatchJob) -> tuple[WorkerPool, Sequence[WorkerSettings], DeviceSlots]:
    places = find_device_slots(job.settings.device)
    count = check_workers(places, job.workers)
    shared = replace(job.settings, device=places.device, threads=share_threads(count))
    if places.on_host:
        return LocalWorkerPool(), [shared] * count, places
    indices = range(count) if places.index is None else [places.index]
    return LocalWorkerPool(), [replace(shared, index=index) for index in indices], places


def _find_on_ray(job: BatchJob, address: str) -> tuple[WorkerPool, Sequence[WorkerSettings], DeviceSlots]:
    """Workers wherever the cluster has such devices; which one of a machine's is Ray's to say."""
    from anyaccel.backends.device import sheet
    from anyaccel.cluster.batch.ray_worker_pool import RayWorkerPool
    from anyaccel.cluster.ray_cluster import check_places, count_places, join, resources_for

    if job.settings.device == AUTO:
        raise UsageError("a cluster's devices are not known here", hint="name the device that it has: --device hpu")
    places = slots_from_name(job.settings.device)
    join(address)
    found = sheet(places.name)
    count = job.workers or count_places(found, places.virtual)
    check_places(found, places.virtual, max(count, 1))
    settings = replace(job.settings, device=places.device)
    workers = [replace(settings, index=_index_of(places, number)) for number in range(count)]
    counted = places.virtual or bool(found.ray_resource)
    return RayWorkerPool(resources_for(found, places.virtual), counted), workers, places


def _index_of(places: DeviceSlots, number: int) -> int | None:
    """Of virtual devices each worker has its own; of real ones a worker sees the one that it was given."""
    if places.index is not None:
        return places.index
    return number % places.count if places.virtual else None
