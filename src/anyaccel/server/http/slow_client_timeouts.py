"""Timeouts for slow clients; uvicorn has none (https://github.com/Kludex/uvicorn/issues/157).

uvicorn's `timeout_keep_alive` applies only after a response: a connection that sends nothing, or
only part of its headers, stays open forever (https://github.com/Kludex/uvicorn/pull/1192).
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["SlowClientProtocol", "make_protocol"]

_TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class SlowClientProtocol(H11Protocol):
    """uvicorn HTTP protocol with timeouts for receiving the request headers and sending the response."""

    header_timeout_s: ClassVar[float] = 20.0
    """Seconds for the headers, from the start of the connection or the first byte of a later request."""
    send_timeout_s: ClassVar[float] = 60.0
    """Seconds within which the client must read some of the response."""
    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the header timer and the send timer for a new connection."""
        super().connection_made(transport)
        self._start_header_timer()
        self._check_progress(0)

    def _check_progress(self, previous: int) -> None:
        """Abort the connection if the client has not read any data since the last check."""
        # uvicorn pauses the response while the write buffer is full, so a stalled client leaves its size unchanged.
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent == previous:
            self.transport.abort()  # `close` would first wait for the buffer to be sent
            return
        self._send_timer = self.loop.call_later(self.send_timeout_s, self._check_progress, unsent)

    def data_received(self, data: bytes) -> None:
        """Process received data, and stop the header timer when the request headers are complete.

        The middleware limits the time for the body.
        """
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # IDLE until the headers are complete
            self._stop_header_timer()
        elif self._header_timer is None:
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the header timer and the send timer of a closed connection."""
        self._stop_header_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()
        super().connection_lost(exc)

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._send_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _send_timeout(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_TIMEOUT_RESPONSE)
            self.transport.close()


def make_protocol(header_timeout_s: float, send_timeout_s: float) -> type[SlowClientProtocol]:
    """Return a subclass of `SlowClientProtocol` with the given timeouts."""
    # uvicorn instantiates the class itself, so the timeouts must be class attributes.
    timeouts = {"header_timeout_s": header_timeout_s, "send_timeout_s": send_timeout_s}
    return type("SlowClientProtocol", (SlowClientProtocol,), timeouts)
