"""Sends a workload's requests when they are due and stamps what comes back. One event loop, a task a request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.bench.arrivals import Arrivals, ClosedLoop
from baton.bench.errors import RequestFailedError, require
from baton.bench.request import Request
from baton.bench.sample import Sample
from baton.bench.targets.base import Call, Target

HEARTBEAT_S = 0.01
OnDone = Callable[[Sample], None]


def counting(step: Callable[[int], None]) -> OnDone:
    """Tells `step` how many samples there are."""
    num_done = 0

    def on_done(_: Sample) -> None:
        nonlocal num_done
        num_done += 1
        step(num_done)

    return on_done


@dataclass(frozen=True)
class Limits:
    """`timeout_s`: of one request, from sending to its end. `max_in_flight`: a request of an open loop past it fails unsent."""

    timeout_s: float = 600.0
    max_in_flight: int = 4096

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, "above 0")
        require(self.max_in_flight >= 1, "max_in_flight", self.max_in_flight, "at least 1")


@dataclass
class Measured:
    """One repeat: samples in the order of their ends, and by how much each beat of the heart came late."""

    samples: list[Sample] = field(default_factory=list)
    loop_lag_s: list[float] = field(default_factory=list)


class Generator:
    """One repeat against one target. Cancelling `run` cancels the requests that are under way."""

    def __init__(self, target: Target, limits: Limits, repeat: int, *, is_warm_up: bool, on_done: OnDone) -> None:
        self._target, self._limits, self._repeat = target, limits, repeat
        self._is_warm_up, self._on_done = is_warm_up, on_done
        self._measured = Measured()
        self._start_s = 0.0
        self._num_in_flight = 0

    async def run(self, requests: Sequence[Request], arrivals: Arrivals) -> Measured:
        """Returns once every request has ended. A failed request is a sample with a cause; what is not a failure of a request is raised."""
        calls = [(request, self._target.prepare(request)) for request in requests]
        self._start_s = time.perf_counter()
        heart = asyncio.create_task(self._beat())
        try:
            if isinstance(arrivals, ClosedLoop):
                await self._closed(calls, arrivals)
            else:
                await self._open(calls, [float(at) for at in arrivals.times_s(len(calls))])
        finally:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
        return self._measured

    async def _open(self, calls: Sequence[tuple[Request, Call]], times_s: Sequence[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for (request, call), at_s in zip(calls, times_s, strict=True):
                if (wait_s := at_s - self._now()) > 0:
                    await asyncio.sleep(wait_s)
                if self._num_in_flight >= self._limits.max_in_flight:
                    now_s = self._now()
                    self._note(Stamps(request, at_s, now_s), now_s, "not_sent", f"{self._num_in_flight} requests were under way, the limit")
                else:
                    self._num_in_flight += 1
                    group.create_task(self._one(request, call, at_s))

    async def _closed(self, calls: Sequence[tuple[Request, Call]], loop: ClosedLoop) -> None:
        waiting = iter(calls)

        async def client() -> None:
            due_s = 0.0
            for request, call in waiting:
                if (wait_s := due_s - self._now()) > 0:
                    await asyncio.sleep(wait_s)
                self._num_in_flight += 1
                due_s = await self._one(request, call, due_s) + loop.think_s

        async with asyncio.TaskGroup() as group:
            for _ in range(min(loop.num_clients, len(calls))):
                group.create_task(client())

    async def _one(self, request: Request, call: Call, scheduled_s: float) -> float:
        """When it ended."""
        stamps = Stamps(request, scheduled_s, self._now())
        error: str | None = None
        detail = ""
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._receive(call, stamps)
            if not stamps.token_s:
                error, detail = "empty", "the answer ended without any output"
        except TimeoutError:
            error, detail = "timeout", f"no end after {self._limits.timeout_s:g} s"
        except RequestFailedError as failed:
            error, detail = failed.cause, failed.detail
        finally:
            self._num_in_flight -= 1
        ended_s = self._now()
        self._note(stamps, ended_s, error, detail)
        return ended_s

    async def _receive(self, call: Call, stamps: "Stamps") -> None:
        async for piece in call.stream():
            now_s = self._now()
            if piece.num_tokens:
                stamps.token_s.append(now_s)
                stamps.token_counts.append(piece.num_tokens)
            stamps.texts.append(piece.text)
            stamps.finish = piece.finish or stamps.finish
            stamps.server |= piece.server
            if piece.output_tokens is not None:
                stamps.prompt_tokens, stamps.output_tokens = piece.prompt_tokens, piece.output_tokens

    def _note(self, stamps: "Stamps", ended_s: float, error: str | None, detail: str) -> None:
        sample = stamps.sample(self._repeat, ended_s, error, detail, is_warm_up=self._is_warm_up)
        self._measured.samples.append(sample)
        self._on_done(sample)

    async def _beat(self) -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(HEARTBEAT_S)
            self._measured.loop_lag_s.append(max(0.0, time.perf_counter() - before_s - HEARTBEAT_S))

    def _now(self) -> float:
        return time.perf_counter() - self._start_s


@dataclass
class Stamps:
    """A sample in the making."""

    request: Request
    scheduled_s: float
    sent_s: float
    token_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    server: dict[str, float] = field(default_factory=dict)

    def sample(self, repeat: int, ended_s: float, error: str | None, detail: str, *, is_warm_up: bool) -> Sample:
        request = self.request
        return Sample(
            repeat=repeat,
            index=request.index,
            kind=request.kind,
            is_long=request.is_long,
            is_warm_up=is_warm_up,
            prompt_words=request.num_prompt_words,
            max_tokens=request.max_tokens,
            scheduled_s=self.scheduled_s,
            sent_s=self.sent_s,
            ended_s=ended_s,
            token_s=tuple(self.token_s),
            token_counts=tuple(self.token_counts),
            text="".join(self.texts),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            finish=self.finish,
            error=error,
            error_detail=detail,
            server=self.server,
        )
