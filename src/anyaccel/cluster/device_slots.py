"""Where the workers of a batch stand: one a device, or several on the host's cores."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from anyaccel.errors import AnyaccelError, DeviceUnavailableError, UsageError
from anyaccel.processes.pipe_worker import ParentPipe, PipeWorker
from anyaccel.storage.file_lock import lock_file

__all__ = ["DeviceSlots", "check_workers", "claim_device", "find_device_slots", "share_threads", "slots_from_name"]


@dataclass(frozen=True, kw_only=True)
class DeviceSlots:
    """The devices of a name on this machine."""

    device: str
    """As workers are told."""
    name: str
    """The sheet's: `hpu`."""
    count: int
    """How many workers can have one of their own."""
    on_host: bool
    """Whether they are cores."""
    index: int | None = None
    """The one that was named."""
    virtual: bool = False


def find_device_slots(device: str) -> DeviceSlots:
    """Look at the devices here in a process that ends: some belong to the first process that looks at them."""
    from anyaccel.backends.device import read_device, sheet
    from anyaccel.backends.device_spec import AUTO

    spec = read_device(device)
    if spec.virtual:
        return slots_from_name(device)
    if spec.name != AUTO and spec.index is None and sheet(spec).is_host:
        return DeviceSlots(device=spec.name, name=spec.name, count=_count_cores(), on_host=True)
    with PipeWorker(_look, device, name="anyaccel-devices") as process:
        try:
            found: DeviceSlots | Exception = process.receive()
        except EOFError as error:
            raise AnyaccelError(
                "the devices could not be looked at: the process that did is gone", hint="does `anyaccel devices` work?"
            ) from error
    if isinstance(found, Exception):
        raise found
    return found


def _look(pipe: ParentPipe, device: str) -> None:
    try:
        pipe.send(_find_places(device))
    except Exception as error:  # noqa: BLE001 - it crosses to the process that asked, and is raised there
        pipe.send(error)


def _find_places(device: str) -> DeviceSlots:
    from anyaccel.backends.device import find_device, open_device, read_device

    spec = read_device(device)
    opened = open_device(spec)
    name = opened.sheet.name
    index = spec.index if spec.product is None else opened.index
    if opened.sheet.is_host:
        return DeviceSlots(device=name, name=name, count=_count_cores(), on_host=True)
    return DeviceSlots(
        device=name, name=name, count=1 if index is not None else find_device(name).count, on_host=False, index=index
    )


def slots_from_name(device: str) -> DeviceSlots:
    """What a device's name says by itself; whether it is there, the cluster knows."""
    from anyaccel.backends.device import read_device, sheet

    spec = read_device(device)
    if spec.virtual:
        count = spec.require_count()
        return DeviceSlots(
            device=str(spec),
            name=spec.name,
            count=count if spec.index is None else 1,
            on_host=False,
            index=spec.index,
            virtual=True,
        )
    if spec.index is not None:
        raise UsageError(f"{spec} names one device, and Ray chooses which", hint=f"--device {spec.name}")
    found = sheet(spec)
    return DeviceSlots(device=found.name, name=found.name, count=0, on_host=found.is_host)


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(places: DeviceSlots, wanted: int | None) -> int:
    """How many workers there are: as many as were asked for, else one a device."""
    if wanted is None:
        return 1 if places.on_host else places.count
    if wanted > places.count:
        raise UsageError(
            f"{wanted} workers were asked for, and there {_are(places)}",
            hint=f"take --workers {places.count} or fewer; with --ray other machines bring theirs",
        )
    return wanted


def share_threads(workers: int) -> int | None:
    """How many of the host's threads each worker has; None leaves them to it."""
    return max(1, _count_cores() // workers) if workers > 1 else None


def _are(places: DeviceSlots) -> str:
    what = "cores" if places.on_host else f"{places.name} devices"
    return f"is 1 {what[:-1]}" if places.count == 1 else f"are {places.count} {what}"


def claim_device(name: str) -> tuple[str, IO[bytes]]:
    """A device of that name that no other worker on this machine has: Ray counts such devices, and numbers none."""
    user = getattr(os, "getuid", int)()
    folder = Path(tempfile.gettempdir()) / f"anyaccel-devices-{user}"
    folder.mkdir(exist_ok=True)
    from anyaccel.backends.device import find_device

    count = find_device(name).count
    for index in range(count):
        try:
            return f"{name}:{index}", lock_file(folder / f"{name}-{index}", "taken", "take another")
        except UsageError:
            continue
    raise DeviceUnavailableError(
        f"all {count} devices of {name} on this machine are taken",
        hint=f"start the node with no more of the resource {name!r} than it has devices",
    )
