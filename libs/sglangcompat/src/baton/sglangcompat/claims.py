"""Prefill's half of a pair: its request says nothing of decode, so the decode server that publishes the room is the one that may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from baton.engine.types import Failure
from baton.wire.v1 import worker_pb2
from baton.workerkit import RefusedError


class Publications(Protocol):
    """What decode servers published, and no request has come for yet; the exporter."""

    def publisher(self, room: int) -> str: ...

    def on_unclaimed(self, tell: Callable[[int, str], None]) -> None: ...

    def refuse(self, room: int, failure: Failure) -> None: ...


class Claims:
    """Requests that wait for their room to be published. Used on the event loop, where publications come in too.

    timeout_s: how long one may wait. capacity: how many may.
    """

    is_prefill = True

    def __init__(self, publications: Publications, *, timeout_s: float, capacity: int) -> None:
        self._publications = publications
        self._timeout_s = timeout_s
        self._capacity = capacity
        self._waiting: dict[int, asyncio.Future[str]] = {}
        publications.on_unclaimed(self._published)

    async def join(self, start: worker_pb2.Start, pairing: Any) -> None:
        start.prefill.decode_instance_id = self._publications.publisher(start.room) or await self._wait(start.room)

    def forsake(self, room: int, failure: Failure) -> None:
        waiting = self._waiting.pop(room, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(RefusedError(failure.code, failure.cause, failure.message))
        self._publications.refuse(room, failure)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def _wait(self, room: int) -> str:
        if len(self._waiting) >= self._capacity:
            text = f"{len(self._waiting)} requests await their decode server, the limit is {self._capacity} (--max-rooms): send fewer at once"
            raise RefusedError("RESOURCE_EXHAUSTED", "too_many_rooms", text)
        waiting = self._waiting[room] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(waiting, self._timeout_s)
        except TimeoutError:
            text = f"no decode server published room {room} within {self._timeout_s:g} s (--sglang-timeout-s): was the request sent to one as well?"
            raise RefusedError("DEADLINE_EXCEEDED", "bootstrap_timeout", text) from None
        finally:
            self._waiting.pop(room, None)

    def _published(self, room: int, decode_instance_id: str) -> None:
        waiting = self._waiting.get(room)
        if waiting is not None and not waiting.done():
            waiting.set_result(decode_instance_id)
