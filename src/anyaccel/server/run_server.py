"""Running a service until it is told to end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.server.http.app import make_app
from anyaccel.server.http.service import Service
from anyaccel.server.http.slow_client_timeouts import make_protocol
from anyaccel.server.settings import ServerSettings, is_loopback
from anyaccel.server.worker.worker_process import WorkerProcess, WorkerTransport

__all__ = ["check_address", "serve"]

_LOOK_S = 0.1
_MOST_CONNECTIONS, _OTHER_FILES = 1024, 128
_LAST_S = 5
"""For the last answers, after what was under way has ended or was given up."""


def check_address(host: str, keys: tuple[str, ...], *, without_key: bool) -> None:
    """Raise if anybody on the network could use the service without a key, and nobody said that they may."""
    if not keys and not without_key and not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines, and no key is wanted of them",
            hint="give --api-key or ANYACCEL_API_KEYS, or say --no-key if everybody may use it",
        )


def serve(
    settings: ServerSettings,
    on_progress: Callable[[str], None],
    on_ready: Callable[[str], None],
    make_workplace: Callable[[ServerSettings], WorkerTransport] = WorkerProcess,
) -> None:
    """Serve until SIGTERM or Ctrl-C, and end what is under way first."""
    bound = _bind(settings)
    service = Service(settings, make_workplace)
    server = _Server(settings, service)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{bound.getsockname()[1]}"
    threading.Thread(target=_watch, args=(server, on_progress, on_ready, address), daemon=True).start()
    try:
        server.run(sockets=[bound])
    finally:
        service.close()
        bound.close()
    broken = service.dispatcher.start_state
    if broken.state == "broken":
        raise AnyaccelError(f"the service cannot start: {broken.words}", hint=broken.hint)


def _bind(settings: ServerSettings) -> socket.socket:
    """The address, taken before anything is loaded: that it is in use is said at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        bound.close()
        words = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{settings.host}:{settings.port} cannot be had: {words}", hint="give another --port, or 0 for any"
        ) from error
    return bound


def _count_connections() -> int:
    """As many as files may be open, which is raised to what the system allows."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return _MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(16, min(_MOST_CONNECTIONS, soft - _OTHER_FILES))
    return _MOST_CONNECTIONS


class _Server(uvicorn.Server):
    """uvicorn's server, which takes nothing on after it was told to end, and lets what is under way end."""

    def __init__(self, settings: ServerSettings, service: Service) -> None:
        limits = settings.limits
        config = uvicorn.Config(
            make_app(service),
            http=make_protocol(limits.body_s, limits.send_s),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_LAST_S,
            limit_concurrency=_count_connections(),
            server_header=False,
        )
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        """SIGTERM or Ctrl-C: no new work; a second Ctrl-C ends at once."""
        if self.service.draining:
            if sig == signal.SIGINT:
                os._exit(130)
            return
        self.service.draining = True
        threading.Thread(target=self._drain, args=(sig, frame), daemon=True).start()

    def _drain(self, sig: int, frame: Any) -> None:
        busy = self.service.jobs.count("queued") + self.service.jobs.count("running")
        if busy and self.service.dispatcher.start_state.state == "ready":
            print(f"ending: {busy} jobs are under way", file=sys.stderr)
            if not self.service.dispatcher.wait_idle(self.service.settings.limits.drain_s):
                print("ending: what is not done is kept for the next start", file=sys.stderr)
        self.service.ended = True
        self.service.bus.wake_all()
        self.should_exit = True


def _watch(server: _Server, on_progress: Callable[[str], None], on_ready: Callable[[str], None], address: str) -> None:
    """Tell how far the start is; a worker that cannot start ends the service."""
    told, was_ready = "", False
    while not server.should_exit:
        start = server.service.dispatcher.start_state
        if start.state == "broken":
            logging.getLogger(__name__).debug("anyaccel: broken: %s", start.words)
            server.should_exit = True
            return
        if start.state == "ready" and not was_ready:
            was_ready = True
            on_ready(address)
        elif start.words != told and start.state == "starting":
            told, was_ready = start.words, False
            on_progress(told)
        time.sleep(_LOOK_S)
