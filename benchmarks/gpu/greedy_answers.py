"""What an engine says to some prompts at once."""

from __future__ import annotations

from baton.engine import Engine, Request, SamplingParams
from baton.engine.types import Token


def answers(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    rooms: list[list[int]] = [[] for _ in prompts]
    for room, tokens in enumerate(prompts):
        engine.add(Request(room + 1, tokens, SamplingParams(max_tokens=num_tokens)))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Token):
                rooms[event.room - 1].append(event.token)
    return rooms
