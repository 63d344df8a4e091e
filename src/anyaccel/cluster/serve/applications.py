"""Ray Serve applications: one per device type, with one replica per device."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyaccel.backends.device import read_device
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.device_spec import AUTO
from anyaccel.backends.registry import load_registry
from anyaccel.backends.sheet import Sheet
from anyaccel.cluster.ray_cluster import (
    check_slots,
    count_slots,
    environment,
    import_ray,
    resources_for,
)
from anyaccel.errors import UsageError
from anyaccel.library_logging import log_errors_only
from anyaccel.server.settings import ServedName, ServerSettings
from anyaccel.server.worker.messages import LoadFailed, ModelFacts

__all__ = [
    "Application",
    "Applications",
    "DeploymentState",
    "DeviceGroup",
    "find_device_groups",
    "import_serve",
    "read_replicas",
]

_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 30.0
# Consecutive failed health checks after which Ray Serve replaces a replica.
_HEALTH_MISSES = 3
# Time for a stopping replica to finish its images; another replica repeats the unfinished ones.
_DRAIN_S = 20.0
_UPSCALE_S, _DOWNSCALE_S = 5.0, 120.0
# Autoscaling target: ongoing images per replica, as a fraction of its maximum.
_TARGET_UTILIZATION = 0.75
_ROUTER = "anyaccel.cluster.serve.router:ShapeRouter"


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices of the same type in a Ray cluster, and the options for the replicas that run on them."""

    device: str
    """Device argument of a replica: `auto`, `hpu`, `virtual:hpu`."""
    sheet: Sheet
    virtual: bool
    replicas: int
    """Number of replicas, or the maximum if they scale."""
    scales: bool
    """Whether Serve adjusts the number of replicas to the load."""
    max_concurrent: int
    """Maximum number of concurrent images per replica."""


@dataclass(frozen=True)
class DeploymentState:
    """Deployment state of a Ray Serve application: running replicas, a message, and whether it failed."""

    running: int
    """Number of running replicas."""
    message: str
    failed: bool


def read_replicas(text: str | None) -> int | str | None:
    """Parse `--replicas`: an integer, `auto`, or None for one replica per device."""
    if text is None or text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UsageError(
            f"{text!r:.40} is not a valid number of replicas",
            hint="use a positive integer or auto, for example --replicas 2",
        )
    return int(text)


def find_device_groups(devices: Sequence[str], replicas: int | str | None, max_batch: int) -> tuple[DeviceGroup, ...]:
    """Return one device group per requested device type; raise if the cluster has too few devices."""
    if list(devices) == ["auto"]:
        spec = read_device(AUTO)
        devices = [str(spec)] if spec.name != AUTO else _list_cluster_devices()
    if len(set(devices)) < len(devices):
        duplicate = next(device for device in devices if list(devices).count(device) > 1)
        raise UsageError(
            f"--device {duplicate} is given more than once", hint="use --replicas to run several replicas on a device"
        )
    return tuple(_make_group(device, replicas, max_batch) for device in devices)


def _list_cluster_devices() -> list[str]:
    """Return the device names for `--device auto`: all accelerators in the cluster, or else the CPU."""
    resources = import_ray().cluster_resources()
    sheets = [sheet for backend in load_registry().backends.values() for sheet in backend.sheets]
    devices: dict[str, str] = {}
    for sheet in sorted(sheets, key=lambda item: -item.preference):
        name = sheet.ray_resource or sheet.name
        # Several sheets may share a resource, such as CUDA and ROCm with GPU; the preferred one comes first.
        if resources.get(name, 0) >= 1 and not sheet.is_host:
            devices.setdefault(name, sheet.name)
    cpu = max((sheet for sheet in sheets if sheet.is_host), key=lambda item: item.preference)
    return list(devices.values()) or [cpu.name]


def _make_group(device: str, replicas: int | str | None, max_batch: int) -> DeviceGroup:
    spec = read_device(device)
    sheet, virtual = find_sheet(spec), spec.virtual
    if spec.index is not None:
        hint = spec.count_hint() if virtual else f"use --device {spec.name}"
        raise UsageError(f"{device} includes a device index, but Ray assigns the device indices", hint=hint)
    slots = count_slots(sheet, virtual)
    on_host = virtual or sheet.is_host
    # By default one replica per device, but only one on the CPU: its replicas would share the cores.
    requested = slots if replicas == "auto" else replicas if isinstance(replicas, int) else 1 if on_host else slots
    check_slots(sheet, virtual, max(1, requested))
    return DeviceGroup(
        device=str(spec),
        sheet=sheet,
        virtual=virtual,
        replicas=requested,
        scales=replicas == "auto",
        max_concurrent=max_batch if sheet.reliable_batches else 1,
    )


