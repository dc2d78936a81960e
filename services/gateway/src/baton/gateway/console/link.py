"""How processes of one gateway tell each other what they have: over the sockets that their relay has anyway."""

from __future__ import annotations

import asyncio
import json
import time

from baton.gateway.console.rows import dump, ended_row
from baton.gateway.console.siblings import told_window
from baton.gateway.console.view import NUM_WINDOWS, WINDOW_S, Sources, own_requests
from baton.gateway.processes.relay import Relay

SERVICE, METHOD = "baton.gateway.Console", "Describe"
#: A process that does not answer within this is shown as away, and asked again with the next tick.
ASK_S = 0.5


class Link:
    """Answers siblings, and asks them. Whoever may enter the folder of the sockets is this gateway's own user; callers were judged before."""

    def __init__(self, relay: Relay, sources: Sources) -> None:
        self._relay, self._sources = relay, sources
        self._asking = asyncio.Lock()
        relay.answer(SERVICE, METHOD, self._answer)

    async def ask(self) -> None:
        """Puts what every other process has into `sources.siblings`."""
        async with self._asking:
            siblings, indexes = self._sources.siblings, self._relay.others
            questions = [dump(siblings.question(index)) for index in indexes]
            asked = (self._relay.ask(index, SERVICE, METHOD, question, ASK_S) for index, question in zip(indexes, questions, strict=True))
            for index, answer in zip(indexes, await asyncio.gather(*asked), strict=True):
                if answer is None:
                    siblings.lost(index)
                else:
                    siblings.take(index, json.loads(answer))

    async def _answer(self, question: bytes) -> bytes:
        return describe(self._sources, json.loads(question), time.monotonic())


def describe(sources: Sources, question: dict[str, int], now: float) -> bytes:
    """What this process has of its own, as JSON: "windows" are all for whoever asks first, and then the newest two."""
    history, last = sources.history, int(now) // WINDOW_S
    known = question["started"] == sources.about["started"]
    first = last - 1 if known else last - NUM_WINDOWS + 1
    return dump(
        own_requests(sources)
        | {
            "started": sources.about["started"],
            "ended": [ended_row(one, sources.names) for one in history.after(question["after"] if known else 0)],
            "causes": [[*cause, count] for cause, count in history.causes.items()],
            "rooms": {worker.address: worker.num_rooms for worker in sources.fleet.workers if worker.num_rooms},
            "windows": {str(number): told_window(history.seconds.window(number * WINDOW_S, WINDOW_S)) for number in range(first, last + 1)},
        }
    )
