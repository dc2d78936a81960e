"""Real prefill and decode processes of several ranks each, over real UCX: equal and unequal degrees give the tokens of one plain server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.wire.v1 import common_pb2, worker_pb2

LENGTHS = [1, 15, 16, 17, 100, 333]
NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS, PAGE_SIZE = 6, 8, 3, 16
#: See conftest: a prefill that takes a while, and a decode that soon calls a Revoke overdue.
SLOW_PREFILL = ("--max-batched-tokens", "16", "--max-running", "16")
DECODE = ("--digest", "all", "--revoke-timeout-s", "2")
LONG = 1500


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose heads, words and inner columns can be shared by 1, 2, 3 and 6."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(9)
    folder = tmp_path_factory.mktemp("wide-model")
    sizes = {"vocab_size": 528, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 12}
    config = LlamaConfig(**sizes, num_key_value_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=4096, initializer_range=0.5)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wanted():
    return [([(length * 7919 + 31 * index * index + index) % 512 for index in range(length)], 12) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(wide_model, wanted):
    """transformers' own greedy answers: no engine of ours has a say."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(wide_model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt, max_tokens in wanted:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def ranks(degree: int) -> tuple[str, str]:
    return ("--tensor-parallel", str(degree))


@pytest.fixture
def servers(fleet, wide_model):
    """servers(prefill's degree, decode's degree, transport) -> both, ready."""
    fleet.model = wide_model
    return lambda source, target, transport="shm": fleet.pair_of_servers(transport, (*SLOW_PREFILL, *ranks(source)), (*DECODE, *ranks(target)))


@pytest.mark.parametrize(("source", "target", "transport"), [(2, 1, "shm"), (1, 2, "tcp"), (2, 2, "shm"), (3, 2, "shm")])
async def test_the_split_equals_one_server(servers, leg_type, pair_type, wanted, expected, source, target, transport) -> None:
    prefill, decode = servers(source, target, transport)
    async with leg_type(prefill) as first, leg_type(decode) as second:
        pair = pair_type(first, second)
        await pair.connect()
        at_once = await asyncio.gather(*(pair.answer(prompt, max_tokens) for prompt, max_tokens in wanted))
        assert at_once == expected
        await what_moved_is_the_whole_prompt_once(pair, [token + 1 for token in wanted[4][0]])
        await rooms_that_are_ended_give_their_pages_back(pair)
        assert await pair.answer(*wanted[5]) == expected[5]
        await pair.until_free()
    for server in (decode, prefill):
        assert server.stop() == 0, server.log
        assert '"level": "error"' not in server.log


async def what_moved_is_the_whole_prompt_once(pair, prompt) -> None:
    """prompt: a new one, of which no prefix cache has anything."""
    _, sent, landed = await pair.start(prompt, 4)
    assert await landed.until_over() == "finished"
    await sent.until_over()
    transfer = sent.events["transferred"].transferred.transfer
    num_pages = -(-len(prompt) // PAGE_SIZE)
    assert transfer.bytes == num_pages * PAGE_SIZE * 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4
    assert transfer.digest_checked
    assert landed.events["kv_ready"].kv_ready.digest_checked
    assert landed.events["reserved"].reserved.pages == num_pages


async def rooms_that_are_ended_give_their_pages_back(pair) -> None:
    """In mid-transfer, by decode (Revoke), by prefill (the negative acknowledgement) and by both."""
    prompt = [(3 * index * index + index) % 512 for index in range(LONG)]
    for legs in ((pair.decode,), (pair.prefill,), (pair.prefill, pair.decode)):
        number, first, rest = await pair.start(prompt, 8)
        await first.until("transfer_started")
        for leg in legs:
            await leg.abort(number)
        assert await first.until_over() == "failed"
        assert await rest.until_over() == "failed"
        assert "kv_ready" not in rest.events
        await pair.until_free()


async def test_a_plain_server_of_several_ranks(fleet, wide_model, leg_type, wanted, expected) -> None:
    fleet.model = wide_model
    server = fleet.plain(*ranks(3)).wait_ready()
    async with leg_type(server) as leg:
        rooms = [await leg.start(number, *each, plain=worker_pb2.PlainLeg()) for number, each in enumerate(wanted, start=1)]
        assert [await room.until_over() for room in rooms] == ["finished"] * len(rooms)
        assert [room.tokens for room in rooms] == expected
        await leg.until_free()
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_prefill_killed_in_mid_transfer(servers, leg_type, pair_type, transport) -> None:
    """Decode's pages come back by the fence of every rank's inbox, and by nothing else."""
    prefill, decode = servers(3, 2, transport)
    async with leg_type(decode) as second:
        async with leg_type(prefill) as first:
            pair = pair_type(first, second)
            await pair.connect()
            _, sent, rest = await pair.start([5] * LONG, 8)
            await sent.until("transfer_started")
            prefill.kill()
            assert await rest.until_over() == "failed"
            assert (rest.failure.origin, rest.failure.cause) == (common_pb2.ORIGIN_PREFILL, "prefill_lost")
        await second.until_free()
    assert decode.stop() == 0, decode.log


def test_a_degree_that_does_not_divide_is_refused_by_name(fleet, wide_model) -> None:
    fleet.model = wide_model
    server = fleet.prefill(*ranks(4))
    assert server.process.wait(timeout=60) != 0
    assert "tensor_parallel = 4: must divide num_key_value_heads (6); this model takes 1, 2, 3, 6" in server.log
