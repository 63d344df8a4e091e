"""A batch from its command to its end: what is wrong is said first, then workers are found, here or on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anyaccel.backends.device_spec import AUTO, DeviceSpec
from anyaccel.cluster.batch.image_worker import Settings
from anyaccel.cluster.batch.manifest import Folder
from anyaccel.cluster.batch.rows import read_rows
from anyaccel.cluster.batch.runner import Batch, Summary
from anyaccel.cluster.batch.worker_pool import Crew, LocalCrew
from anyaccel.cluster.device_slots import Places, check_workers, find_named, find_places, share_threads
from anyaccel.errors import UsageError
from anyaccel.progress import ProgressListener

__all__ = ["Job", "run_job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was asked for."""

    source: str
    """The file with the rows."""
    out: Path
    settings: Settings
    workers: int | None = None
    """None is one a device."""
    ray: str | None = None
    """The address of a Ray cluster; None works on this machine alone."""


def run_job(job: Job, listener: ProgressListener) -> Summary:
    """Make a picture of every row that has none yet."""
    from anyaccel.generation.model_name import name_model
    from anyaccel.planning.options import check_speed

    rows, digest = read_rows(job.source)
    named = name_model(job.settings.model)
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
    with Folder(job.out, run) as folder:
        summary = Batch(folder, rows, crew, workers, listener).run()
        folder.tidy()
        return summary


def _find_crew(job: Job) -> tuple[Crew, Sequence[Settings], Places]:
    return _find_local(job) if job.ray is None else _find_on_ray(job, job.ray)


def _find_local(job: Job) -> tuple[Crew, Sequence[Settings], Places]:
    places = find_places(job.settings.device)
    count = check_workers(places, job.workers)
    shared = replace(job.settings, device=places.device, threads=share_threads(count))
    if places.on_host:
        return LocalCrew(), [shared] * count, places
    indices = range(count) if places.index is None else [places.index]
    return LocalCrew(), [replace(shared, index=index) for index in indices], places


def _find_on_ray(job: Job, address: str) -> tuple[Crew, Sequence[Settings], Places]:
    """Workers wherever the cluster has such devices; which one of a machine's is Ray's to say."""
    from anyaccel.backends.device import sheet
    from anyaccel.cluster.batch.ray_worker_pool import RayCrew
    from anyaccel.cluster.ray_cluster import check_places, count_places, join, resources_for

    if job.settings.device == AUTO:
        raise UsageError("a cluster's devices are not known here", hint="name the device that it has: --device hpu")
    places = find_named(job.settings.device)
    join(address)
    found = sheet(places.name)
    count = job.workers or count_places(found, places.virtual)
    check_places(found, places.virtual, max(count, 1))
    settings = replace(job.settings, device=places.device)
    workers = [replace(settings, index=_index_of(places, number)) for number in range(count)]
    counted = places.virtual or bool(found.ray_resource)
    return RayCrew(resources_for(found, places.virtual), counted), workers, places


def _index_of(places: Places, number: int) -> int | None:
    """Of virtual devices each worker has its own; of real ones a worker sees the one that it was given."""
    if places.index is not None:
        return places.index
    return number % places.count if places.virtual else None
