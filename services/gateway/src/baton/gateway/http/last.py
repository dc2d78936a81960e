"""An answer that is given while its request may still be on its way, and after which the connection is closed."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: How much of what still comes is read and thrown away, and for how long: a connection that is closed on unread bytes is reset, and its client
#: may never read the answer.
_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_S = 5.0
#: A client that sends nothing for so long has stopped, or has read the answer.
_QUIET_S = 0.5


class LastAnswer(Response):
    """The whole answer goes out at once; its headers say that the connection closes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    num_bytes, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while more and num_bytes <= _DISCARD_BYTES:
                async with asyncio.timeout(_QUIET_S):
                    message = await receive()
                num_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
