"""A real prefill and a real decode process: the split gives exactly the tokens of a plain server, and every page comes back."""

from __future__ import annotations

import asyncio

import pytest

from baton.wire.v1 import worker_pb2

LENGTHS = [1, 15, 16, 17, 100, 333, 1500]


async def plain_answers(fleet, leg_type, wanted):
    server = fleet.plain().wait_ready()
    async with leg_type(server) as leg:
        answers = []
        for number, (prompt, max_tokens) in enumerate(wanted, start=1):
            room = await leg.start(number, prompt, max_tokens, plain=worker_pb2.PlainLeg())
            assert await room.until_over() == "finished", room.failure
            answers.append(room.tokens)
        await leg.until_free()
    assert server.stop() == 0, server.log
    return answers


@pytest.mark.parametrize("pair", ["shm", "tcp"], indirect=True)
async def test_the_split_equals_the_plain_server(pair, fleet, leg_type, prompts) -> None:
    wanted = [(prompts(length), 24) for length in LENGTHS] + [(prompts(50), 1), (prompts(32), 2)]
    one_by_one = [await pair.answer(prompt, max_tokens) for prompt, max_tokens in wanted]
    at_once = await asyncio.gather(*(pair.answer(prompt, max_tokens) for prompt, max_tokens in wanted))
    expected = await plain_answers(fleet, leg_type, wanted)
    assert one_by_one == expected
    assert at_once == expected
    await pair.until_free()


async def test_what_moved_is_reported(pair, prompts) -> None:
    prompt = prompts(100)
    _, first, rest = await pair.start(prompt, 4)
    await rest.until_over()
    await first.until_over()
    transfer = first.events["transferred"].transferred.transfer
    num_pages, layers, page_bytes = 7, 4, 16 * 2 * 16 * 4
    assert transfer.bytes == num_pages * layers * 2 * page_bytes
    assert layers * 2 <= transfer.puts <= num_pages * layers * 2
    assert transfer.digest_checked
    assert transfer.duration_ms > 0
    assert transfer.transport
    ready = rest.events["kv_ready"].kv_ready
    assert ready.digest_checked
    assert 0 < ready.exposed_ms < 5000
    assert [ready.first_token] == list(first.tokens)
    reserved = rest.events["reserved"].reserved
    assert reserved.pages == num_pages
    await pair.until_free()


async def test_gateways_are_told_how_the_pair_is(pair, leg_type) -> None:
    async with leg_type(pair.decode.server) as later:
        for leg in (pair.decode, later):
            while not leg.connected_to(pair.prefill.server):
                leg.peers_changed.clear()
                await asyncio.wait_for(leg.peers_changed.wait(), 10)
            (peer,) = leg.peers.peers
            assert (peer.bootstrap_address, peer.problem) == (pair.prefill.server.bootstrap, "")
            assert peer.transport
            assert peer.gigabytes_per_s > 0.01


async def test_many_rooms_at_once(pair, prompts) -> None:
    wanted = [(prompts(1 + (37 * n) % 160), 1 + n % 9) for n in range(64)]
    answers = await asyncio.gather(*(pair.answer(prompt, max_tokens) for prompt, max_tokens in wanted))
    assert [len(answer) for answer in answers] == [max_tokens for _, max_tokens in wanted]
    await pair.until_free()


async def test_sigterm_drains_and_leaves_nothing(own_pair, prompts) -> None:
    pair = own_pair
    _, first, rest = await pair.start(prompts(400), 200)
    await rest.until("kv_ready")
    await first.until_over()
    for leg in (pair.decode, pair.prefill):
        loop = asyncio.get_running_loop()
        stopping = loop.run_in_executor(None, leg.server.stop)
        if leg is pair.decode:
            assert await rest.until_over() == "finished", rest.failure
            assert len(rest.tokens) == 199
        assert await stopping == 0, leg.server.log
        assert "not free" not in leg.server.log
        assert '"level": "error"' not in leg.server.log
