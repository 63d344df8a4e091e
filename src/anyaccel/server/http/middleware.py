"""ASGI middleware that checks each request before it reaches an endpoint, and logs every request.

It checks the API key, the Host and Origin headers, the size of the body and the time taken to
receive it. A rejected request is answered without buffering its body.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from anyaccel.server.http.errors import ApiError, make_response
from anyaccel.server.http.service import Service
from anyaccel.server.settings import hash_key, is_loopback

__all__ = ["RequestMiddleware"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_PUBLIC_PATHS = ("/", "/docs", "/docs.css", "/healthz", "/readyz", "/page.css", "/page.js")
_IMAGE_PATH = re.compile(r"/v1/jobs/(job_[0-9a-f]{32})/(?:images/([0-9]{1,4})|files/([0-9a-z_.]{1,80}))")
# Limits for reading and discarding a rejected body: many clients read the response only after they have sent it.
_DRAIN_BYTES, _DRAIN_S = 64 * 2**20, 5.0


class RequestMiddleware:
    """ASGI middleware that checks and logs each request."""

    def __init__(self, app: App, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and log a request, and pass it to the application if it is valid."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        log = _RequestLog(scope, send, self.service.settings.limits.send_s)
        scope.setdefault("state", {})["owner"] = ""
        try:
            self._check(scope)
            await self.app(scope, await self._read_body(scope, receive), log.send)
        except ApiError as error:
            await _reject(error, scope, receive, log.send)
        except _ClientStalledError:
            log.status = log.status or 499
        finally:
            self._record(scope, log)

    def _check(self, scope: Scope) -> None:
        headers = _read_headers(scope)
        settings = self.service.settings
        host = headers.get("host", "")
        # DNS rebinding: a web site can make its own host name resolve to 127.0.0.1, so check the name as well.
        if is_loopback(settings.host) and not is_loopback(_strip_port(host)):
            message = f"this service accepts only requests to localhost, not to {host[:80]!r}"
            raise ApiError(403, "wrong_host", message)
        # CSRF: browsers send Origin with cross-origin requests; other clients usually send none.
        origin = headers.get("origin")
        if origin is not None and origin.partition("//")[2] != host:
            raise ApiError(403, "wrong_origin", f"requests from the origin {origin[:80]!r} are not allowed")
        if settings.keys:
            scope["state"]["owner"] = self._find_owner(scope, headers)

    def _find_owner(self, scope: Scope, headers: dict[str, str]) -> str:
        """Return the digest of the request's API key, which identifies the client.

        Returns an empty string if the request needs no key. Raises `ApiError` if the key is missing or
        invalid.
        """
        authorization = headers.get("authorization", "")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer":
            for valid_key in self.service.settings.keys:
                # Constant time, so the response time reveals nothing about a key.
                if hmac.compare_digest(valid_key.encode(), key.strip().encode()):
                    return hash_key(valid_key)
        is_read = scope["method"] in ("GET", "HEAD")
        if is_read and (scope["path"] in _PUBLIC_PATHS or (not authorization and self._has_token(scope))):
            return ""
        message = "invalid API key" if authorization else "missing API key: send `Authorization: Bearer KEY`"
        raise ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})

    def _has_token(self, scope: Scope) -> bool:
        """Return whether the request is for a file of a job and contains a valid token for it."""
        match = _IMAGE_PATH.fullmatch(scope["path"])
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        if match is None:
            return False
        return self.service.signer.is_signed(match[1], match[3] if match[2] is None else int(match[2]), tokens[0])

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the complete request body and return a `receive` callable that replays it.

        Raises `ApiError` if the body is too large or does not arrive in time.
        """
        limits = self.service.settings.limits
        max_bytes = limits.max_body if scope["method"] == "POST" else 0
        length = _read_headers(scope).get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > max_bytes:
            raise _too_large(max_bytes)
        chunks: list[bytes] = []
        received, more = 0, True
        deadline = time.monotonic() + limits.body_s
        while more:
            try:
                # A deadline for the whole body: a timeout per chunk would not stop a client that sends byte by byte.
                message = await asyncio.wait_for(receive(), max(0.01, deadline - time.monotonic()))
            except TimeoutError as error:
                message_text = f"the request body was not complete after {limits.body_s:.0f} s"
                raise ApiError(408, "request_timeout", message_text, headers={"Connection": "close"}) from error
            if message["type"] == "http.disconnect":
                raise _ClientStalledError
            chunks.append(message.get("body", b""))
            received += len(chunks[-1])
            more = bool(message.get("more_body"))
            if received > max_bytes:  # a chunked body has no Content-Length
                raise _too_large(max_bytes)
        body = b"".join(chunks)
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    def _record(self, scope: Scope, log: _RequestLog) -> None:
        """Update the metrics and print one log line, which contains no prompts or API keys."""
        seconds = time.perf_counter() - log.started_at
        route = scope.get("route")
        # The route template, because a path with a job id would create a time series per job.
        path = getattr(route, "path", None) or ("/" if scope["path"] in _PUBLIC_PATHS else "other")
        metrics = self.service.metrics
        metrics.requests.labels(path, str(log.status)).inc()
        metrics.request_seconds.labels(path).observe(seconds)
        line = {
            "time": time.time(),
            "request": log.id,
            "method": scope["method"],
            "path": path,
            "status": log.status,
            "seconds": round(seconds, 4),
            "owner": scope["state"].get("owner") or None,
            "job": scope["state"].get("job"),
            "client": (scope.get("client") or [None])[0],
        }
        # Probes and scrapes arrive every few seconds and would flood the log.
        if path not in ("/", "/healthz", "/readyz", "/metrics"):
            print(json.dumps(line), file=sys.stderr, flush=True)


class _ClientStalledError(Exception):
    """Error raised when the client disconnects or stops reading the response."""


class _RequestLog:
    """Data for one request's log line, and a `send` wrapper that records the status and has a timeout."""

    def __init__(self, scope: Scope, send: Send, send_s: float) -> None:
        self.original_send, self.send_s, self.status = send, send_s, 0
        self.started_at = time.perf_counter()
        self.id = uuid.uuid4().hex

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self.id.encode())]}
        try:
            await asyncio.wait_for(self.original_send(message), self.send_s)
        except TimeoutError as error:
            raise _ClientStalledError from error


async def _reject(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error response.

    If the request body is too large, the rest of the body is read and discarded, because many clients
    read the response only after they have sent the entire body.
    """
    response = make_response(error)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    discarded, deadline = 0, time.monotonic() + _DRAIN_S
    try:
        while error.status == 413 and discarded < _DRAIN_BYTES and time.monotonic() < deadline:
            message = await asyncio.wait_for(receive(), max(0.01, deadline - time.monotonic()))
            discarded += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                break
    except TimeoutError:
        pass  # the client is too slow: close the connection anyway
    await send({"type": "http.response.body", "body": b""})


def _too_large(max_bytes: int) -> ApiError:
    message = f"the request body is larger than {max_bytes} bytes"
    return ApiError(413, "request_too_large", message, headers={"Connection": "close"})


def _read_headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _strip_port(host: str) -> str:
    """Return the host part of `name:port` or `[::1]:port`."""
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