@dataclass
class Application:
    """Ray Serve application that runs the replicas for one device type."""

    name: str
    group: DeviceGroup
    handle: Any = None

    def request_facts(self, timeout_s: float) -> tuple[ModelFacts, ...] | LoadFailed:
        """Return the properties of the served models, or the load error, as reported by one replica.

        All replicas of an application serve the same models.
        """
        facts: tuple[ModelFacts, ...] | LoadFailed = self.handle.facts.remote().result(timeout_s=timeout_s)
        return facts


class Applications:
    """All Ray Serve applications of one `anyaccel serve` process.

    Their names contain a digest of the host name and data folder, so a new process can find and delete
    the applications that a killed process left behind.
    """

    def __init__(self, settings: ServerSettings, groups: Sequence[DeviceGroup]) -> None:
        self.settings = _make_replica_settings(settings)
        digest = hashlib.sha256(f"{socket.gethostname()}:{settings.data}".encode()).hexdigest()[:8]
        self._prefix = f"anyaccel-{digest}-"
        names = [self._prefix + "".join(c if c.isalnum() else "-" for c in group.device) for group in groups]
        self.all = {name: Application(name, group) for name, group in zip(names, groups, strict=True)}

    def deploy(self) -> None:
        """Deploy the applications without waiting for their replicas to start."""
        serve = import_serve()
        log_errors_only("ray.serve")
        # Clients talk to our own HTTP server, so Serve needs no proxy.
        serve.start(proxy_location="Disabled")
        # Applications of a killed process still hold the devices that the new ones need.
        self.delete()
        targets = [
            serve.RunTarget(self._bind(app.group), name=app.name, route_prefix=None) for app in self.all.values()
        ]
        serve.run_many(targets, wait_for_ingress_deployment_creation=True, wait_for_applications_running=False)
        for app in self.all.values():
            app.handle = serve.get_app_handle(app.name)

    def _bind(self, group: DeviceGroup) -> Any:
        from ray.serve.config import AutoscalingConfig

        from anyaccel.cluster.serve.replica import Replica

        scaling: dict[str, Any] = {"num_replicas": group.replicas}
        if group.scales:
            scaling = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=1,
                    max_replicas=group.replicas,
                    target_ongoing_requests=_TARGET_UTILIZATION * group.max_concurrent,
                    upscale_delay_s=_UPSCALE_S,
                    downscale_delay_s=_DOWNSCALE_S,
                )
            }
        deployment = import_serve().deployment(
            name="replica",
            ray_actor_options={**resources_for(group.sheet, group.virtual), "runtime_env": environment()},
            max_ongoing_requests=group.max_concurrent,
            health_check_period_s=_HEALTH_PERIOD_S,
            health_check_timeout_s=max(2.0, min(_HEALTH_TIMEOUT_S, self.settings.limits.hang_s / _HEALTH_MISSES)),
            graceful_shutdown_wait_loop_s=0.2,
            graceful_shutdown_timeout_s=min(_DRAIN_S, self.settings.limits.drain_s),
            request_router_config={"request_router_class": _ROUTER},
            **scaling,
        )(Replica)
        counted_by_ray = group.virtual or bool(group.sheet.ray_resource)
        return deployment.bind(replace(self.settings, device=group.device), counted_by_ray)

    def read_states(self) -> dict[str, DeploymentState]:
        """Return the deployment state of each application, keyed by application name."""
        statuses = import_serve().status().applications
        return {name: _read_state(statuses.get(name), app.group) for name, app in self.all.items()}

    def delete(self) -> None:
        """Delete the service's applications, including those left by an earlier process."""
        serve = import_serve()
        for name in list(serve.status().applications):
            if name.startswith(self._prefix):
                serve.delete(name)


def _read_state(status: Any, group: DeviceGroup) -> DeploymentState:
    deployment = None if status is None else status.deployments.get("replica")
    if deployment is None:
        return DeploymentState(0, "waiting for Ray Serve", False)
    running = int(deployment.replica_states.get("RUNNING", 0))
    failed = str(getattr(status.status, "value", status.status)) == "DEPLOY_FAILED"
    lines = deployment.message.strip().splitlines()
    # With autoscaling, Serve starts with one replica.
    expected = 1 if group.scales else group.replicas
    message = lines[-1] if failed and lines else f"{running} of {expected} replicas are ready"
    return DeploymentState(running, message, failed)


def _make_replica_settings(settings: ServerSettings) -> ServerSettings:
    """Return the settings for replicas, without API keys or an OTLP endpoint and with absolute paths.

    The paths must be absolute because replicas run in a different working directory.
    """
    return replace(
        settings,
        keys=(),
        otlp=None,
        models=tuple(_make_absolute(served) for served in settings.models),
        loras=tuple(_make_absolute(served) for served in settings.loras),
    )


def _make_absolute(served: ServedName) -> ServedName:
    path = Path(served.model).expanduser()
    return replace(served, model=str(path.absolute())) if path.exists() else served


def import_serve() -> Any:
    """Import and return `ray.serve`; Ray is an optional dependency and must be installed."""
    from ray import serve

    return serve
