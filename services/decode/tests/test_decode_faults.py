"""What happens to pages and rooms when something dies, stops, leaves or misbehaves: real processes, real UCX."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import grpc
import grpc.aio
import pytest

from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2

BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


#: Hundreds of steps for a long prompt: its transfer is far from its end when a kill has been noticed, also where a process gets no core for a while.
SLOW_PREFILL = ("--max-batched-tokens", "4", "--max-running", "4")
LONG = 2900


async def in_mid_transfer(pair, prompts):
    """A room whose first pages have landed and whose last have not."""
    number, first, rest = await pair.start(prompts(LONG), 8)
    await first.until("transfer_started")
    return number, first, rest


@BOTH
async def test_prefill_killed_in_mid_transfer(fleet, leg_type, pair_type, prompts, transport) -> None:
    flags = ("--transport", transport)
    prefill, decode = fleet.prefill(*flags, *SLOW_PREFILL), fleet.decode(*flags, "--digest", "all")
    prompt = prompts(40)
    async with leg_type(decode.wait_ready()) as second:
        async with leg_type(prefill.wait_ready()) as first:
            pair = pair_type(first, second)
            await pair.connect()
            before = await pair.answer(prompt, 6)
            _, leg, rest = await in_mid_transfer(pair, prompts)
            prefill.kill()
            killed = time.monotonic()
            assert await rest.until_over() == "failed"
            assert time.monotonic() - killed < 5
            assert (rest.failure.code, rest.failure.origin, rest.failure.cause) == (UNAVAILABLE, common_pb2.ORIGIN_PREFILL, "prefill_lost")
            assert rest.failure.stage == common_pb2.ROOM_STATE_WAITING
            assert "transferred" not in leg.events
            await second.until_free(timeout_s=5)
        # the same port, another process: decode is not restarted
        again = fleet.prefill(*flags, "--bootstrap-port", prefill.bootstrap.rpartition(":")[2])
        async with leg_type(again.wait_ready()) as first:
            pair = pair_type(first, second)
            await pair.connect()
            assert await pair.answer(prompt, 6) == before
            await pair.until_free()


@BOTH
async def test_decode_killed_in_mid_transfer(fleet, leg_type, pair_type, prompts, transport) -> None:
    flags = ("--transport", transport)
    prefill, decode = fleet.prefill(*flags, *SLOW_PREFILL), fleet.decode(*flags)
    async with leg_type(prefill.wait_ready()) as first:
        async with leg_type(decode.wait_ready()) as second:
            pair = pair_type(first, second)
            await pair.connect()
            _, leg, _ = await in_mid_transfer(pair, prompts)
            decode.kill()
            killed = time.monotonic()
            assert await leg.until_over() == "failed"
            assert time.monotonic() - killed < 5
            assert (leg.failure.code, leg.failure.origin, leg.failure.cause) == (UNAVAILABLE, common_pb2.ORIGIN_DECODE, "decode_lost")
            assert leg.failure.stage == common_pb2.ROOM_STATE_TRANSFERRING
            await first.until_free(timeout_s=5)
        again = fleet.decode(*flags, "--digest", "all")
        async with leg_type(again.wait_ready()) as second:
            pair = pair_type(first, second)
            await pair.connect()
            assert len(await pair.answer(prompts(40), 6)) == 6
            await pair.until_free()


@pytest.mark.parametrize("slow_pair", ["shm", "tcp"], indirect=True)
async def test_rooms_that_are_ended_give_their_pages_back(slow_pair, prompts) -> None:
    """By the client on both legs, on either one alone, and by losing a gateway: in mid-transfer each."""
    pair = slow_pair
    number, first, rest = await in_mid_transfer(pair, prompts)
    await pair.prefill.abort(number)
    await pair.decode.abort(number)
    assert [await first.until_over(), await rest.until_over()] == ["failed", "failed"]
    assert {first.failure.cause, rest.failure.cause} == {"client_gone"}
    await pair.until_free(timeout_s=2)

    number, first, rest = await in_mid_transfer(pair, prompts)
    await pair.decode.abort(number)  # Revoke reaches prefill, which stops and says so
    assert [await rest.until_over(), await first.until_over()] == ["failed", "failed"]
    assert first.failure.cause == "client_gone"
    await pair.until_free(timeout_s=2)

    number, first, rest = await in_mid_transfer(pair, prompts)
    await pair.prefill.abort(number, common_pb2.ORIGIN_GATEWAY)  # the negative acknowledgement reaches decode
    assert [await first.until_over(), await rest.until_over()] == ["failed", "failed"]
    assert (rest.failure.cause, rest.failure.origin) == ("client_gone", common_pb2.ORIGIN_GATEWAY)
    await pair.until_free(timeout_s=2)

    assert len(await pair.answer(prompts(40), 6)) == 6


async def test_a_lost_gateway_ends_its_rooms_on_both_sides(slow_pair, leg_type, pair_type, prompts) -> None:
    async with leg_type(slow_pair.prefill.server) as first, leg_type(slow_pair.decode.server) as second:
        await in_mid_transfer(pair_type(first, second), prompts)
    await slow_pair.until_free(timeout_s=2)
    assert len(await slow_pair.answer(prompts(40), 6)) == 6


async def test_a_suspended_writer_keeps_pages_in_quarantine(slow_pair, prompts) -> None:
    """Shared memory: nothing but the writer's word or its end is proof. A timer frees nothing."""
    pair = slow_pair
    number, _, rest = await in_mid_transfer(pair, prompts)
    pair.prefill.server.send(signal.SIGSTOP)
    try:
        await pair.decode.abort(number)
        assert await rest.until_over() == "failed"
        num_pages = -(-LONG // 16)
        await pair.decode.until_quarantined(num_pages)
        await asyncio.sleep(1.0)
        load = (await pair.decode.describe()).load
        assert (load.quarantined_pages, load.free_pages) == (num_pages, load.total_pages - num_pages)
    finally:
        pair.prefill.server.send(signal.SIGCONT)
    await pair.until_free(timeout_s=5)
    assert len(await pair.answer(prompts(40), 6)) == 6


async def test_a_suspended_writer_that_dies_is_proof(own_pair, prompts) -> None:
    pair = own_pair
    number, _, _ = await in_mid_transfer(pair, prompts)
    pair.prefill.server.send(signal.SIGSTOP)
    await pair.decode.abort(number)
    await pair.decode.until_quarantined(-(-LONG // 16))
    pair.prefill.server.kill()
    await pair.decode.until_free(timeout_s=5)


@pytest.mark.parametrize("own_pair", ["tcp"], indirect=True)
async def test_over_tcp_a_suspended_writer_is_fenced_without_its_word(own_pair, leg_type, pair_type, prompts) -> None:
    """Its session is missed after at most 15 s, and its way in is then destroyed: what it sends when it wakes up finds nobody."""
    pair = own_pair
    number, _, rest = await in_mid_transfer(pair, prompts)
    pair.prefill.server.send(signal.SIGSTOP)
    try:
        await pair.decode.abort(number)
        assert await rest.until_over() == "failed"
        await pair.decode.until_quarantined(-(-LONG // 16))
        await pair.decode.until_free(timeout_s=20)
    finally:
        pair.prefill.server.send(signal.SIGCONT)
    async with leg_type(pair.prefill.server) as first:  # our own session with it was missed as well
        again = pair_type(first, pair.decode)
        await again.connect()
        assert len(await again.answer(prompts(40), 6)) == 6
        await again.until_free()


async def test_only_the_named_decode_server_may_publish(slow_pair, prompts) -> None:
    pair = slow_pair
    number = pair.draw()
    prompt = prompts(20)
    first = await pair.start_prefill(number, prompt, 4, decode_instance_id="decode-somebody-else")
    rest = await pair.start_decode(number, prompt, 4)
    assert await rest.until_over() == "failed"
    assert rest.failure.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
    assert rest.failure.cause == "wrong_decode"
    assert "decode-somebody-else" in rest.failure.message
    assert first.events == {}
    await pair.prefill.abort(number)
    await pair.until_free(timeout_s=2)


async def test_either_leg_may_come_first(slow_pair, prompts) -> None:
    pair = slow_pair
    prompt = prompts(20)
    for decode_first in (True, False):
        number = pair.draw()
        legs = [pair.start_decode, pair.start_prefill] if decode_first else [pair.start_prefill, pair.start_decode]
        early = await legs[0](number, prompt, 4)
        await asyncio.sleep(0.3)
        late = await legs[1](number, prompt, 4)
        assert {await early.until_over(), await late.until_over()} == {"transferred", "finished"}
    await pair.until_free()


async def test_a_room_that_no_gateway_asks_prefill_for_expires(slow_pair, prompts) -> None:
    pair = slow_pair
    rest = await pair.start_decode(pair.draw(), prompts(20), 4)
    assert await rest.until_over(timeout_s=5) == "failed"
    assert (rest.failure.cause, rest.failure.origin) == ("room_unclaimed", common_pb2.ORIGIN_PREFILL)
    await pair.until_free(timeout_s=2)


async def test_a_prefill_that_refuses_at_intake_tells_decode_at_once(own_pair, prompts) -> None:
    pair = own_pair
    prompt = prompts(20)
    await pair.prefill.send(drain=worker_pb2.Drain())
    for decode_first in (True, False):
        number = pair.draw()
        legs = [pair.start_decode, pair.start_prefill] if decode_first else [pair.start_prefill, pair.start_decode]
        rooms = [await legs[0](number, prompt, 4)]
        await asyncio.sleep(0.2)
        rooms.append(await legs[1](number, prompt, 4))
        for room in rooms:
            assert await room.until_over(timeout_s=1) == "failed"
            assert (room.failure.code, room.failure.cause) == (UNAVAILABLE, "draining")
    await pair.until_free(timeout_s=2)


async def test_a_prefill_that_is_not_there(slow_pair, prompts) -> None:
    pair = slow_pair
    leg = worker_pb2.DecodeLeg(bootstrap_address="127.0.0.1:9", prefill_instance_id="prefill-gone")
    rest = await pair.decode.start(pair.draw(), prompts(20), 4, decode=leg)
    assert await rest.until_over(timeout_s=5) == "failed"
    assert (rest.failure.code, rest.failure.cause) == (UNAVAILABLE, "prefill_unreachable")
    assert "127.0.0.1:9" in rest.failure.message
    leg = worker_pb2.DecodeLeg(bootstrap_address=pair.prefill.server.bootstrap, prefill_instance_id="prefill-of-yesterday")
    rest = await pair.decode.start(pair.draw(), prompts(20), 4, decode=leg)
    assert await rest.until_over(timeout_s=5) == "failed"
    assert pair.prefill.server.instance_id in rest.failure.message
    assert "prefill-of-yesterday" in rest.failure.message
    await pair.until_free(timeout_s=2)


async def test_a_pair_that_does_not_fit_is_refused_with_both_values(fleet, leg_type, pair_type, prompts) -> None:
    prefill, decode = fleet.prefill(), fleet.decode("--page-size", "32", "--num-pages", "64", "--link-wait-s", "1")
    async with leg_type(prefill.wait_ready()) as first, leg_type(decode.wait_ready()) as second:
        pair = pair_type(first, second)
        rest = await pair.start_decode(pair.draw(), prompts(20), 4)
        assert await rest.until_over() == "failed"
        assert "page_size: '32' here, '16' there" in rest.failure.message
        (peer,) = second.peers.peers
        assert (peer.bootstrap_address, peer.prefill_instance_id) == (prefill.bootstrap, "")
        assert "page_size: '32' here, '16' there" in peer.problem
        await second.until_free()
        assert prefill.process.poll() is None
        assert decode.process.poll() is None


async def test_direct_requests_are_refused_on_both(slow_pair) -> None:
    for leg in (slow_pair.prefill, slow_pair.decode):
        async with grpc.aio.insecure_channel(leg.server.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match=rf"{leg.server.service} server.*gateway\.test:1") as caught:
                await anext(aiter(stub.Generate(inference_pb2.GenerateRequest(text="x"))))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("pair", ["shm", "tcp"], indirect=True)
async def test_a_storm_of_aborts_leaks_nothing(pair, prompts) -> None:
    """Rooms are ended at random moments on either leg, and then on the other; those that are left alone are answered in full."""
    chance = random.Random(11)

    async def couple(leg, number: int, room, other) -> None:
        """What a gateway does: the first leg that fails ends the other."""
        if await room.until_over() == "failed" and not other.over:
            await leg.abort(number, common_pb2.ORIGIN_GATEWAY)

    async def one(number_of_tokens: int, max_tokens: int) -> None:
        number, first, rest = await pair.start(prompts(number_of_tokens), max_tokens)
        fate = chance.choice(["leave", "prefill", "decode", "both"])
        if fate != "leave":
            await asyncio.sleep(chance.random() * 0.2)
            if fate in ("prefill", "both"):
                await pair.prefill.abort(number)
            if fate in ("decode", "both"):
                await pair.decode.abort(number)
        await asyncio.gather(couple(pair.decode, number, first, rest), couple(pair.prefill, number, rest, first))
        ends = [await first.until_over(), await rest.until_over()]
        if fate == "leave":
            assert ends == ["transferred", "finished"], (first.failure, rest.failure)
            assert len(first.tokens + rest.tokens) == max_tokens

    for _ in range(4):
        await asyncio.gather(*(one(chance.randrange(1, 300), chance.randrange(1, 30)) for _ in range(48)))
    await pair.until_free(timeout_s=5)
