"""A Ray cluster: joining one, and how many devices of a kind it has.

Ray is imported when a cluster is joined, and never before: whoever does not ask for one needs none.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyaccelError, UsageError, first_line

if TYPE_CHECKING:
    from anyaccel.backends.sheet import Sheet

__all__ = [
    "check_places",
    "count_places",
    "environment",
    "import_ray",
    "join",
    "leave",
    "resources_for",
    "started_here",
]

_INSTALL = "pip install 'anyaccel[ray]'"
_PASSED_ON = ("HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "ANYACCEL_CACHE")
_ANSWER_S = 5.0
"""How long an address may take to answer."""
_VIRTUAL_SHARE = 0.25
"""Of a core, for a device that is simulated: eight of them stand on two cores, as slow as that is."""
_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Set where Ray is told nothing else: no reports to anybody, no advice on a default of its own that will change, and
workers of a cluster that is started here that are not put behind whatever else the machine does."""

_NONE_HERE = "Could not find any running Ray instance"
"""How Ray says that `auto` has nothing to join; any other trouble is not a reason to start another cluster."""
_STARTED: list[bool] = []


def join(address: str) -> None:
    """Join a cluster: `host:port`, or `auto` for the one that this machine belongs to.

    Where there is none, `auto` starts one here, as `local` always does. A second call does nothing.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if address == "auto":
        if not _join_running(ray):
            _start(ray)
    elif address == "local":
        _start(ray)
    else:
        _check_answer(address)
        _connect(ray, address)


def leave() -> None:
    """Leave the cluster; one that `join` started ends."""
    import_ray().shutdown()
    _STARTED.clear()


def started_here() -> bool:
    """Whether the cluster ends when it is left."""
    return bool(_STARTED)


def environment() -> dict[str, Any]:
    """What workers on other machines find in their environment as it is here, as Ray's `runtime_env` has it."""
    return {"env_vars": {name: os.environ[name] for name in _PASSED_ON if name in os.environ}}


def resources_for(sheet: Sheet, virtual: bool) -> dict[str, Any]:
    """What one worker on such a device takes, as Ray's `.options(…)` has it: `{"num_cpus": 0, "num_gpus": 1}`."""
    name, share = _count_as(sheet, virtual)
    if name == "CPU":
        return {"num_cpus": share}
    if name == "GPU":
        return {"num_cpus": 0, "num_gpus": share}
    return {"num_cpus": 0, "resources": {name: share}}


def count_places(sheet: Sheet, virtual: bool) -> int:
    """How many such devices the cluster has; a core is a CPU, and has room for four virtual devices."""
    name, share = _count_as(sheet, virtual)
    nodes = [node["Resources"] for node in import_ray().nodes() if node["Alive"]]
    return sum(int(node.get(name, 0) / share) for node in nodes)


def check_places(sheet: Sheet, virtual: bool, wanted: int) -> None:
    """Raise where a cluster has fewer such devices than workers are wanted."""
    found = count_places(sheet, virtual)
    if wanted <= found:
        return
    name, _ = _count_as(sheet, virtual)
    kind = f"virtual {sheet.name}" if virtual else sheet.name
    raise UsageError(
        f"{wanted} workers on {kind} were asked for, and the cluster has room for {found}: Ray counts them as {name}",
        hint=f"ask for {found} or fewer" if found else f"a node may tell: ray start --resources='{{\"{name}\": 8}}'",
    )


def _count_as(sheet: Sheet, virtual: bool) -> tuple[str, float]:
    """The name under which Ray counts a device, and how much of that one worker takes."""
    return ("CPU", _VIRTUAL_SHARE) if virtual else (sheet.ray_resource or sheet.name, 1)


def import_ray() -> Any:
    """Ray, or words on how to get it."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("many machines need Ray, which is not installed", hint=_INSTALL) from error
    return ray


def _join_running(ray: Any) -> bool:
    """Join the cluster that this machine belongs to; whether there is one."""
    try:
        _connect(ray, "auto")
    except ConnectionError:
        return False
    return True


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, **_WAYS)
    except ConnectionError as error:
        if address == "auto" and _NONE_HERE in str(error):
            raise
        raise AnyaccelError(
            f"the Ray cluster at {address} lets nobody in: {first_line(error)}",
            hint="where it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on its own machines",
        ) from error
    except (RuntimeError, ValueError) as error:  # another version of Ray or Python, say
        raise AnyaccelError(
            f"the Ray cluster at {address} cannot be joined: {first_line(error)}",
            hint="its machines need the same versions of Ray and of Python as this one",
        ) from error


def _start(ray: Any) -> None:
    try:
        ray.init(address="local", include_dashboard=False, **_WAYS)
    except (RuntimeError, OSError, ValueError) as error:
        raise AnyaccelError(
            f"Ray cannot start on this machine: {first_line(error)}", hint="its own logs are under /tmp/ray"
        ) from error
    _STARTED.append(True)


_WAYS: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}


def _check_answer(address: str) -> None:
    """Raise soon where nobody listens, or something else than Ray: Ray itself would try for minutes, and then abort."""
    if "://" in address:
        raise UsageError(
            f"{address} is an address of Ray's client, and work is given to the cluster itself",
            hint="run this on a machine of the cluster, with the address that `ray start` told: HOST:6379",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{address!r:.60} is no address of a Ray cluster", hint="HOST:PORT, such as 10.0.0.1:6379, or auto"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            pass
    except OSError as error:
        raise _no_answer(address, error.strerror or str(error)) from error
    if os.environ.get("RAY_USE_TLS", "0") == "0":
        _check_speech(address)


def _check_speech(address: str) -> None:
    """Raise where whoever listens does not speak Ray's protocol."""
    import grpc  # type: ignore[import-untyped]

    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_ANSWER_S)
        except grpc.FutureTimeoutError as error:
            raise _no_answer(address, "something else listens there") from error


def _no_answer(address: str, words: str) -> AnyaccelError:
    return AnyaccelError(
        f"no Ray cluster answers at {address}: {words}",
        hint="start one with `ray start --head`, or give --ray auto for one on this machine",
    )
