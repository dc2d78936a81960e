"""Requests of the contract as Starts of ours, field by field; what is not made is refused by its name."""

from __future__ import annotations

import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from baton.sglangcompat.requests import to_start
from baton.sglangcompat.rooms import room_number
from baton.wire.v1 import common_pb2, worker_pb2
from baton.workerkit import RefusedError

EOS = (2, 7)


def info(level: int = 0) -> worker_pb2.WorkerInfo:
    mark = common_pb2.KVFingerprint(page_size=16)
    load = worker_pb2.WorkerLoad(total_pages=10)
    return worker_pb2.WorkerInfo(vocab_size=1000, max_model_len=256, fingerprint=mark, load=load, sampling_level=level)


def test_a_room_is_the_same_on_both_servers_and_different_for_every_request() -> None:
    rooms = {room_number(request_id, room) for request_id in ("a", "b", "a-1") for room in (0, 1, 2**31 - 1, -1)}
    assert len(rooms) == 12
    assert all(0 < room < 2**63 for room in rooms)
    assert room_number("a", 1) == room_number("a", 1)


def test_every_field_arrives(request_type) -> None:
    given = request_type(temperature=0.5, top_p=0.9, top_k=40, min_p=0.25, min_new_tokens=2, stop_token_ids=[9, 7], pairing={"bootstrap_room": 3})
    start = to_start(given, info(), EOS)
    sampling = start.sampling
    assert start.room == sampling.seed == room_number("chatcmpl-1", 3)
    assert list(start.prompt_token_ids) == [0, 1, 2, 3, 4]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, pytest.approx(0.9), 40, 0.25)
    assert (sampling.max_tokens, sampling.min_tokens) == (4, 2)
    assert list(sampling.stop_token_ids) == [2, 7, 9]
    assert not start.WhichOneof("leg")


def test_defaults_of_the_contract_are_off(request_type) -> None:
    sampling = to_start(request_type(max_new_tokens=None, ignore_eos=True), info(), EOS).sampling
    assert sampling.top_k == 0
    assert not sampling.stop_token_ids
    assert sampling.max_tokens == 10 * 16 - 5  # as long as the pool holds


def test_penalties_and_bias_go_to_a_server_that_heeds_them_and_to_no_other(request_type) -> None:
    request = request_type(frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.25, logit_bias={"5": 1.5})
    sampling = to_start(request, info(level=1), EOS).sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.25)
    assert (list(sampling.bias_token_ids), list(sampling.bias_values)) == ([5], [1.5])
    for one in ({"frequency_penalty": 0.5}, {"presence_penalty": -0.5}, {"repetition_penalty": 1.25}, {"logit_bias": {"5": 1.5}}):
        with pytest.raises(RefusedError, match=f"sampling_params.{next(iter(one))}=.* is not heeded"):
            to_start(request_type(**one), info(), EOS)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"regex": "a+"}, "sampling_params.regex"),
        ({"json_schema": "{}"}, "sampling_params.json_schema"),
        ({"ebnf_grammar": "x"}, "sampling_params.ebnf_grammar"),
        ({"structural_tag": "x"}, "sampling_params.structural_tag"),
        ({"n": 2}, "sampling_params.n=2"),
        ({"stop": ["end"]}, r"sampling_params.stop=\['end'\]"),
        ({"custom_params": {"a": 1}}, r"sampling_params.custom_params=\['a'\]"),
        ({"top_k": -2}, "sampling_params.top_k=-2"),
        ({"top_k": 1001}, r"sampling_params.top_k=1001 is outside \[0, 1000\]"),
    ],
)
def test_sampling_that_is_not_made_is_refused(request_type, more, said) -> None:
    with pytest.raises(RefusedError, match=said) as caught:
        to_start(request_type(**more), info(), EOS)
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "more",
    [
        {"return_logprob": True},
        {"token_ids_logprob": [1]},
        {"return_hidden_states": True},
        {"custom_logit_processor": "x"},
        {"input_embeds": [0.5]},
        {"lora_id": "x"},
        {"mm_inputs": pb.MultimodalInputs(image_urls=["x"])},
        {"data_parallel_rank": 1},
    ],
    ids=lambda more: next(iter(more)),
)
def test_requests_for_what_is_not_made_are_refused(request_type, more) -> None:
    request = request_type()
    request.MergeFrom(pb.GenerateRequest(**more))
    with pytest.raises(RefusedError, match=next(iter(more))):
        to_start(request, info(level=1), EOS)


@pytest.mark.parametrize("request_id", ["", "x" * 513])
def test_a_request_must_have_an_id(request_type, request_id) -> None:
    with pytest.raises(RefusedError, match="request_id"):
        to_start(request_type(request_id), info(), EOS)


def test_a_bias_for_no_token_is_refused(request_type) -> None:
    for text in ("1000", "-1", "a", "٣"):
        with pytest.raises(RefusedError, match="no token of the vocabulary"):
            to_start(request_type(logit_bias={text: 1.0}), info(level=1), EOS)
