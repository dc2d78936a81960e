"""Workloads: pure functions of seed and index, of the lengths that they promise."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.errors import BenchFileError, SettingError
from baton.bench.workload import (
    ChatWithDocuments,
    FixedLengths,
    MooncakeTrace,
    MultiTurn,
    ShareGPT,
    Workload,
    WorkloadOptions,
    build_workload,
)

PURE: list[type[ChatWithDocuments] | type[FixedLengths] | type[MultiTurn]] = [ChatWithDocuments, FixedLengths, MultiTurn]


@given(st.sampled_from(PURE), st.integers(0, 2**40), st.integers(0, 500))
def test_a_request_depends_on_seed_and_index_alone(kind: type[ChatWithDocuments], seed: int, index: int) -> None:
    request = kind(seed).request(index)
    assert request == kind(seed).request(index)
    assert request.index == index
    assert request.max_tokens >= 1
    assert request.prompt.strip()


@pytest.mark.parametrize("kind", PURE)
def test_another_seed_is_another_text(kind: type[ChatWithDocuments]) -> None:
    assert kind(1).request(3).prompt != kind(2).request(3).prompt


@pytest.mark.parametrize(("share", "block"), [(0.5, 2), (0.1, 10), (0.05, 20), (1.0, 1)])
def test_every_block_of_chat_has_exactly_one_document(share: float, block: int) -> None:
    workload = ChatWithDocuments(7, document_words=500, document_share=share)
    for start in range(0, 10 * block, block):
        requests = [workload.request(index) for index in range(start, start + block)]
        assert sum(request.is_long for request in requests) == 1
    places = {index % block for index in range(10 * block) if workload.request(index).is_long}
    assert len(places) > 1 or block == 1


def test_documents_are_long_and_questions_short() -> None:
    requests = [ChatWithDocuments(1).request(index) for index in range(50)]
    long = [request.num_prompt_words for request in requests if request.is_long]
    short = [request.num_prompt_words for request in requests if not request.is_long]
    assert min(long) > 1500 > 4 * 60 >= max(short)
    assert not any(ChatWithDocuments(1, document_share=0.0).request(index).is_long for index in range(50))


@given(st.integers(1, 3000))
def test_fixed_lengths_are_exact(num_words: int) -> None:
    request = FixedLengths(0, num_words, 17).request(4)
    assert (request.num_prompt_words, request.max_tokens, request.is_long) == (num_words, 17, num_words >= 1000)


def test_turns_of_a_session_extend_each_other_and_all_share_the_system_prompt() -> None:
    workload = MultiTurn(5, num_sessions=3, num_turns=4, shared_words=30)
    requests = [workload.request(index) for index in range(2 * 3 * 4)]
    assert len({request.messages[0] for request in requests}) == 1
    assert len({request.messages[1] for request in requests}) == 6
    for index, request in enumerate(requests[:9]):
        follower = requests[index + 3]
        assert follower.messages[: len(request.messages)] == request.messages
        assert [message.role for message in follower.messages[len(request.messages) :]] == ["assistant", "user"]
    assert len(requests[12].messages) == 2


def test_sharegpt_takes_first_pairs_and_passes_over_what_is_none(tmp_path: Path) -> None:
    entries = [
        {"conversations": [{"from": "human", "value": f"question {number}"}, {"from": "gpt", "value": "one two three"}]} for number in range(20)
    ]
    strange: list[object] = [
        {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]},
        {},
        "text",
        {"conversations": [1, 2]},
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(strange + entries))
    workload = ShareGPT.load(path, seed=1)
    assert workload.size == 20
    prompts = [workload.request(index).prompt for index in range(20)]
    assert sorted(prompts) == sorted(f"question {number}" for number in range(20))
    assert prompts != [ShareGPT.load(path, seed=2).request(index).prompt for index in range(20)]
    assert workload.request(0).max_tokens == 4
    with pytest.raises(SettingError, match="index is 20, but must be below 20"):
        workload.request(20)


def trace_line(at_ms: int, num_tokens: int, hash_ids: list[int]) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": num_tokens, "output_length": 10, "hash_ids": hash_ids})


def test_a_mooncake_trace_shares_what_its_hashes_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([trace_line(4000, 1100, [1, 2, 4]), trace_line(1000, 1030, [1, 2, 3])]))
    workload = MooncakeTrace.load(path, seed=0)
    first, second = workload.request(0), workload.request(1)
    assert (first.arrival_s, second.arrival_s) == (1.0, 4.0)
    assert workload.arrivals().times_s(2).tolist() == [0.0, 3.0]
    ours, theirs = first.prompt.split(), second.prompt.split()
    assert (len(ours), len(theirs)) == (1030, 1100)
    assert ours[:1024] == theirs[:1024]
    assert ours[1024:] != theirs[1024:1030]
    small = MooncakeTrace.load(path, seed=0, length_scale=0.1)
    assert (small.request(0).num_prompt_words, small.request(0).max_tokens) == (103, 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nonsense", r"trace:1 is not a row"),
        (trace_line(0, 10, [1]) + "\n{}", r"trace:2 is not a row.*timestamp"),
        (trace_line(0, 513, [1]), "input_length is 513 with 1 hash_ids"),
        (trace_line(0, 5, [-1]), "hash_ids holds -1"),
        ("", "holds no requests"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BenchFileError, match=named):
        MooncakeTrace.load(path, seed=0)


@pytest.mark.parametrize(("text", "named"), [("{", "is not JSON"), ("{}", "holds a dict"), ("[1]", "none of its 1 entries")])
def test_a_bad_sharegpt_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(BenchFileError, match=named):
        ShareGPT.load(path, seed=0)


def test_options_reach_the_workload() -> None:
    built: Workload = build_workload(WorkloadOptions("chat", 3, prompt_words=20, document_words=100, document_share=0.25, answer_tokens=9))
    assert built == ChatWithDocuments(3, 20, 100, 0.25, 9)
    assert build_workload(WorkloadOptions("turns", 3, num_turns=2, shared_words=0)) == MultiTurn(3, num_turns=2, shared_words=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (WorkloadOptions("poem"), "workload is 'poem', but must be one of chat, fixed"),
        (WorkloadOptions("fixed", document_words=3), "document_words is 3, but the workload 'fixed' has no such option"),
        (WorkloadOptions("fixed", prompt_words=0), "prompt_words is 0"),
        (WorkloadOptions("chat", document_share=1.5), "document_share is 1.5"),
        (WorkloadOptions("chat", seed=-1), "seed is -1"),
        (WorkloadOptions("mooncake"), "name it with --file"),
    ],
)
def test_bad_options_are_named(options: WorkloadOptions, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        build_workload(options)
