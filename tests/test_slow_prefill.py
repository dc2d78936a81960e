"""64 and 512 requests at once in front of a prefill server that is slow: all are answered, rightly, and no room fails on any server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from faults.cells import Log
from fleet import MODEL, Fleet

from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

HELD = Path(__file__).parent / "faults" / "held_service.py"
#: Each step of prefill takes this much longer. With 64 tokens a step, the last of 512 prompts waits for some thirty of them.
SLOWER_S = 0.1
NUM_PROMPTS = 8
NUM_TOKENS = 2
DEADLINE_S = 280.0


class SlowFleet(Fleet):
    def _command(self, service: str, *flags: str) -> tuple[str, ...]:  # type: ignore[override]
        if service != "prefill":
            return super()._command(service, *flags)
        hold = self.run_dir / "hold"
        hold.write_text(f"slow {SLOWER_S}")
        return (sys.executable, str(HELD), service, str(hold), *flags)


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = SlowFleet(model_path, tmp_path_factory.mktemp("slow"))
    fleet.prefill("--max-batched-tokens", "64", "--num-pages", "1024")
    fleet.decode("--digest", "all", "--num-pages", "1024")
    yield fleet.start()
    fleet.close()


async def answers_of(fleet: Fleet, numbers: list[int]) -> list[tuple[list[int], pb.RoomReport]]:
    """All at once: (tokens, report) of each."""
    channels = [grpc.aio.insecure_channel(fleet.grpc, options=CHANNEL_OPTIONS) for _ in range(min(16, len(numbers)))]

    async def one(place: int, number: int) -> tuple[list[int], pb.RoomReport]:
        sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        prompt = pb.TokenIds(ids=[500 + 31 * (number % NUM_PROMPTS) + i for i in range(4)])
        request = pb.GenerateRequest(model=MODEL, token_ids=prompt, sampling=sampling, report=True)
        messages = [message async for message in InferenceStub(channels[place % len(channels)]).Generate(request, timeout=DEADLINE_S)]
        return [token for message in messages for token in message.token_ids], messages[-1].report

    try:
        return await asyncio.gather(*(one(place, number) for place, number in enumerate(numbers)))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


@pytest.mark.parametrize("count", [64, 512])
async def test_all_are_answered_and_no_room_fails(fleet: Fleet, count: int) -> None:
    alone = [tokens for number in range(NUM_PROMPTS) for tokens, _ in await answers_of(fleet, [number])]
    assert fleet.gateway is not None
    logs = [Log(worker.running.log_path) for worker in (*fleet.workers, fleet.gateway)]
    for number, (tokens, report) in enumerate(await answers_of(fleet, list(range(count)))):
        assert tokens == alone[number % NUM_PROMPTS], f"request {number}"
        assert not report.failed_attempts, report
    failed = [line for log in logs for line in log.lines() if line["event"] in ("room failed", "room retried", "room refused", "request refused")]
    assert not failed, failed[:5]
    opened = [line for line in logs[-1].lines() if line["event"] == "room opened"]
    assert len(opened) == count
    fleet.assert_free()
