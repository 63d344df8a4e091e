"""HTTP with a limit on patience: a connection that does not bring a whole head in time is closed."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["SlowClientProtocol", "make_protocol"]

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class SlowClientProtocol(H11Protocol):
    """uvicorn's own protocol, in which half a request does not hold a connection for ever."""

    patience_s: ClassVar[float] = 20.0
    """What the head of a request may take, from its first byte, or from the connection's beginning."""
    read_s: ClassVar[float] = 60.0
    """A client that reads nothing for so long is gone."""
    _timer: asyncio.TimerHandle | None = None
    _writes: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(transport)
        self._wait()
        self._look_at_writes(0)

    def _look_at_writes(self, before: int) -> None:
        """A client that reads nothing of what waits for it is given up; closing would wait for it."""
        waiting = self.transport.get_write_buffer_size()
        if waiting and waiting == before:
            self.transport.abort()
            return
        self._writes = self.loop.call_later(self.read_s, self._look_at_writes, waiting)

    def data_received(self, data: bytes) -> None:
        """Some of a request came: where its head is whole, the rest is the gate's to wait for."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_waiting()
        if self._writes is not None:
            self._writes.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.patience_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_TOO_SLOW)
            self.transport.close()


def make_protocol(patience_s: float, read_s: float) -> type[SlowClientProtocol]:
    """The protocol with so much patience."""
    return type("SlowClientProtocol", (SlowClientProtocol,), {"patience_s": patience_s, "read_s": read_s})
