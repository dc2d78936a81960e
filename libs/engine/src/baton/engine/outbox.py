"""When what happened is told."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.types import EngineEvent, Token

#: The types of what most steps tell.
ONLY_TOKENS = {Token}


class Outbox:
    """Between the scheduler and whoever listens. take: what happened since it was last called.

    tell: gets events before a step returns; None: all wait for its return. With it, tokens that a device's next step follows at once are kept until
    that is launched: a device that stands still costs more than a few hundred microseconds of a token, and who is told wakes threads that take the
    interpreter from the launch.
    """

    def __init__(self, take: Callable[[], list[EngineEvent]]) -> None:
        self._take = take
        self._kept: list[EngineEvent] = []
        self.tell: Callable[[list[EngineEvent]], None] | None = None

    @property
    def has_kept(self) -> bool:
        return bool(self._kept)

    def tell_all(self) -> bool:
        """Tells everything now. Whether there was anything, and somebody to tell."""
        if self.tell is None or not (events := self._all()):
            return False
        self.tell(events)
        return True

    def tell_news(self) -> None:
        """The same, unless nothing happened since tokens were kept."""
        if self.tell is not None and (news := self._take()):
            events, self._kept = self._kept + news, []
            self.tell(events)

    def rest(self, launch_follows: Callable[[], bool]) -> list[EngineEvent]:
        """What a step returns, in order; nothing where it is told behind the launch that follows."""
        events = self._all()
        if events and self.tell is not None and set(map(type, events)) == ONLY_TOKENS and launch_follows():
            self._kept = events
            return []
        return events

    def _all(self) -> list[EngineEvent]:
        if not self._kept:
            return self._take()
        events, self._kept = self._kept + self._take(), []
        return events
