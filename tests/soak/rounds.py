"""One round: clients ask and ask while processes are killed and started again, one at a time; then everybody stops, and what is held is counted."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import dataclass, field

from fleet import Worker, wait_for
from soak.clients import Answers, Client, Judgement, Question, ask
from soak.house import Held, House

#: After a gateway is back its clients' broken connections are still being noticed.
GRACE_S = 5.0
ETCD_AWAY_S = 2.0
QUIET_WITHIN_S = 60.0
#: While all the others are at work under hundreds of clients.
STARTS_WITHIN_S = 300.0
#: What may be there more than at the first checkpoint: threads and connections that are made when they are first needed.
MORE_DESCRIPTORS = 8
MORE_THREADS = 8
MORE_MEMORY = 1.10
MORE_MEMORY_MIB = 48.0
#: UCX makes 4.2 MiB for a pair when it first writes; at the first checkpoint two of the four pairs may not have.
MORE_SHARED_MIB = 10.0


@dataclass(frozen=True)
class Restart:
    """kind: "prefill", "decode", "gateway" or "etcd". how: SIGKILL or SIGTERM."""

    kind: str
    how: signal.Signals

    def __str__(self) -> str:
        return f"{self.kind} {self.how.name}"


KINDS = ("prefill", "decode", "gateway")
#: Over two rounds every kind dies both ways.
KILLED = (*(Restart(kind, signal.SIGKILL) for kind in KINDS), Restart("etcd", signal.SIGTERM))
STOPPED = (*(Restart(kind, signal.SIGTERM) for kind in KINDS), Restart("etcd", signal.SIGKILL))


@dataclass
class Round:
    """What a round came to. away_s: how long each restart took until every pair was in use again."""

    judgement: Judgement = field(default_factory=Judgement)
    away_s: list[tuple[str, float]] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    shared_mib: float = 0.0
    seconds: float = 0.0


class Soak:
    """`questions` with the answers of an undisturbed run: over gRPC and over HTTP."""

    def __init__(self, house: House, questions: list[Question], num_clients: int, deadline_s: float, seed: int) -> None:
        self.house = house
        self.dice = random.Random(seed)
        self._questions = questions
        self.num_clients = num_clients
        self._deadline_s = deadline_s
        self._right: dict[tuple[str, Question], Answers] = {}
        self._down_until: dict[int, float] = {}
        self._first: Round | None = None

    async def learn(self) -> None:
        """The undisturbed answers."""
        clients = self._clients(2)
        for client in clients:
            for question in self._questions:
                self._right[client.protocol, question] = await client.answer_of(question, 0)
            await client.close()

    async def play(self, restarts: tuple[Restart, ...]) -> Round:
        """Every client asks at least once, and on until the last restart is over. Ends quiet. Raises AssertionError for anything wrong."""
        began = time.monotonic()
        result = Round()
        clients = self._clients(self.num_clients)
        chaos = asyncio.create_task(self._restart_all(restarts, result))
        try:
            await asyncio.gather(chaos, *(self._life(client, chaos, result.judgement) for client in clients))
        finally:
            chaos.cancel()
            await asyncio.gather(*(client.close() for client in clients))
        result.seconds = time.monotonic() - began
        assert_named(result.judgement)
        await asyncio.to_thread(self.house.wait_quiet, QUIET_WITHIN_S)
        await asyncio.to_thread(self._count, result)
        self._first = self._first or result
        return result

    def _clients(self, count: int) -> list[Client]:
        gateways = [(gateway.address("grpc"), gateway.address("http")) for gateway in self.house.gateways]
        return [Client(number, gateways, self._deadline_s, self.dice.randrange(2**30)) for number in range(count)]

    async def _life(self, client: Client, chaos: asyncio.Task[None], into: Judgement) -> None:
        asked = False
        while not asked or not chaos.done():
            gateway = client.dice.randrange(len(self.house.gateways))
            question = client.dice.choice(self._questions)
            asked = True
            if not await ask(client, question, self._right[client.protocol, question], gateway, self._is_down, into):
                await asyncio.sleep(client.dice.uniform(0.2, 1.0))
            if into.wrong or into.hung or into.nameless:
                return  # nothing that follows could make it right

    def _is_down(self, gateway: int) -> bool:
        return time.monotonic() < self._down_until.get(gateway, 0.0)

    # --- restarts

    async def _restart_all(self, restarts: tuple[Restart, ...], into: Round) -> None:
        await asyncio.sleep(1.0)
        for restart in restarts:
            if restart.kind == "etcd" and self.house.etcd is None:
                continue
            began = time.monotonic()
            if restart.kind == "etcd":
                await asyncio.to_thread(self._restart_etcd, restart.how)
            else:
                worker = self.dice.choice([worker for worker in self.house._all() if worker.spec.name.startswith(restart.kind)])
                number = self.house.gateways.index(worker) if worker in self.house.gateways else None
                if number is not None:
                    self._down_until[number] = float("inf")
                await asyncio.to_thread(restart_one, worker, restart.how)
                if number is not None:
                    self._down_until[number] = time.monotonic() + GRACE_S
            await asyncio.to_thread(self.house.wait_in_use)
            self.house.note_pids()
            into.away_s.append((str(restart), time.monotonic() - began))

    def _restart_etcd(self, how: signal.Signals) -> None:
        assert self.house.etcd is not None
        self.house.etcd.stop(how)
        time.sleep(ETCD_AWAY_S)
        self.house.etcd.start()

    # --- what is held

    def _count(self, result: Round) -> None:
        """Connections of clients that left close a moment later, so this waits for what must not be more than at the first checkpoint."""
        if self._first is not None:
            wait_for(lambda: not self._grown(), QUIET_WITHIN_S, lambda: "; ".join(self._grown()))
        result.held, result.shared_mib = self.house.held(), self.house.shared_memory_mib()

    def _grown(self) -> list[str]:
        """What is more than at the first checkpoint, in words."""
        assert self._first is not None
        before = {held.name: held for held in self._first.held}
        grown = [text for now in self.house.held() for text in _more(before[now.name], now)]
        shared = self.house.shared_memory_mib()
        if shared > self._first.shared_mib + MORE_SHARED_MIB:
            grown.append(f"shared memory was {self._first.shared_mib:.0f} MiB, is {shared:.0f}")
        return grown


def _more(before: Held, now: Held) -> list[str]:
    limits = {
        "rooms": 0.0,
        "pages": 0.0,
        "descriptors": before.descriptors + MORE_DESCRIPTORS,
        "threads": before.threads + MORE_THREADS,
        "memory_mib": before.memory_mib * MORE_MEMORY + MORE_MEMORY_MIB,
    }
    return [
        f"{now.name}: {what} was {getattr(before, what):.0f}, is {getattr(now, what):.0f}"
        for what, limit in limits.items()
        if getattr(now, what) > limit
    ]


def restart_one(worker: Worker, how: signal.Signals) -> None:
    if how is signal.SIGKILL:
        worker.kill()
    else:
        worker.stop()
    worker.start().wait_ready(STARTS_WITHIN_S)


def assert_named(judgement: Judgement) -> None:
    """Every request was answered as in an undisturbed run, or failed by name, in time."""
    for what, found in (("wrong", judgement.wrong), ("hung", judgement.hung), ("nameless", judgement.nameless)):
        assert not found, f"{len(found)} {what}: " + "\n".join(found[:5])
