"""Requests to servers that have nothing else to do: are the answers equal, what does a prompt cost, what does the split add, how do pages travel?"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from statistics import median

from baton.bench.decide.record import Equality, IdlePoint
from baton.bench.errors import SettingError
from baton.bench.serving import RequestTiming, ServingClient
from baton.wire.v1 import common_pb2

#: Token ids that every vocabulary of a real model has.
SMALLEST_ID, LARGEST_ID = 100, 4000
EQUALITY_LENGTHS = (5, 33, 150)
EQUALITY_TOKENS = 12
IDLE_TOKENS = 12
BATCH_PROMPT = 8
BATCH_TOKENS = 24


class IdleProbe:
    """Asks topologies by name -> gRPC address, in turns. `aclose` when done."""

    def __init__(self, addresses: Mapping[str, str], model: str, seed: int) -> None:
        self._clients = {name: ServingClient(address, model) for name, address in addresses.items()}
        self._draw = random.Random(seed)

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def equality(self) -> Equality:
        """Greedy token ids, not texts."""
        reference, different = next(iter(self._clients)), set()
        for length in EQUALITY_LENGTHS:
            prompt = self._prompt(length)
            answers = {name: (await client.generate(prompt, EQUALITY_TOKENS)).token_ids for name, client in self._clients.items()}
            different |= {name for name, ids in answers.items() if ids != answers[reference]}
        return Equality(len(EQUALITY_LENGTHS), EQUALITY_TOKENS, tuple(sorted(different)))

    async def one_at_a_time(self, lengths: Sequence[int], num_rounds: int) -> list[IdlePoint]:
        """Each round asks every topology for an own prompt of each length; who goes first alternates."""
        found: dict[tuple[str, int], list[RequestTiming]] = {}
        for turn in range(num_rounds):
            for length in lengths:
                names = list(self._clients)
                for name in names if turn % 2 == 0 else reversed(names):
                    found.setdefault((name, length), []).append(await self._clients[name].generate(self._prompt(length), IDLE_TOKENS))
        return [point_of(name, length, 1, timings) for (name, length), timings in found.items()]

    async def several_at_once(self, sizes: Sequence[int]) -> list[IdlePoint]:
        """Batches of short prompts with long answers: what a step of so many sequences takes."""
        points = []
        for size in sizes:
            for name, client in self._clients.items():
                prompts = [self._prompt(BATCH_PROMPT) for _ in range(size)]
                timings = await asyncio.gather(*(client.generate(prompt, BATCH_TOKENS) for prompt in prompts))
                points.append(point_of(name, BATCH_PROMPT, size, timings))
        return points

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._draw.randint(SMALLEST_ID, LARGEST_ID) for _ in range(num_tokens)]


def point_of(topology: str, prompt_tokens: int, concurrency: int, timings: Sequence[RequestTiming]) -> IdlePoint:
    """Raises SettingError if the topology did not say what a transfer needs to be judged: its gateway is not one of this version."""
    moved = [timing.report.transfer for timing in timings if timing.report.HasField("transfer")]
    if moved and len(moved) != len(timings):
        raise SettingError(f"{topology} reported a transfer for {len(moved)} of {len(timings)} requests, but a split moves pages for all")
    return IdlePoint(
        topology=topology,
        prompt_tokens=prompt_tokens,
        concurrency=concurrency,
        num=len(timings),
        ttft_ms=median(timing.ttft_ms for timing in timings),
        itl_ms=median(timing.itl_ms for timing in timings if timing.itl_ms is not None),
        bootstrap_ms=median(_bootstrap_ms(timing) for timing in timings) if moved else None,
        transfer_ms=median(transfer.duration_ms for transfer in moved) if moved else None,
        exposed_ms=median(transfer.exposed_ms for transfer in moved) if moved else None,
        kv_bytes=median(transfer.bytes for transfer in moved) if moved else None,
        transport=", ".join(sorted({transfer.transport for transfer in moved})) if moved else None,
    )


def _bootstrap_ms(timing: RequestTiming) -> float:
    return sum(span.duration_ms for span in timing.report.states if span.state == common_pb2.ROOM_STATE_BOOTSTRAPPING)
