"""The answers to one request on their way to its client: each from its own rooms, merged as their parts come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.gateway.admission import Admitted
from baton.gateway.answer import AnswerText, Piece
from baton.gateway.attempts import Attempts
from baton.gateway.live_room import SETTLE_S
from baton.gateway.report import room_report
from baton.gateway.split import AnswerSplit
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

#: Between the seeds of two choices: the golden ratio's odd fraction of 2**64, so that no two of a request's are alike.
SEED_STRIDE = 0x9E3779B97F4A7C15


def seed_of(seed: int, choice: int) -> int:
    """Answer number `choice` is the one that a request for a single answer gets with this seed."""
    return (seed + choice * SEED_STRIDE) % 2**64


def orders(admitted: Admitted) -> Iterator[Admitted]:
    """What each answer's room is asked for. The first one's has the prompt computed."""
    yield admitted
    for choice in range(1, admitted.num_choices):
        sampling = worker_pb2.Sampling()
        sampling.CopyFrom(admitted.sampling)
        sampling.seed = seed_of(sampling.seed, choice)
        sampling.ClearField("prompt_logprobs")
        yield replace(admitted, sampling=sampling, num_choices=1)


class Choice:
    """One answer: call `next` for its pieces until one has a finish reason."""

    def __init__(self, index: int, attempts: Attempts, text: AnswerText, split: AnswerSplit | None = None, *, prompt_only: bool = False) -> None:
        """prompt_only: what is made is not given out."""
        self.index = index
        #: A piece of it was given out.
        self.begun = False
        self._prompt_only = prompt_only
        self.attempts = attempts
        self.finish_reason: common_pb2.FinishReason.ValueType | None = None
        self._text = text
        self._split = split

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def ended_by(self) -> str:
        """What made the answer complete: stop_string, stop_token or length; empty while it is not."""
        if self.finish_reason is None:
            return ""
        if self._text.stopped:
            return "stop_string"
        return "length" if self.finish_reason == common_pb2.FINISH_REASON_LENGTH else "stop_token"

    async def next(self) -> Piece:
        tokens = await self.attempts.take()
        self.begun = True
        if self._prompt_only:
            self.finish_reason = None if tokens else common_pb2.FINISH_REASON_LENGTH
            return Piece("", [], choice=self.index, finish=self.finish_reason)
        piece = self._feed(tokens) if tokens else self._end()
        if self._split is not None:
            piece = self._split.apply(piece, is_last=self.finish_reason is not None)
            if self._split.num_calls and self.finish_reason == common_pb2.FINISH_REASON_STOP:
                self.finish_reason = common_pb2.FINISH_REASON_TOOL_CALLS
        piece.choice, piece.finish = self.index, self.finish_reason
        return piece

    def _feed(self, tokens: list[int]) -> Piece:
        piece = self._text.feed(tokens)
        logprobs = self.attempts.take_logprobs()
        if logprobs:
            piece.logprobs = logprobs[: len(piece.token_ids)]
        if self._text.stopped:
            self.attempts.room.answered("stop_string")
            self.finish_reason = common_pb2.FINISH_REASON_STOP
        return piece

    def _end(self) -> Piece:
        reason = self.attempts.room.answer.stream.finish
        assert reason is not None
        rest = self._text.finish(by_stop_token=reason == common_pb2.FINISH_REASON_STOP)
        # The rest of the text may itself complete a stop string.
        self.finish_reason = common_pb2.FINISH_REASON_STOP if self._text.stopped else reason
        return Piece(rest, [])


class Answer:
    """What a request is answered, one choice or several, those to its first prompt before those to the next: iterate for their pieces. The last
    piece of each choice has its finish reason; once the iteration ends, `usage` is whole.

    A piece may have tokens and no text yet, or text and no tokens. Iterating raises RoomFailedError when a room fails: no choice is given up alone.
    """

    def __init__(self, request_id: str, prompts: Sequence[Sequence[int]], seed: int, choices: Sequence[Choice]) -> None:
        """choices: as many to each of the prompts."""
        self.request_id = request_id
        self.seed = seed
        self.choices = choices
        #: When its reader was given a part and did not ask for the next yet (time.monotonic(), seconds); None: it is waiting for one.
        self.handed_at: float | None = None
        self.prompts = prompts
        self.num_choices = len(choices) // len(prompts)
        self._coming: dict[asyncio.Task[Piece], Choice] = {}

    @property
    def usage(self) -> inference_pb2.Usage:
        """So far. Each prompt counts once."""
        return inference_pb2.Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(choice.attempts.cached_tokens for choice in self._sources),
        )

    @property
    def finish_reason(self) -> common_pb2.FinishReason.ValueType | None:
        """Of the first choice."""
        return self.choices[0].finish_reason

    @property
    def prompt_logprobs(self) -> Sequence[inference_pb2.TokenLogprobs]:
        """As `logprobs_of`, of a request with one prompt."""
        return self.logprobs_of(0)

    def logprobs_of(self, number: int) -> Sequence[inference_pb2.TokenLogprobs]:
        """Of the tokens of prompt `number` behind the first, where they were asked for; from the first piece of its answers on."""
        return self._sources[number].attempts.prompt_logprobs

    @property
    def _sources(self) -> Sequence[Choice]:
        """The first choice to each prompt, whose room has the prompt computed."""
        return self.choices[:: self.num_choices]

    @property
    def telling(self) -> Choice:
        """The choice that says how the request went: one whose room failed by itself, if any did, else one that failed, else the first."""
        failed = [choice for choice in self.choices if choice.attempts.room.failure is not None]
        own = (choice for choice in failed if choice.attempts.room.failure.origin not in _ENDED_BY)  # type: ignore[union-attr]
        return next(own, (failed or self.choices)[0])

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        self.handed_at = None
        try:
            return await self._next()
        finally:
            self.handed_at = time.monotonic()

    async def _next(self) -> Piece:
        if len(self.choices) == 1:
            if self.choices[0].finish_reason is not None:
                raise StopAsyncIteration
            return await self.choices[0].next()
        open_choices = [choice for choice in self.choices if choice.finish_reason is None]
        if not open_choices and not self._coming:  # the last piece of one that is complete may not have been taken yet
            raise StopAsyncIteration
        asked = self._coming.values()
        for choice in [choice for choice in open_choices if choice not in asked and not self._must_wait(choice)]:
            self._coming[asyncio.ensure_future(choice.next())] = choice
        done, _ = await asyncio.wait(self._coming, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in self._coming if task in done)
        del self._coming[first]
        return first.result()

    def _must_wait(self, choice: Choice) -> bool:
        """What is asked of a prompt is told before anything of its answers, and the room of their source has it."""
        source = self.choices[choice.index - choice.index % self.num_choices]
        return choice is not source and not source.begun and source.attempts.asks_of_prompt

    async def close(self) -> None:
        """Nobody reads it any more."""
        coming, self._coming = list(self._coming), {}
        for task in coming:
            task.cancel()
        if coming:
            await asyncio.gather(*coming, return_exceptions=True)
        for choice in self.choices:
            choice.attempts.close()

    async def report(self) -> inference_pb2.RoomReport:
        """How the request passed through the servers, its first choice where there are several. Waits a moment for a leg that has not said how it
        ended."""
        attempts = self.choices[0].attempts
        room = attempts.room
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(room.settled.wait(), SETTLE_S + 1.0)
        return room_report(room.room, room.machine, room.passage, self.usage, time.monotonic(), attempts.failed, attempts.num_recomputed)


#: Whoever ended the rooms of a request that goes down as a whole.
_ENDED_BY = (common_pb2.ORIGIN_CLIENT, common_pb2.ORIGIN_GATEWAY)
