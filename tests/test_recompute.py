"""--kv-load-failure-policy recompute on real processes and the real model: whatever is killed, no client sees another token than without it.

Eight requests at once, greedy and sampled, over gRPC and over HTTP, some with two answers, with two prompts, held to an expression or with log
probabilities, are first run undisturbed. Then they are run again, and a server is killed (-9) in the middle. Two prefill and two decode servers: what
is killed can be replaced.
"""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fleet import MODEL, Fleet, Worker, wait_for

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.integration, pytest.mark.long]

NUM_TOKENS = 24
LONG = 900
NUM_ROUTES = 4
CHUNK = 128
#: More words than an answer has tokens.
WORDS = "[a-z]+( [a-z]+){60}"

#: By answer: its tokens, or over HTTP its text, and the most probable token at each place, where they were asked for.
Told = dict[int, tuple[list[int | str], list[int]]]
NUM_PAGES = 512


@dataclass
class Client:
    """One request on a thread of its own. parts: how many tokens of each answer have come; over HTTP pieces of text."""

    fleet: Fleet
    number: int
    told: Told = field(default_factory=dict)
    parts: Counter[int] = field(default_factory=Counter)
    problem: str = ""

    @property
    def prompt(self) -> list[int]:
        """Two long ones, whose prefill and transfer take a while, and six short ones."""
        length = LONG if self.number < 2 else 5 + 9 * self.number
        return [100 + (self.number * 37 + i * 7) % 4000 for i in range(length)]

    @property
    def num_answers(self) -> int:
        """Two of a long prompt and of a short one, and to each of two prompts (over HTTP)."""
        return 2 if self.number in (1, 5, 7) else 1

    @property
    def temperature(self) -> float:
        return float(self.number % 2)

    @property
    def frequency_penalty(self) -> float:
        """Of some: what it penalises is what is computed again."""
        return 0.6 * (self.number % 3)

    def start(self) -> Client:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            ask = self._over_http if self.number % 4 == 3 else self._over_grpc
            ask()
        except (grpc.RpcError, httpx.HTTPError) as error:
            self.problem = error.details() if isinstance(error, grpc.Call) else repr(error)

    def _over_grpc(self) -> None:
        sampling = pb.SamplingParams(
            temperature=self.temperature,
            frequency_penalty=self.frequency_penalty,
            seed=self.number,
            max_tokens=NUM_TOKENS,
            min_tokens=NUM_TOKENS // 2,
            ignore_eos=True,
            n=self.num_answers,
        )
        if self.number == 4:
            sampling.structured.regex, sampling.min_tokens, sampling.ignore_eos = WORDS, 0, False
        if self.number in (1, 2):
            sampling.top_logprobs = 1
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=self.prompt), sampling=sampling)
        with grpc.insecure_channel(self.fleet.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            for message in InferenceStub(channel).Generate(request, timeout=240):
                self.parts[message.choice] += len(message.token_ids)
                tokens, best = self.told.setdefault(message.choice, ([], []))
                tokens += message.token_ids
                best += [said.top_token_ids[0] for said in message.logprobs]

    def _over_http(self) -> None:
        prompt = [self.prompt, [500, *self.prompt]] if self.num_answers > 1 else self.prompt
        body = {"model": MODEL, "prompt": prompt, "temperature": self.temperature, "seed": self.number, "max_tokens": NUM_TOKENS}
        body |= {"frequency_penalty": self.frequency_penalty, "n": self.num_answers}
        with httpx.stream(
            "POST", f"http://{self.fleet.http}/v1/completions", json=body | {"ignore_eos": True, "stream": True}, timeout=240
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.problem = self.problem or json.dumps(event.get("error", ""))[:-1].removeprefix('"')
                    for choice in event.get("choices", []):
                        self.parts[choice["index"]] += bool(choice["text"])
                        pieces, _ = self.told.setdefault(choice["index"], ([""], []))
                        pieces[0] += choice["text"]

    @property
    def num_tokens(self) -> int:
        return sum(list(self.parts.values()))

    def is_answered(self, num_tokens: int) -> bool:
        """Whether so many tokens of each of its answers are here; over HTTP it may ask two prompts at once."""
        num_prompts = 2 if self.number % 4 == 3 and self.num_answers > 1 else 1
        return len(self.parts) == num_prompts * self.num_answers and min(list(self.parts.values())) >= num_tokens

    def answer(self) -> Told:
        self.thread.join(240)
        assert not self.thread.is_alive(), f"request {self.number} hangs"
        assert not self.problem, f"request {self.number}: {self.problem}"
        return self.told


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(model_path, tmp_path_factory.mktemp("recompute"))
    for _ in range(2):
        fleet.prefill("--transport", "shm", "--num-pages", str(NUM_PAGES), "--max-batched-tokens", str(CHUNK))
        fleet.decode("--transport", "shm", "--num-pages", str(NUM_PAGES), "--digest", "all")
    # Silence is noticed late, so that a busy machine's pauses are none.
    fleet.start("--kv-load-failure-policy", "recompute", "--silence-limit-s", "10")
    whole_again(fleet)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[Told]:
    clients = everybody(fleet)
    answers = [client.answer() for client in clients]
    assert [len(answer) for answer in answers] == [1, 2, 1, 1, 1, 2, 1, 4]
    for client, answer in zip(clients, answers, strict=True):
        assert client.number % 4 == 3 or {len(tokens) for tokens, _ in answer.values()} == {NUM_TOKENS}
        assert {len(best) for _, best in answer.values()} == {NUM_TOKENS if client.number in (1, 2) else 0}
    assert not retried(fleet), "the undisturbed run was disturbed"
    fleet.assert_free(10)
    return answers


def everybody(fleet: Fleet) -> list[Client]:
    return [Client(fleet, number).start() for number in range(8)]


def whole_again(fleet: Fleet) -> None:
    def num_routes() -> int:
        return int(httpx.get(f"http://{fleet.http}/ready", timeout=5).json()["routes"])

    wait_for(lambda: num_routes() == NUM_ROUTES, 120, "every pair usable")


def said(fleet: Fleet, event: str) -> list[dict[str, Any]]:
    """What the gateway's log says of one kind of event. Its last line may be half written."""
    assert fleet.gateway is not None
    lines = fleet.gateway.running.log_path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if f'"event": "{event}"' in line]


def retried(fleet: Fleet) -> list[dict[str, Any]]:
    return said(fleet, "room retried")


def in_transfer(fleet: Fleet) -> list[str]:
    """Prefill instances that write a long prompt's pages now."""
    states = {record["room"]: record["state"] for record in said(fleet, "room")}
    opened = [record for record in said(fleet, "room opened") if record["prompt_tokens"] >= LONG]
    failed = {record["room"] for record in said(fleet, "room failed")}
    return [record["servers"][0] for record in opened if states.get(record["room"]) == "TRANSFERRING" and record["room"] not in failed]


def of(fleet: Fleet, kind: str) -> list[Worker]:
    return [worker for worker in fleet.workers if worker.spec.name.startswith(kind)]


def busiest(fleet: Fleet, kind: str) -> Worker:
    return max(of(fleet, kind), key=lambda worker: worker.info().load.rooms)


def tokens_of(clients: list[Client]) -> int:
    return sum(client.num_tokens for client in clients)


# --- when to kill whom: each returns the victim, dead ---------------------------------------------------------------------------------


def decode_in_mid_stream(fleet: Fleet, clients: list[Client]) -> Worker:
    """After all short requests have some tokens."""
    wait_for(lambda: all(client.num_tokens >= 4 for client in clients[2:]), 120, "four tokens for each")
    return killed(busiest(fleet, "decode"))


def decode_in_transfer(fleet: Fleet, clients: list[Client]) -> Worker:
    wait_for(lambda: any(worker.info().load.published_pages for worker in of(fleet, "decode")), 120, "published pages")
    return killed(max(of(fleet, "decode"), key=lambda worker: worker.info().load.published_pages))


def prefill_in_transfer(fleet: Fleet, clients: list[Client]) -> Worker:
    """Its long prompt is on its way, the short ones behind it wait for their turn."""
    wait_for(lambda: bool(in_transfer(fleet)), 120, "a long prompt in transfer")
    (instance, *_) = in_transfer(fleet)
    return killed(next(worker for worker in of(fleet, "prefill") if worker.info().instance_id == instance))


def prefill_in_mid_stream(fleet: Fleet, clients: list[Client]) -> Worker:
    """After its part is done, for every prompt and answer of every client."""
    wait_for(lambda: all(client.is_answered(3) for client in clients), 120, "three tokens of each answer")
    return killed(busiest(fleet, "prefill"))


def killed(worker: Worker) -> Worker:
    worker.kill()
    return worker


Kill = Callable[[Fleet, list[Client]], Worker]


@pytest.mark.parametrize(
    ("kill", "stages"),
    [
        (decode_in_mid_stream, {"SUCCESS"}),
        (decode_in_transfer, {"BOOTSTRAPPING", "WAITING", "TRANSFERRING"}),
        (prefill_in_transfer, {"TRANSFERRING"}),
        (prefill_in_mid_stream, set()),
    ],
)
def test_a_death_changes_no_token(fleet: Fleet, undisturbed: list[Told], kill: Kill, stages: set[str]) -> None:
    """`stages`: at least one of these is where rooms were when it happened; none: no room needed another one."""
    before = len(retried(fleet))
    clients = everybody(fleet)
    victim = kill(fleet, clients)
    answers = [client.answer() for client in clients]
    moved = retried(fleet)[before:]
    victim.start().wait_ready()
    whole_again(fleet)
    assert answers == undisturbed
    seen = {record["stage"] for record in moved}
    assert bool(seen) == bool(stages), moved
    assert not stages or seen & stages, moved
    assert all(record["origin"] in victim.spec.name for record in moved), moved
    fleet.assert_free(30)


def test_prefill_killed_before_decodes_pages_are_known(fleet: Fleet, undisturbed: list[Told]) -> None:
    """Decode servers stand still meanwhile, so that every room is in BOOTSTRAPPING."""
    before = len(retried(fleet))
    frozen = of(fleet, "decode")
    for worker in frozen:
        worker.running.send(signal.SIGSTOP)
    clients: list[Client] = []
    try:
        clients = everybody(fleet)
        wait_for(lambda: busiest(fleet, "prefill").info().load.rooms >= 2, 120, "rooms on a prefill server")
        victim = killed(busiest(fleet, "prefill"))
    finally:
        for worker in frozen:
            worker.running.send(signal.SIGCONT)
    answers = [client.answer() for client in clients]
    moved = retried(fleet)[before:]
    victim.start().wait_ready()
    whole_again(fleet)
    assert answers == undisturbed
    assert {record["stage"] for record in moved if record["origin"] == "prefill"} == {"BOOTSTRAPPING"}, moved
    fleet.assert_free(30)


def test_one_after_the_other(fleet: Fleet, undisturbed: list[Told]) -> None:
    """A decode server in mid-stream, then the prefill server that helped to replace it: some requests move twice."""
    clients = everybody(fleet)
    victims = [decode_in_mid_stream(fleet, clients)]
    had = tokens_of(clients)
    wait_for(lambda: any(worker.info().load.rooms for worker in of(fleet, "prefill")) or tokens_of(clients) > had + 40, 120, "a continuation")
    victims.append(killed(busiest(fleet, "prefill")))
    answers = [client.answer() for client in clients]
    for victim in victims:
        victim.start()
    for victim in victims:
        victim.wait_ready()
    whole_again(fleet)
    assert answers == undisturbed
    assert any(int(record["tokens_sent"]) > 1 for record in retried(fleet))
    fleet.assert_free(30)


def test_a_frozen_decode_server_is_left_in_mid_stream(fleet: Fleet, undisturbed: list[Told]) -> None:
    before = len(retried(fleet))
    clients = everybody(fleet)
    wait_for(lambda: all(client.num_tokens >= 4 for client in clients[2:]), 120, "four tokens for each")
    frozen = busiest(fleet, "decode")
    frozen.running.send(signal.SIGSTOP)
    try:
        answers = [client.answer() for client in clients]
    finally:
        frozen.running.send(signal.SIGCONT)
    assert answers == undisturbed
    moved = retried(fleet)[before:]
    # Nobody closes a socket: the gateway's own listening finds it, or, on a busy machine, gRPC's keepalive does so before.
    assert moved
    assert {record["cause"] for record in moved} <= {"decode_silent", "decode_lost"}, moved
    whole_again(fleet)
    fleet.assert_free(30)
