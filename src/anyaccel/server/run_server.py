"""Entry point that runs the service with uvicorn, and shuts it down gracefully on SIGTERM or Ctrl-C."""

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
from anyaccel.server.worker.transport import WorkerProcess, WorkerTransport

__all__ = ["check_address", "serve"]

_POLL_S = 0.1
# The service also needs file descriptors for the database, images, the worker's pipe and libraries.
_MAX_CONNECTIONS, _OTHER_FILES = 1024, 128
# Seconds to send the last responses after the drain has ended.
_LAST_RESPONSES_S = 5


def check_address(host: str, keys: tuple[str, ...], *, without_key: bool) -> None:
    """Raise `UsageError` if other machines can reach `host` and no API key is configured.

    `without_key=True` allows access without a key.
    """
    if not keys and not without_key and not is_loopback(host):
        raise UsageError(
            f"{host} is reachable from other machines, but no API key is set",
            hint="pass --api-key KEY or set ANYACCEL_API_KEYS, or pass --no-key to allow access without a key",
        )


def serve(
    settings: ServerSettings,
    on_progress: Callable[[str], None],
    on_ready: Callable[[str], None],
    make_transport: Callable[[ServerSettings], WorkerTransport] = WorkerProcess,
) -> None:
    """Run the service until SIGTERM or Ctrl-C; give accepted jobs time to finish before returning.

    `on_progress` receives startup messages, and `on_ready` receives the service's URL. Raises
    `AnyaccelError` if the worker cannot start.
    """
    bound = _bind(settings)
    service = Service(settings, make_transport)
    server = _Server(settings, service)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{bound.getsockname()[1]}"
    # In a thread, because `server.run` blocks the main thread, where uvicorn must install its signal handlers.
    threading.Thread(target=_report_start, args=(server, on_progress, on_ready, address), daemon=True).start()
    try:
        server.run(sockets=[bound])
    finally:
        service.close()
        bound.close()
    start = service.dispatcher.start_state
    if start.state == "broken":
        raise AnyaccelError(f"the service cannot start: {start.message}", hint=start.hint)


def _bind(settings: ServerSettings) -> socket.socket:
    """Return a socket that is bound to the configured address.

    The service binds it before the models load, so that startup fails immediately if the address is in
    use.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    # Allows a restart while connections of the previous process are in TIME_WAIT.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot listen on {settings.host}:{settings.port}: {reason}",
            hint="pass a different port with --port, or --port 0 for any free port",
        ) from error
    return bound


def _count_connections() -> int:
    """Return the maximum number of client connections.

    If necessary, the process's open-file limit is increased first, as far as the system permits.
    """
    try:
        import resource
    except ImportError:  # Windows
        return _MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _MAX_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(16, min(_MAX_CONNECTIONS, soft - _OTHER_FILES))
    return _MAX_CONNECTIONS


class _Server(uvicorn.Server):
    """Uvicorn server with a graceful shutdown that rejects new jobs and waits for the accepted ones."""

    def __init__(self, settings: ServerSettings, service: Service) -> None:
        limits = settings.limits
        config = uvicorn.Config(
            make_app(service),
            http=make_protocol(limits.body_s, limits.send_s),
            ws="none",
            # The middleware writes the request log; uvicorn's own would contain tokens in query strings.
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_LAST_RESPONSES_S,
            limit_concurrency=_count_connections(),
            server_header=False,
        )
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Start the shutdown on SIGTERM or Ctrl-C; exit immediately on a second Ctrl-C."""
        if self.service.draining:
            if sig == signal.SIGINT:
                os._exit(130)
            return
        self.service.draining = True
        # In a thread, because a signal handler runs in the main thread and would block the event loop.
        threading.Thread(target=self._drain, args=(sig, frame), daemon=True).start()

    def _drain(self, sig: int, frame: Any) -> None:
        busy = self.service.jobs.count("queued") + self.service.jobs.count("running")
        # Without a ready worker, jobs make no progress and there is nothing to wait for.
        if busy and self.service.dispatcher.start_state.state == "ready":
            print(f"shutting down: waiting for {busy} job{'s' * (busy != 1)}", file=sys.stderr)
            if not self.service.dispatcher.wait_idle(self.service.settings.limits.drain_s):
                print("shutting down: unfinished jobs will continue after a restart", file=sys.stderr)
        self.service.ended = True
        self.service.bus.wake_all()  # waiting requests return an error now instead of blocking the shutdown
        self.should_exit = True


def _report_start(
    server: _Server, on_progress: Callable[[str], None], on_ready: Callable[[str], None], address: str
) -> None:
    """Report the startup progress and readiness; stop the server if the worker cannot start."""
    reported, was_ready = "", False
    while not server.should_exit:
        start = server.service.dispatcher.start_state
        if start.state == "broken":
            logging.getLogger(__name__).debug("anyaccel: the worker cannot start: %s", start.message)
            server.should_exit = True
            return
        if start.state == "ready" and not was_ready:
            was_ready = True
            on_ready(address)
        elif start.message != reported and start.state == "starting":
            reported, was_ready = start.message, False  # the worker restarts: report when it is ready again
            on_progress(reported)
        time.sleep(_POLL_S)
