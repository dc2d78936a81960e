"""The feed: the view whole, then what changes, at most four times a second however much that is. One encoding for all who watch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from baton.gateway.console.history import NUM_FAILED_KEPT, NUM_KEPT, Ended
from baton.gateway.console.rows import dump, ended_row, ms, withheld
from baton.gateway.console.siblings import Foreign
from baton.gateway.console.view import Sources, View, changes, look, look_at_fleet, look_at_requests, series
from baton.gateway.errors import OverloadedError

TICK_S = 0.25
#: The fleet is looked at with every so many ticks: servers report once a second.
FLEET_TICKS = 4
#: Something is said at least this often: whoever hears nothing for longer has lost the gateway.
QUIET_TICKS = 12
#: Of the requests that ended within one tick, the newest so many are told, and the number of the others.
MAX_ENDED_A_TICK = 50
#: Requests a message of the whole view, so that encoding them holds nobody up.
ENDED_A_MESSAGE = 25
#: Of all processes together.
MAX_KEPT = NUM_KEPT + NUM_FAILED_KEPT
#: What may wait for one reader. One more, and it gets the whole view when it reads again.
MAX_FRAMES = 16
MAX_READERS = 64

#: (kind, JSON): "snapshot", "ended", "delta".
Frame = tuple[str, bytes]


@dataclass(eq=False, slots=True)
class _Reader:
    frames: deque[Frame] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    behind: bool = True

    def put(self, frame: Frame) -> None:
        if self.behind:
            return
        if len(self.frames) >= MAX_FRAMES:
            self.frames.clear()
            self.behind = True
        else:
            self.frames.append(frame)
        self.news.set()


@dataclass(eq=False, slots=True)
class _Audience:
    operator: bool
    readers: set[_Reader] = field(default_factory=set)
    view: View = field(default_factory=dict)
    #: Numbers of the last requests that were told: of this process, and of its siblings.
    told: tuple[int, int] = (0, 0)
    num_quiet: int = 0


class Feed:
    """`run` for as long as the gateway serves; `close` ends every reader. Without readers it does nothing."""

    def __init__(self, sources: Sources) -> None:
        #: Asks the other processes of this gateway what they have.
        self.refresh: Callable[[], Awaitable[None]] | None = None
        self._sources = sources
        self._audiences = {operator: _Audience(operator) for operator in (False, True)}
        self._watched = asyncio.Event()
        self._closed = False

    @property
    def num_readers(self) -> int:
        return sum(len(audience.readers) for audience in self._audiences.values())

    async def read(self, *, operator: bool) -> AsyncGenerator[Frame, None]:
        """A snapshot, then deltas; again a snapshot for whoever takes them more slowly than they are made. Raises OverloadedError."""
        if self.num_readers >= MAX_READERS:
            raise OverloadedError(f"{MAX_READERS} readers watch this gateway's console already, which is the limit: close one")
        audience, reader = self._audiences[operator], _Reader()
        if not audience.readers:
            if self.refresh is not None:
                await self.refresh()
            if not audience.readers:  # nobody came meanwhile
                self._begin(audience)
        audience.readers.add(reader)
        self._watched.set()
        try:
            while not self._closed:
                if reader.behind:
                    async for frame in self._whole(audience, reader):
                        yield frame
                while reader.frames:
                    yield reader.frames.popleft()
                reader.news.clear()
                if not reader.behind and not self._closed:
                    await reader.news.wait()
        finally:
            audience.readers.discard(reader)

    async def run(self) -> None:
        ticks = 0
        while True:
            if not self.num_readers:
                self._watched.clear()
                await self._watched.wait()
            await asyncio.sleep(TICK_S)
            if self.refresh is not None:
                await self.refresh()
            ticks += 1
            for audience in self._audiences.values():
                if audience.readers:
                    self._tick(audience, fleet=ticks % FLEET_TICKS == 0)

    def close(self) -> None:
        """Idempotent. Readers get what waits for them, and their end."""
        self._closed = True
        for audience in self._audiences.values():
            for reader in audience.readers:
                reader.news.set()

    # --- inside ---------------------------------------------------------------------------------------------------------------

    def _begin(self, audience: _Audience) -> None:
        audience.view = look(self._sources, time.monotonic(), operator=audience.operator)
        audience.told = self._num_ended()

    def _num_ended(self) -> tuple[int, int]:
        return self._sources.history.num_ended, self._sources.siblings.num_ended

    def _after(self, told: tuple[int, int]) -> list[Ended | Foreign]:
        """What has ended since, oldest first."""
        return sorted([*self._sources.history.after(told[0]), *self._sources.siblings.after(told[1])], key=lambda one: one.at_ms)

    async def _whole(self, audience: _Audience, reader: _Reader) -> AsyncGenerator[Frame, None]:
        """As of the last tick: what has happened since comes with the next one, and waits meanwhile."""
        now = time.monotonic()
        reader.behind = False
        later = {id(one) for one in self._after(audience.told)}
        kept = [one for one in self._after((0, 0)) if id(one) not in later][-MAX_KEPT:]
        head = self._clock(now) | audience.view | {"series": series(self._sources, now), "kept": len(kept)}
        yield "snapshot", dump(head)
        for first in range(0, len(kept), ENDED_A_MESSAGE):
            yield "ended", b'{"ended":[%b]}' % self._rows(kept[first : first + ENDED_A_MESSAGE], audience)
            await asyncio.sleep(0)  # the gateway's own work goes first

    def _tick(self, audience: _Audience, *, fleet: bool) -> None:
        now, operator = time.monotonic(), audience.operator
        seen = look_at_requests(self._sources, now, operator=operator)
        if fleet:
            seen |= look_at_fleet(self._sources, operator=operator)
        delta = changes(audience.view, seen)
        audience.view = audience.view | seen
        news = self._after(audience.told)
        num_new = sum(self._num_ended()) - sum(audience.told)
        audience.told = self._num_ended()
        audience.num_quiet += 1
        if not delta and not num_new and audience.num_quiet < QUIET_TICKS:
            return
        audience.num_quiet = 0
        newest = news[-MAX_ENDED_A_TICK:]
        head = dump(self._clock(now) | {"skipped": num_new - len(newest)} | delta)
        frame = "delta", b'%b,"ended":[%b]}' % (head[:-1], self._rows(newest, audience))
        for reader in audience.readers:
            reader.put(frame)

    def _clock(self, now: float) -> View:
        """`now`: the clock of every other time in the feed; `unix`: the same moment."""
        return {"now": ms(now), "unix": round(time.time() * 1e3)}

    def _rows(self, ended: list[Ended | Foreign], audience: _Audience) -> bytes:
        operator = audience.operator
        for one in ended:
            if operator not in one.rows:
                row = one.row if isinstance(one, Foreign) else ended_row(one, self._sources.names)
                one.rows[operator] = dump(row if operator else withheld(row))
        return b",".join(one.rows[operator] for one in ended)
