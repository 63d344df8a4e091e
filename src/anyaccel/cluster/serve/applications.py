"""The service on Ray Serve: one application a kind of device, one replica a device, one address before all of them."""

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
    check_places,
    count_places,
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
_HEALTH_MISSES = 3
"""Ray Serve replaces a replica that does not answer so often in a row."""
_DRAIN_S = 20.0
"""For the pictures of a replica that is to leave; those that are not done then are made by another."""
_UPSCALE_S, _DOWNSCALE_S = 5.0, 120.0
_TARGET = 0.75
"""More replicas are asked for where each has more than this share of what it makes at once."""
_ROUTER = "anyaccel.cluster.serve.router:ShapeRouter"


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices of one kind in the cluster, and how many replicas stand on them."""

    device: str
    """As a replica is told: `auto`, `hpu`, `virtual:hpu`."""
    sheet: Sheet
    virtual: bool
    replicas: int
    """At the start; where they scale, the most."""
    scales: bool
    at_once: int
    """Pictures that one replica is given at once."""


@dataclass(frozen=True)
class DeploymentState:
    """How far the replicas of an application are."""

    running: int
    words: str
    failed: bool


def read_replicas(text: str | None) -> int | str | None:
    """`--replicas`: a number, `auto`, or None for one a device."""
    if text is None or text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{text!r:.40} is no number of replicas", hint="--replicas 2, or --replicas auto")
    return int(text)


def find_device_groups(devices: Sequence[str], replicas: int | str | None, max_batch: int) -> tuple[DeviceGroup, ...]:
    """The kinds of devices that were asked for, which the cluster must have."""
    if list(devices) == ["auto"]:
        spec = read_device(AUTO)
        devices = [str(spec)] if spec.name != AUTO else _list_counted()
    if len(set(devices)) < len(devices):
        raise UsageError("one device was named twice", hint="for more replicas of a kind give --replicas")
    return tuple(_find_kind(device, replicas, max_batch) for device in devices)


def _list_counted() -> list[str]:
    """`auto`: all devices that the cluster counts, and the CPU where there are none."""
    here = import_ray().cluster_resources()
    sheets = [sheet for backend in load_registry().backends.values() for sheet in backend.sheets]
    found: dict[str, str] = {}
    for sheet in sorted(sheets, key=lambda one: -one.preference):
        name = sheet.ray_resource or sheet.name
        if here.get(name, 0) >= 1 and not sheet.is_host:
            found.setdefault(name, sheet.name)
    host = max((sheet for sheet in sheets if sheet.is_host), key=lambda one: one.preference)
    return list(found.values()) or [host.name]


def _find_kind(device: str, replicas: int | str | None, max_batch: int) -> DeviceGroup:
    spec = read_device(device)
    sheet, virtual = find_sheet(spec), spec.virtual
    if spec.index is not None:
        hint = spec.count_hint() if virtual else f"--device {spec.name}"
        raise UsageError(f"{device} names one device, and Ray picks those that are free", hint=hint)
    places = count_places(sheet, virtual)
    on_host = virtual or sheet.is_host
    wanted = places if replicas == "auto" else replicas if isinstance(replicas, int) else 1 if on_host else places
    check_places(sheet, virtual, max(1, wanted))
    return DeviceGroup(
        device=str(spec),
        sheet=sheet,
        virtual=virtual,
        replicas=wanted,
        scales=replicas == "auto",
        at_once=max_batch if sheet.reliable_batches else 1,
    )


@dataclass
class Application:
    """What Serve runs for one kind of device."""

    name: str
    kind: DeviceGroup
    handle: Any = None

    def ask_for_facts(self, timeout_s: float) -> tuple[ModelFacts, ...] | LoadFailed:
        """What any of its replicas says of its models: all of them are alike."""
        found: tuple[ModelFacts, ...] | LoadFailed = self.handle.facts.remote().result(timeout_s=timeout_s)
        return found


class Applications:
    """All of one service; their names tell whose they are, so that a service that was killed finds its own again."""

    def __init__(self, settings: ServerSettings, kinds: Sequence[DeviceGroup]) -> None:
        self.settings = _for_others(settings)
        mark = hashlib.sha256(f"{socket.gethostname()}:{settings.data}".encode()).hexdigest()[:8]
        self._prefix = f"anyaccel-{mark}-"
        names = [self._prefix + "".join(c if c.isalnum() else "-" for c in kind.device) for kind in kinds]
        self.all = {name: Application(name, kind) for name, kind in zip(names, kinds, strict=True)}

    def deploy(self) -> None:
        """Ask Serve for the replicas, and do not wait for them."""
        serve = import_serve()
        log_errors_only("ray.serve")
        serve.start(proxy_location="Disabled")
        self.delete()
        targets = [serve.RunTarget(self._bind(app.kind), name=app.name, route_prefix=None) for app in self.all.values()]
        serve.run_many(targets, wait_for_ingress_deployment_creation=True, wait_for_applications_running=False)
        for app in self.all.values():
            app.handle = serve.get_app_handle(app.name)

    def _bind(self, kind: DeviceGroup) -> Any:
        from ray.serve.config import AutoscalingConfig

        from anyaccel.cluster.serve.replica import Replica

        number: dict[str, Any] = {"num_replicas": kind.replicas}
        if kind.scales:
            number = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=1,
                    max_replicas=kind.replicas,
                    target_ongoing_requests=_TARGET * kind.at_once,
                    upscale_delay_s=_UPSCALE_S,
                    downscale_delay_s=_DOWNSCALE_S,
                )
            }
        deployment = import_serve().deployment(
            name="replica",
            ray_actor_options={**resources_for(kind.sheet, kind.virtual), "runtime_env": environment()},
            max_ongoing_requests=kind.at_once,
            health_check_period_s=_HEALTH_PERIOD_S,
            health_check_timeout_s=max(2.0, min(_HEALTH_TIMEOUT_S, self.settings.limits.hang_s / _HEALTH_MISSES)),
            graceful_shutdown_wait_loop_s=0.2,
            graceful_shutdown_timeout_s=min(_DRAIN_S, self.settings.limits.drain_s),
            request_router_config={"request_router_class": _ROUTER},
            **number,
        )(Replica)
        counted = kind.virtual or bool(kind.sheet.ray_resource)
        return deployment.bind(replace(self.settings, device=kind.device), counted)

    def look(self) -> dict[str, DeploymentState]:
        """How far each is, by its name."""
        found = import_serve().status().applications
        return {name: _read_state(found.get(name), app.kind) for name, app in self.all.items()}

    def delete(self) -> None:
        """Take whatever is this service's out of the cluster, of an earlier life too."""
        serve = import_serve()
        for name in list(serve.status().applications):
            if name.startswith(self._prefix):
                serve.delete(name)


def _read_state(found: Any, kind: DeviceGroup) -> DeploymentState:
    deployment = None if found is None else found.deployments.get("replica")
    if deployment is None:
        return DeploymentState(0, "waiting for Ray Serve", False)
    running = int(deployment.replica_states.get("RUNNING", 0))
    failed = str(getattr(found.status, "value", found.status)) == "DEPLOY_FAILED"
    lines = deployment.message.strip().splitlines()
    words = lines[-1] if failed and lines else f"{running} of {1 if kind.scales else kind.replicas} replicas are ready"
    return DeploymentState(running, words, failed)


def _for_others(settings: ServerSettings) -> ServerSettings:
    """What replicas need: no keys, and whole paths, since they stand elsewhere."""
    return replace(
        settings,
        keys=(),
        otlp=None,
        models=tuple(_make_whole(one) for one in settings.models),
        loras=tuple(_make_whole(one) for one in settings.loras),
    )


def _make_whole(served: ServedName) -> ServedName:
    path = Path(served.model).expanduser()
    return replace(served, model=str(path.absolute())) if path.exists() else served


def import_serve() -> Any:
    """Return Ray Serve, which is imported only where it is used."""
    from ray import serve

    return serve
