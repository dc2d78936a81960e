"""What one HTTP connection may take of this process: heads of bounded size and time, answers that are read, and not too many connections."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.gateway.http.errors import dump
from baton.servicekit import get_logger

log = get_logger(__name__)

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


#: Where the scope of a request has bytes that may be sent anywhere between the parts of its streamed answer, and mean nothing there.
IDLE_BYTES = "baton.idle_bytes"

#: How soon, and then how often, a client that has closed its direction is looked after.
_FIRST_LOOK_S = 0.02
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """unread_timeout_s: how long an answer's bytes may wait for a client that takes none. counters: what was ended, by reason."""

    max_connections: int = 8192
    max_head_bytes: int = 32 * 1024
    head_timeout_s: float = 20.0
    unread_timeout_s: float = 60.0
    counters: Counter[str] = field(default_factory=Counter)


def limited(limits: HttpLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol under these limits: it has none of its own for any of them."""

    class Limited(_LimitedProtocol):
        _limits = limits

    return Limited


class _LimitedProtocol(HttpToolsProtocol):
    _limits: HttpLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._left_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._half_closed = False

    # --- a connection ----------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._limits.max_connections
        if len(self.connections) > limit:
            text = f"{len(self.connections) - 1} connections are open, the limit is {limit} (--http-max-connections): try again later"
            self._refuse(503, "connections", text, b"retry-after: 1\r\n")
            return
        self._arm_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_head()
        if self._left_timer is not None:
            self._left_timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent its whole request may close its direction and read on: True. One that has gone looks the same until bytes come for
        it: its host answers those with a reset. TLS and HTTP/1.0 have neither, and there whoever closes has left.
        """
        cycle = self.cycle
        waits = cycle is not None and not cycle.more_body and not cycle.response_complete
        if self._refused or not waits or self.scheme == "https" or self.parser.get_http_version() != "1.1":
            return False
        if not self._half_closed:
            self._half_closed = True
            self._send_what_says_nothing()
            self._look_whether_it_left(_FIRST_LOOK_S)
        return True

    def _send_what_says_nothing(self) -> None:
        """Before an answer an interim one, which may always come (RFC 9110, 15.2); within one what it has for that. Others are short and end soon."""
        cycle = self.cycle
        idle: Any = cycle.scope.get(IDLE_BYTES, b"")
        if self.pipeline:
            return  # the answer under way is another's
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.chunked_encoding and idle:
            self.transport.write(b"%x\r\n%b\r\n" % (len(idle), idle))

    def _look_whether_it_left(self, after_s: float) -> None:
        """Nothing is read any more, so that nobody would tell of the reset before the next write."""
        self._left_timer = self.loop.call_later(after_s, self._look, after_s)

    def _look(self, waited_s: float) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._look_whether_it_left(min(2 * waited_s, _LOOK_S))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()  # no request follows

    def send_400_response(self, msg: str) -> None:
        """uvicorn's own is not JSON. msg: nothing but that it is invalid; the parser knows more."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # what is written now would be taken for a part of the answer under way
            return
        self._refuse(400, "malformed_http", f"this is not HTTP/1.1: {sys.exception() or msg}")

    # --- heads of requests -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.max_head_bytes:
                self._too_large()
            elif self._head_timer is None:
                self._arm_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm_head()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._limits.max_head_bytes:
            self._too_large()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _too_large(self) -> None:
        text = f"the request's line and headers have more than {self._limits.max_head_bytes} bytes, the limit (--http-max-head-bytes): shorten them"
        self._refuse(431, "head_too_large", text)

    def _arm_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_late)

    def _disarm_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        limit_s = self._limits.head_timeout_s
        if self._in_head:
            self._refuse(408, "head_late", f"the request's headers were not complete within {limit_s:g} s (--http-head-timeout-s)")
        else:
            self._limits.counters["connection_unused"] += 1
            self.transport.abort()

    def _refuse(self, status: int, cause: str, text: str, headers: bytes = b"") -> None:
        """Says why, and closes: what else comes on this connection is not looked at."""
        self._refused = True
        self._disarm_head()
        self._limits.counters[cause] += 1
        log.info("connection refused", cause=cause, reason=text, peer=self.client)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = dump({"error": {"message": text, "type": kind, "param": None, "code": cause}})
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n" % (status, _REASONS[status])
        self.transport.write(head + headers + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    # --- answers ---------------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self._limits.unread_timeout_s, self._unread)

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def _unread(self) -> None:
        """Whatever waits in its buffer is given up; the answer's handler sees a client that has gone."""
        self._unread_timer = None
        self._limits.counters["unread"] += 1
        log.info("connection ended: its client reads nothing", peer=self.client, unread_s=self._limits.unread_timeout_s)
        self.transport.abort()
