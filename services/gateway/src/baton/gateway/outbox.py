"""Commands on their way to one worker: bounded, in order, and an abort overtakes a start that was not sent yet."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from baton.gateway.errors import OverloadedError
from baton.wire.v1 import common_pb2, worker_pb2


class Outbox:
    """Filled by rooms, which never wait; emptied by the writer of the worker's session.

    Starts are bounded by `max_starts`. Aborts are bounded by the rooms that were started, so none is ever refused.
    """

    def __init__(self, max_starts: int) -> None:
        self._max_starts = max_starts
        self._starts: OrderedDict[int, worker_pb2.Start] = OrderedDict()
        self._aborts: OrderedDict[int, common_pb2.Failure] = OrderedDict()
        self._peers: list[str] | None = None
        self._drain = False
        self._news = asyncio.Event()

    def put_start(self, start: worker_pb2.Start) -> None:
        """Raises OverloadedError when the worker does not take its starts."""
        if len(self._starts) >= self._max_starts:
            raise OverloadedError(f"{len(self._starts)} starts wait for a worker that does not read them, the limit is {self._max_starts}: try later")
        self._starts[start.room] = start
        self._news.set()

    def put_abort(self, room: int, failure: common_pb2.Failure) -> None:
        """A start that is still here is taken back instead: the worker never hears of that room."""
        if self._starts.pop(room, None) is None:
            self._aborts[room] = failure
            self._news.set()

    def put_peers(self, addresses: list[str]) -> None:
        """Replaces a set that was not sent yet."""
        self._peers = addresses
        self._news.set()

    def put_drain(self) -> None:
        """The worker is to take no new rooms, from nobody."""
        self._drain = True
        self._news.set()

    def clear(self) -> None:
        """The session is over: nothing of this is owed to anyone."""
        self._starts.clear()
        self._aborts.clear()
        self._peers = None
        self._drain = False

    async def take(self) -> worker_pb2.Command:
        """The next command: drain and peers (a room may need one), then aborts (they free memory), then starts."""
        while True:
            if self._drain:
                self._drain = False
                return worker_pb2.Command(drain=worker_pb2.Drain())
            if self._peers is not None:
                peers, self._peers = self._peers, None
                return worker_pb2.Command(peers=worker_pb2.Peers(bootstrap_addresses=peers))
            if self._aborts:
                room, failure = self._aborts.popitem(last=False)
                return worker_pb2.Command(abort=worker_pb2.Abort(room=room, failure=failure))
            if self._starts:
                return worker_pb2.Command(start=self._starts.popitem(last=False)[1])
            self._news.clear()
            await self._news.wait()
