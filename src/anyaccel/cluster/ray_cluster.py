"""Functions that connect to a Ray cluster and count its devices.

Ray is an optional dependency, so it is imported only when connecting to a cluster.
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
    "check_slots",
    "count_slots",
    "environment",
    "import_ray",
    "join",
    "leave",
    "resources_for",
    "started_here",
]

_INSTALL = "pip install 'anyaccel[ray]'"
_FORWARDED_VARIABLES = ("HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "ANYACCEL_CACHE")
_CONNECT_TIMEOUT_S = 5.0
# CPU cores that Ray reserves per virtual device: two cores run eight of them, slowly.
_VIRTUAL_DEVICE_CPUS = 0.25
# Environment variables for Ray. Values that the user has set take precedence.
_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Older versions, such as 2.50, print a FutureWarning at every start unless this is set:
    # https://github.com/ray-project/ray/pull/55791
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray runs workers with niceness 15: https://github.com/ray-project/ray/pull/24928. Ours do the main work of the
    # machine, so other processes should not go first.
    "RAY_worker_niceness": "0",
}

# Ray's error text if `auto` finds no cluster. Only then may a new cluster be started.
_NO_LOCAL_CLUSTER = "Could not find any running Ray instance"
_STARTED: list[bool] = []


def join(address: str) -> None:
    """Connect to the Ray cluster at `address` (`host:port`); do nothing if already connected.

    `auto` connects to the cluster running on this machine, or starts one if there is none. `local`
    always starts a new one.
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
        _check_reachable(address)
        _connect(ray, address)


def leave() -> None:
    """Disconnect from the cluster, and shut it down if `join` started it."""
    import_ray().shutdown()
    _STARTED.clear()


def started_here() -> bool:
    """Return whether `join` started the cluster; if so, `leave` shuts it down."""
    return bool(_STARTED)


def environment() -> dict[str, Any]:
    """Return a Ray `runtime_env` with this process's Hugging Face and anyaccel environment variables."""
    return {"env_vars": {name: os.environ[name] for name in _FORWARDED_VARIABLES if name in os.environ}}


def resources_for(sheet: Sheet, virtual: bool) -> dict[str, Any]:
    """Return the resources for one worker as Ray actor options, such as `{"num_cpus": 0, "num_gpus": 1}`."""
    name, amount = _ray_resource(sheet, virtual)
    if name == "CPU":
        return {"num_cpus": amount}
    # Ray reserves one CPU per actor by default, which would limit the workers to the number of cores.
    if name == "GPU":
        return {"num_cpus": 0, "num_gpus": amount}
    return {"num_cpus": 0, "resources": {name: amount}}


def count_slots(sheet: Sheet, virtual: bool) -> int:
    """Return the number of workers that the cluster can run on a device type.

    There is one worker per real device or CPU core, or four per CPU core for virtual devices.
    """
    name, amount = _ray_resource(sheet, virtual)
    # Per node, since one worker cannot use the remainders of two machines.
    nodes = [node["Resources"] for node in import_ray().nodes() if node["Alive"]]
    return sum(int(node.get(name, 0) / amount) for node in nodes)


def check_slots(sheet: Sheet, virtual: bool, requested: int) -> None:
    """Raise UsageError if the cluster cannot run the requested number of workers on a device type."""
    available = count_slots(sheet, virtual)
    if requested <= available:
        return
    resource, _ = _ray_resource(sheet, virtual)
    device = f"virtual {sheet.name}" if virtual else sheet.name
    hint = f"declare the devices when you start a node, for example: ray start --resources='{{\"{resource}\": 8}}'"
    raise UsageError(
        f"{requested} worker{'s' * (requested != 1)} on {device} devices requested, but the cluster has resources "
        f"for only {available} (Ray resource {resource!r})",
        hint=f"request at most {available}" if available else hint,
    )


def _ray_resource(sheet: Sheet, virtual: bool) -> tuple[str, float]:
    """Return the Ray resource name for a device, and the amount that one worker needs."""
    return ("CPU", _VIRTUAL_DEVICE_CPUS) if virtual else (sheet.ray_resource or sheet.name, 1)


def import_ray() -> Any:
    """Import and return Ray; if it is not installed, raise UsageError with the install command."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed", hint=_INSTALL) from error
    return ray


def _join_running(ray: Any) -> bool:
    """Connect to a cluster that is running on this machine; return False if there is none."""
    try:
        _connect(ray, "auto")
    except ConnectionError:
        return False
    return True


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, **_INIT_OPTIONS)
    except ConnectionError as error:
        if address == "auto" and _NO_LOCAL_CLUSTER in str(error):
            raise
        raise AnyaccelError(
            f"the Ray cluster at {address} rejected the connection: {first_line(error)}",
            hint="if the cluster requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on the cluster nodes",
        ) from error
    except (RuntimeError, ValueError) as error:  # for example another version of Ray or Python
        raise AnyaccelError(
            f"cannot connect to the Ray cluster at {address}: {first_line(error)}",
            hint="use the same versions of Ray and Python on all machines",
        ) from error


def _start(ray: Any) -> None:
    try:
        ray.init(address="local", include_dashboard=False, **_INIT_OPTIONS)
    except (RuntimeError, OSError, ValueError) as error:
        raise AnyaccelError(
            f"cannot start Ray on this machine: {first_line(error)}", hint="check the Ray logs in /tmp/ray"
        ) from error
    _STARTED.append(True)


# Without these, Ray prints the output of all workers and reconfigures the root logger of the process.
_INIT_OPTIONS: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}


def _check_reachable(address: str) -> None:
    """Raise within a few seconds if no Ray cluster is reachable at an address.

    Ray itself retries for a minute and then terminates the process:
    https://github.com/ray-project/ray/issues/28372
    """
    if "://" in address:
        raise UsageError(
            f"{address} is a Ray Client address, which is not supported",
            hint="run this command on a cluster node, and pass the address printed by `ray start`, such as HOST:6379",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{address!r:.60} is not a valid Ray cluster address",
            hint="use HOST:PORT, for example 10.0.0.1:6379, or auto",
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S):
            pass
    except OSError as error:
        raise _unreachable_error(address, error.strerror or str(error)) from error
    # An insecure channel never becomes ready on a cluster with TLS.
    if os.environ.get("RAY_USE_TLS", "0") == "0":
        _check_grpc(address)


def _check_grpc(address: str) -> None:
    """Raise if the server at an address does not speak gRPC, the protocol that Ray uses."""
    import grpc  # type: ignore[import-untyped]

    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError as error:
            raise _unreachable_error(address, "a different service is listening on this port") from error


def _unreachable_error(address: str, reason: str) -> AnyaccelError:
    return AnyaccelError(
        f"cannot reach a Ray cluster at {address}: {reason}",
        hint="start one with `ray start --head`, or use --ray auto to start one on this machine",
    )
