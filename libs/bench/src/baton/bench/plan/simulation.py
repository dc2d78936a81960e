"""A fleet that serves a load in simulated time: gateway, servers, links."""

import gc
from collections import deque
from functools import partial

import numpy as np

from baton.bench.errors import require
from baton.bench.plan.clock import Clock
from baton.bench.plan.costs import Costs
from baton.bench.plan.fleet import FleetShape, Picker
from baton.bench.plan.host import Host
from baton.bench.plan.job import Job
from baton.bench.plan.links import Links
from baton.bench.plan.load import Load
from baton.bench.plan.outcome import Outcome
from baton.bench.plan.prefilling import PrefillServer
from baton.bench.plan.server import Scatter, World
from baton.bench.plan.serving import DecodeServer, PlainServer


def simulate(costs: Costs, shape: FleetShape, load: Load, seed: int) -> Outcome:
    """Pure: the same arguments give the same outcome. Every job ends.

    Raises SettingError for a split without path costs, or a request that no server's pool can hold."""
    collects = gc.isenabled()
    gc.disable()  # millions of small objects and no cycles among them
    try:
        return _Simulation(costs, shape, seed).run(load)
    finally:
        if collects:
            gc.enable()


class _Simulation:
    def __init__(self, costs: Costs, shape: FleetShape, seed: int) -> None:
        require(not shape.is_split or costs.path is not None, "path", None, "calibrated: a split was never measured, so its path has no costs")
        self._clock, self._costs, self._shape = Clock(), costs, shape
        self._world = World(self._clock, costs, shape.limits, self._ended)
        self._is_closed = False
        self._draw = np.random.default_rng(seed)
        self._hosts: dict[int, Host] = {}
        self._waiting: deque[Job] = deque()
        self._fronts = Picker(shape.num_prefill or shape.num_plain, shape.routing)
        self._backs = Picker(shape.num_decode, shape.routing) if shape.is_split else self._fronts
        self._routes: dict[int, tuple[int, int]] = {}
        self._build()

    def _build(self) -> None:
        shape, roles = self._shape, self._costs.roles
        self._plain = [PlainServer(self._world, number, self._host(number), self._scatters()) for number in range(shape.num_plain)]
        if not shape.is_split:
            return
        assert self._costs.path is not None
        links = Links(self._clock, self._costs.path)
        self._prefill = [
            PrefillServer(self._world, number, self._host(number), self._scatters(), links, roles.prefill) for number in range(shape.num_prefill)
        ]
        numbers = range(shape.num_prefill, shape.num_servers)
        self._decode = [DecodeServer(self._world, number, self._host(number), self._scatters(), roles.decode) for number in numbers]

    def _host(self, number: int) -> Host | None:
        if self._shape.num_per_host == 1:
            return None
        return self._hosts.setdefault(number // self._shape.num_per_host, Host(self._clock, self._costs.neighbours))

    def _scatters(self) -> tuple[Scatter, Scatter]:
        jitter = self._costs.jitter
        return Scatter(jitter.prefill, self._draw), Scatter(jitter.decode, self._draw)

    def run(self, load: Load) -> Outcome:
        jobs = load.jobs()
        limits = self._shape.limits
        largest = max(job.prompt + job.answer for job in jobs)
        require(largest <= limits.pool_tokens, "num_pages", limits.num_pages, f"at least {limits.pages_for(largest)}: a request has {largest} tokens")
        self._waiting.extend(jobs)
        self._is_closed = load.num_clients > 0
        if self._is_closed:
            for _ in range(min(load.num_clients, len(jobs))):
                self._send_next()
        else:
            self._arrive()
        self._clock.run()
        rows = [server.seats.rows for server in (self._decode if self._shape.is_split else self._plain)]
        servers = [*self._prefill, *self._decode] if self._shape.is_split else self._plain
        prefill_busy_s = sum(server.busy_s for server in self._prefill) if self._shape.is_split else 0.0
        return Outcome(self._shape, jobs, rows, self._clock.now, sum(server.busy_s for server in servers), prefill_busy_s)

    def _arrive(self) -> None:
        """The next arrival of an open loop; one is noted at a time, so that the heap stays small."""
        if self._waiting:
            self._clock.at(self._waiting[0].arrived_s, self._arrived)

    def _arrived(self) -> None:
        self._pass_on(self._waiting.popleft())
        self._arrive()

    def _send_next(self) -> None:
        job = self._waiting.popleft()
        job.arrived_s = self._clock.now
        self._pass_on(job)

    def _pass_on(self, job: Job) -> None:
        self._clock.at(self._clock.now + self._costs.outside_s(is_split=self._shape.is_split), partial(self._route, job))

    def _route(self, job: Job) -> None:
        front = self._fronts.pick()
        self._fronts.loads[front] += job.prompt
        if not self._shape.is_split:
            self._routes[job.index] = (front, front)
            self._plain[front].add(job)
            return
        back = self._backs.pick()
        self._backs.loads[back] += job.prompt
        self._routes[job.index] = (front, back)
        self._prefill[front].expect(job, self._shape.num_prefill + back, self._landed)
        self._decode[back].add(job, self._reserved)

    def _reserved(self, job: Job) -> None:
        assert self._costs.path is not None
        self._clock.at(self._clock.now + self._costs.path.bootstrap_s, partial(self._bootstrapped, job))

    def _bootstrapped(self, job: Job) -> None:
        self._prefill[self._routes[job.index][0]].publish(job)

    def _landed(self, job: Job) -> None:
        front, back = self._routes[job.index]
        self._fronts.loads[front] -= job.prompt
        self._decode[back].land(job)

    def _ended(self, job: Job) -> None:
        _, back = self._routes.pop(job.index)
        self._backs.loads[back] -= job.prompt
        if self._is_closed and self._waiting:
            self._send_next()
