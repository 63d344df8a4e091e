"""The gate: what every request passes before any endpoint sees it, and what is noted of each.

A key, an address that is this service's own, a body of a size and within a time: what does not pass is answered at
once, and nothing of it is held.
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

from anyaccel.server.http.errors import ApiError, make_answer
from anyaccel.server.http.service import Service
from anyaccel.server.settings import is_loopback, name_owner

__all__ = ["RequestMiddleware"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/healthz", "/readyz", "/page.css", "/page.js")
_PICTURE = re.compile(r"/v1/jobs/(job_[0-9a-f]{32})/images/([0-9]{1,4})")
_DRAIN_BYTES, _DRAIN_S = 64 * 2**20, 5.0
"""What of a refused body is read and dropped, so that the client gets to read why."""


class RequestMiddleware:
    """Stands before the app."""

    def __init__(self, app: App, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        note = _RequestLog(scope, send, self.service.settings.limits.send_s)
        scope.setdefault("state", {})["owner"] = ""
        try:
            self._check(scope)
            await self.app(scope, await self._read_body(scope, receive), note.send)
        except ApiError as error:
            await _refuse(error, scope, receive, note.send)
        except _TooSlowError:
            note.status = note.status or 499
        finally:
            self._note(scope, note)

    def _check(self, scope: Scope) -> None:
        headers = _read_headers(scope)
        settings = self.service.settings
        host = headers.get("host", "")
        if is_loopback(settings.host) and not is_loopback(_name_of(host)):
            raise ApiError(403, "wrong_host", "this service answers to localhost alone")
        origin = headers.get("origin")
        if origin is not None and origin.partition("//")[2] != host:
            raise ApiError(403, "wrong_origin", "another site's page asks")
        if settings.keys:
            scope["state"]["owner"] = self._find_owner(scope, headers)

    def _find_owner(self, scope: Scope, headers: dict[str, str]) -> str:
        given = headers.get("authorization", "")
        kind, _, key = given.partition(" ")
        if kind.lower() == "bearer":
            for known in self.service.settings.keys:
                if hmac.compare_digest(known.encode(), key.strip().encode()):
                    return name_owner(known)
        reads = scope["method"] in ("GET", "HEAD")
        if reads and (scope["path"] in _OPEN or (not given and self._has_token(scope))):
            return ""
        words = "the key is wrong" if given else "a key is wanted: Authorization: Bearer KEY"
        raise ApiError(401, "invalid_api_key", words, headers={"WWW-Authenticate": "Bearer"})

    def _has_token(self, scope: Scope) -> bool:
        """Whether the address of a picture carries the word that goes with it."""
        found = _PICTURE.fullmatch(scope["path"])
        words = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        return found is not None and self.service.signer.is_signed(found[1], int(found[2]), words[0])

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """The whole body, read before anything is done with it."""
        limits = self.service.settings.limits
        most = limits.max_body if scope["method"] == "POST" else 0
        length = _read_headers(scope).get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > most:
            raise _too_large(most)
        parts: list[bytes] = []
        held, more = 0, True
        end = time.monotonic() + limits.body_s
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.01, end - time.monotonic()))
            except TimeoutError as error:
                words = f"the request was not whole after {limits.body_s:.0f} s"
                raise ApiError(408, "request_timeout", words, headers={"Connection": "close"}) from error
            if message["type"] == "http.disconnect":
                raise _TooSlowError
            parts.append(message.get("body", b""))
            held += len(parts[-1])
            more = bool(message.get("more_body"))
            if held > most:
                raise _too_large(most)
        body = b"".join(parts)
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    def _note(self, scope: Scope, note: _RequestLog) -> None:
        """One line a request; what was asked for is nobody's business."""
        seconds = time.perf_counter() - note.begun
        route = scope.get("route")
        path = getattr(route, "path", None) or ("/" if scope["path"] in _OPEN else "other")
        metrics = self.service.metrics
        metrics.requests.labels(path, str(note.status)).inc()
        metrics.request_seconds.labels(path).observe(seconds)
        told = {
            "time": time.time(),
            "request": note.id,
            "method": scope["method"],
            "path": path,
            "status": note.status,
            "seconds": round(seconds, 4),
            "owner": scope["state"].get("owner") or None,
            "job": scope["state"].get("job"),
            "client": (scope.get("client") or [None])[0],
        }
        if path not in ("/", "/healthz", "/readyz", "/metrics"):
            print(json.dumps(told), file=sys.stderr, flush=True)


class _TooSlowError(Exception):
    """The client went away, or does not read."""


class _RequestLog:
    """What is told of a request, and a `send` that does not wait for ever."""

    def __init__(self, scope: Scope, send: Send, send_s: float) -> None:
        self.plain, self.send_s, self.status = send, send_s, 0
        self.begun = time.perf_counter()
        self.id = uuid.uuid4().hex

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self.id.encode())]}
        try:
            await asyncio.wait_for(self.plain(message), self.send_s)
        except TimeoutError as error:
            raise _TooSlowError from error


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once; of a body that is still coming, drop some, so that the client reads the answer."""
    answer = make_answer(error)
    await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    dropped, end = 0, time.monotonic() + _DRAIN_S
    try:
        while error.status == 413 and dropped < _DRAIN_BYTES and time.monotonic() < end:
            message = await asyncio.wait_for(receive(), max(0.01, end - time.monotonic()))
            dropped += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                break
    except TimeoutError:
        pass  # it had its time
    await send({"type": "http.response.body", "body": b""})


def _too_large(most: int) -> ApiError:
    return ApiError(413, "request_too_large", f"a request has at most {most} bytes", headers={"Connection": "close"})


def _read_headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _name_of(host: str) -> str:
    """The name in `name:port`, and in `[::1]:port`."""
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
