"""Prefix caches of a real pair: what a conversation's turns move, that nobody writes into what is shared, and that nothing of it is lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator

import pytest

from baton.wire.v1 import worker_pb2

PAGE, TOKEN_BYTES = 16, 4 * 2 * 2 * 16 * 4
CACHED = ("--prefix-cache",)
SLOW_PREFILL = ("--max-batched-tokens", "4", "--max-running", "4")


@contextlib.asynccontextmanager
async def cached_pair(fleet, leg_type, pair_type, transport="shm", prefill_flags=(), decode_flags=()) -> AsyncIterator:
    servers = fleet.pair_of_servers(transport, (*CACHED, *prefill_flags), (*CACHED, "--digest", "all", *decode_flags))
    async with leg_type(servers[0]) as first, leg_type(servers[1]) as second:
        pair = pair_type(first, second)
        await pair.connect()
        yield pair


async def turn(pair, history: list[int], max_tokens: int = 12, **more) -> tuple[list[int], int, int]:
    """The answer, the tokens that moved and those that were resident at decode."""
    number = pair.draw()
    first = await pair.start_prefill(number, history, max_tokens, **more)
    rest = await pair.start_decode(number, history, max_tokens, **more)
    assert await first.until_over() == "transferred", first.failure
    assert await rest.until_over() == "finished", rest.failure
    assert rest.events["kv_ready"].kv_ready.digest_checked
    moved = first.events["transferred"].transferred.transfer.bytes
    assert moved % TOKEN_BYTES == 0
    return first.tokens + rest.tokens, moved // TOKEN_BYTES, rest.events["reserved"].reserved.resident_tokens


async def plain_answer(leg, number: int, prompt: list[int], max_tokens: int = 12) -> list[int]:
    room = await leg.start(number, prompt, max_tokens, plain=worker_pb2.PlainLeg())
    assert await room.until_over() == "finished", room.failure
    return room.tokens


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_conversation_moves_only_what_is_new(fleet, leg_type, pair_type, prompts, transport) -> None:
    plain = fleet.plain()  # without a cache
    async with cached_pair(fleet, leg_type, pair_type, transport) as pair, leg_type(plain.wait_ready()) as other:
        history = prompts(300)
        for number in range(1, 5):
            before = len(history)
            history = history + prompts(20)
            answer, moved, resident = await turn(pair, history)
            assert answer == await plain_answer(other, number, history)
            assert resident == (0 if number == 1 else (before - 1) // PAGE * PAGE)
            assert moved == -(-(len(history) - resident) // PAGE) * PAGE
            history = history + answer
        await pair.until_free()
        # Another tenant finds nothing of it, and the first one still does.
        assert (await turn(pair, history, cache_salt="another"))[2] == 0
        assert (await turn(pair, history))[2] == (len(history) - 1) // PAGE * PAGE
        await pair.until_free()


async def test_pressure_on_both_pools_corrupts_nothing(fleet, leg_type, pair_type, prompts) -> None:
    """Conversations take turns in pools that hold one of them and a half."""
    plain = fleet.plain()
    small = ("--num-pages", "36")
    async with cached_pair(fleet, leg_type, pair_type, "shm", small, small) as pair, leg_type(plain.wait_ready()) as other:
        histories = [prompts(200), prompts(240), prompts(280)]
        number, found = 0, 0
        for _ in range(3):
            for who, history in enumerate(histories):
                number += 1
                answer, _, resident = await turn(pair, history)
                assert answer == await plain_answer(other, number, history)
                found += resident
                histories[who] = [*history, *answer, who, who]
            again, _, resident = await turn(pair, histories[2])
            assert resident > 0
            assert again == await plain_answer(other, 100 + number, histories[2])
        await pair.until_free()


async def test_a_writer_that_is_silent_holds_its_own_pages_and_no_shared_ones(fleet, leg_type, pair_type, prompts) -> None:
    """The resident prefix of an aborted room is nobody's to write into: it is not quarantined, and the next room has it whole."""
    slow = ("--revoke-timeout-s", "1")
    async with cached_pair(fleet, leg_type, pair_type, "shm", SLOW_PREFILL, slow) as pair:
        system, tail = prompts(64), prompts(2000)
        expected, _, _ = await turn(pair, system + tail[:50])
        await turn(pair, system)
        number = pair.draw()
        first = await pair.start_prefill(number, system + tail, 4)
        rest = await pair.start_decode(number, system + tail, 4)
        await first.until("transfer_started")
        pair.prefill.server.send(signal.SIGSTOP)
        try:
            resident = rest.events["reserved"].reserved.resident_tokens
            assert resident == 64 + 48
            await pair.decode.abort(number)
            assert await rest.until_over() == "failed"
            await pair.decode.until_quarantined(-(-(64 + 2000) // PAGE) - resident // PAGE)
        finally:
            pair.prefill.server.send(signal.SIGCONT)
        await pair.decode.until_free()
        await pair.prefill.abort(number)
        await pair.until_free(30)
        answer, _, resident = await turn(pair, system + tail[:50])
        assert (answer, resident) == (expected, 64 + 48)
        await pair.until_free()


async def test_prefill_killed_in_mid_transfer_of_a_follow_up(fleet, leg_type, pair_type, prompts) -> None:
    """What had landed before stays; what was being written is given back. Another prefill process, whose cache is empty, goes on with it."""
    prefill, decode = fleet.prefill(*CACHED, *SLOW_PREFILL), fleet.decode(*CACHED, "--digest", "all")
    async with leg_type(decode.wait_ready()) as second:
        async with leg_type(prefill.wait_ready()) as first:
            pair = pair_type(first, second)
            await pair.connect()
            system = prompts(64)
            expected, _, _ = await turn(pair, system)
            _, leg, rest = await pair.start(system + prompts(2000), 8)
            await leg.until("transfer_started")
            prefill.kill()
            assert await rest.until_over() == "failed"
            await second.until_free(timeout_s=5)
        again = fleet.prefill(*CACHED, "--bootstrap-port", prefill.bootstrap.rpartition(":")[2])
        async with leg_type(again.wait_ready()) as first:
            pair = pair_type(first, second)
            await pair.connect()
            answer, moved, resident = await turn(pair, system)
            assert (answer, moved, resident) == (expected, 0, 64)
            await pair.until_free()
