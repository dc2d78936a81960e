"""Greedy output of the split is, token for token, that of a plain server and of Hugging Face transformers on the same weights in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fleet import MODEL, Fleet

from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 200, 256, 300, 511, 700, 1024, 1500, 3000)
NUM_NEW = 64
TEXT = Path(__file__).parents[1] / "LICENSE"


@pytest.fixture(scope="session")
def prompts(model_path: Path) -> list[list[int]]:
    """Twenty prompts of real text, 1 to 3,000 tokens, each from another place of it."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(TEXT.read_text() * 2).ids
    assert len(ids) > LENGTHS[-1] + 37 * len(LENGTHS)
    return [ids[37 * i : 37 * i + n] for i, n in enumerate(LENGTHS)]


class Greedy:
    """Hugging Face transformers in float32 as the judge: an answer is its greedy one exactly when each token is the argmax after those before it.

    All tokens of an answer are judged in one forward pass, which by induction says the same as generating them one by one.
    """

    def __init__(self, model_path: Path, prompts: list[list[int]]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._prompts = prompts
        self._judged: dict[int, list[int]] = {}

    def argmax_of(self, prompt: list[int], answer: list[int]) -> list[int]:
        """What transformers would say at each place of the answer."""
        ids = self._torch.tensor([prompt + answer[:-1]])
        with self._torch.inference_mode():
            logits = self._model(ids, logits_to_keep=NUM_NEW).logits[0]
        return logits.argmax(-1).tolist()

    def generated(self, prompt: list[int]) -> list[int]:
        """What transformers itself generates, token by token."""
        ids = self._torch.tensor([prompt])
        self._model.generation_config.eos_token_id = None
        out = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
        return out[0, len(prompt) :].tolist()

    def judge(self, answers: list[list[int]]) -> None:
        """Fails with both sides where an answer is not greedy. An answer that was judged right before is only compared."""
        wrong = {}
        for i, answer in enumerate(answers):
            assert len(answer) == NUM_NEW
            if self._judged.get(i) != answer:
                said = self.argmax_of(self._prompts[i], answer)
                if said == answer and i not in self._judged:
                    self._judged[i] = answer
                else:
                    wrong[LENGTHS[i]] = (answer, said, self._judged.get(i))
        assert not wrong, f"prompts of these lengths differ (ours, transformers, ours before): {wrong}"


@pytest.fixture(scope="session")
def greedy(model_path: Path, prompts: list[list[int]]) -> Greedy:
    return Greedy(model_path, prompts)


async def answers_of(fleet: Fleet, prompts: list[list[int]], concurrency: int) -> tuple[list[list[int]], list[pb.RoomReport]]:
    gate = asyncio.Semaphore(concurrency)

    async def one(stub: InferenceStub, prompt: list[int]) -> tuple[list[int], pb.RoomReport]:
        sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=prompt), sampling=sampling, report=True)
        tokens: list[int] = []
        report = pb.RoomReport()
        async with gate:
            async for message in stub.Generate(request, timeout=600):
                tokens += message.token_ids
                if message.HasField("report"):
                    report = message.report
                    assert message.usage.completion_tokens == NUM_NEW
        return tokens, report

    async with grpc.aio.insecure_channel(fleet.grpc, options=CHANNEL_OPTIONS) as channel:
        # Long ones first: the others then run beside their prefill.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i])) if concurrency > 1 else range(len(prompts))
        done = await asyncio.gather(*(one(InferenceStub(channel), prompts[i]) for i in order))
    by_prompt = dict(zip(order, done, strict=True))
    return [by_prompt[i][0] for i in range(len(prompts))], [by_prompt[i][1] for i in range(len(prompts))]


def assert_moved(reports: list[pb.RoomReport], transports: set[str], *, are_new: bool) -> None:
    """are_new: the first time that these servers are asked; after that they find most of each prompt in their caches."""
    for length, report in zip(LENGTHS, reports, strict=True):
        assert report.transfer.digest_checked
        if are_new:
            assert report.transfer.bytes >= length * 46_080, f"{length} tokens moved {report.transfer.bytes} bytes"
            assert report.transfer.puts > 0
        assert set(report.transfer.transport.split(",")) & transports, report.transfer.transport


@pytest.mark.parametrize("concurrency", [16, 1])
async def test_split_over_shared_memory(shm_fleet: Fleet, prompts: list[list[int]], greedy: Greedy, concurrency: int) -> None:
    answers, reports = await answers_of(shm_fleet, prompts, concurrency)
    greedy.judge(answers)
    assert_moved(reports, {"sysv", "posix", "cma", "memory"}, are_new=concurrency == 16)
    shm_fleet.assert_free()


@pytest.mark.parametrize("concurrency", [16, 1])
async def test_split_over_tcp(tcp_fleet: Fleet, prompts: list[list[int]], greedy: Greedy, concurrency: int) -> None:
    answers, reports = await answers_of(tcp_fleet, prompts, concurrency)
    greedy.judge(answers)
    assert_moved(reports, {"tcp"}, are_new=concurrency == 16)
    tcp_fleet.assert_free()


async def test_plain(plain_fleet: Fleet, prompts: list[list[int]], greedy: Greedy) -> None:
    answers, _ = await answers_of(plain_fleet, prompts, 16)
    greedy.judge(answers)
    plain_fleet.assert_free()


def test_the_judge_can_say_no(prompts: list[list[int]], greedy: Greedy) -> None:
    """What transformers generates is greedy; with one token changed it is not."""
    answer = greedy.generated(prompts[5])
    assert len(answer) == NUM_NEW
    assert greedy.argmax_of(prompts[5], answer) == answer
    answer[20] = (answer[20] + 1) % 49_152
    assert greedy.argmax_of(prompts[5], answer) != answer
