"""Device slots for workers: one worker per device, or several workers that share the CPU cores."""

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
    """Devices of one type, or CPU cores, that workers can use."""

    device: str
    """Device argument of the workers."""
    name: str
    """Name of the capability sheet: `hpu`."""
    count: int
    """Maximum number of workers."""
    on_host: bool
    """Whether the slots are CPU cores."""
    index: int | None = None
    """Index of the device, if the name included one."""
    virtual: bool = False


def find_device_slots(device: str) -> DeviceSlots:
    """Find the available devices of the given type on this machine.

    Detection usually runs in a short-lived process, because some devices can be used only by the first
    process that opens them.
    """
    from anyaccel.backends.device import read_device, sheet
    from anyaccel.backends.device_spec import AUTO

    spec = read_device(device)
    if spec.virtual:
        return slots_from_name(device)
    if spec.name != AUTO and spec.index is None and sheet(spec).is_host:
        return DeviceSlots(device=spec.name, name=spec.name, count=_count_cores(), on_host=True)
    # A driver may also crash during detection; the process then dies instead of the command.
    with PipeWorker(_run_detection, device, name="anyaccel-devices") as process:
        try:
            result: DeviceSlots | Exception = process.receive()
        except EOFError as error:
            raise AnyaccelError(
                "device detection failed: the detection process exited unexpectedly",
                hint="run `anyaccel devices` to see which driver crashes",
            ) from error
    if isinstance(result, Exception):
        raise result
    return result


def _run_detection(pipe: ParentPipe, device: str) -> None:
    try:
        pipe.send(_detect_slots(device))
    except Exception as error:  # noqa: BLE001 - sent to the parent process and raised there
        pipe.send(error)


def _detect_slots(device: str) -> DeviceSlots:
    from anyaccel.backends.device import find_device, open_device, read_device

    spec = read_device(device)
    opened = open_device(spec)
    name = opened.sheet.name
    # A product such as gaudi2 may be only one of several devices of that name, so its index counts.
    index = spec.index if spec.product is None else opened.index
    if opened.sheet.is_host:
        return DeviceSlots(device=name, name=name, count=_count_cores(), on_host=True)
    return DeviceSlots(
        device=name, name=name, count=1 if index is not None else find_device(name).count, on_host=False, index=index
    )


def slots_from_name(device: str) -> DeviceSlots:
    """Return the slots for a device name, without checking whether the cluster has such devices.

    Raises UsageError if the name of a real device includes an index, because Ray assigns the devices.
    """
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
        raise UsageError(
            f"{spec} includes a device index, but Ray assigns the device indices", hint=f"use --device {spec.name}"
        )
    device_sheet = sheet(spec)
    return DeviceSlots(device=device_sheet.name, name=device_sheet.name, count=0, on_host=device_sheet.is_host)


def _count_cores() -> int:
    # os.cpu_count() ignores the CPU affinity that containers and batch schedulers set.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(slots: DeviceSlots, requested: int | None) -> int:
    """Return the number of workers to start; raise UsageError if there are too few devices.

    The default is one worker per device, or a single worker on the CPU.
    """
    if requested is None:
        return 1 if slots.on_host else slots.count
    if requested > slots.count:
        raise UsageError(
            f"{requested} workers requested, but there {_format_count(slots)}",
            hint=f"use --workers {slots.count} or fewer, or run on a Ray cluster with --ray",
        )
    return requested


def share_threads(workers: int) -> int | None:
    """Return the number of CPU threads per worker; None, PyTorch's default, if there is only one worker."""
    return max(1, _count_cores() // workers) if workers > 1 else None


def _format_count(slots: DeviceSlots) -> str:
    unit = "cores" if slots.on_host else f"{slots.name} devices"
    return f"is only 1 {unit[:-1]}" if slots.count == 1 else f"are only {slots.count} {unit}"


def claim_device(name: str) -> tuple[str, IO[bytes]]:
    """Lock an unused device of type `name` on this machine, and return its indexed name and the lock.

    Ray counts custom resources but does not assign device indices to them, so workers on the same
    machine use file locks to choose different devices.
    """
    # One folder per user, because another user could not open the lock files. Windows has no getuid.
    user = getattr(os, "getuid", int)()
    folder = Path(tempfile.gettempdir()) / f"anyaccel-devices-{user}"
    folder.mkdir(exist_ok=True)
    from anyaccel.backends.device import find_device

    count = find_device(name).count
    for index in range(count):
        try:
            # The operating system releases the lock when the worker dies, however it dies.
            return f"{name}:{index}", lock_file(folder / f"{name}-{index}", "in use", "use a different device")
        except UsageError:
            continue
    raise DeviceUnavailableError(
        f"no {name} device on this machine is free (device count: {count})",
        hint=f"declare one Ray resource per device: ray start --resources='{{\"{name}\": {count}}}'",
    )
