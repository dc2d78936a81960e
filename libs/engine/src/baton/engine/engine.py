"""The engine: one object, one thread, one verb after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.engine.allocator import PageAllocator
from baton.engine.config import EngineConfig, max_model_len, plan_layout
from baton.engine.device.model import DeviceModel
from baton.engine.device.runner import DeviceRunner
from baton.engine.errors import InvalidSettingError
from baton.engine.given_up import GivenUp
from baton.engine.layout import KVLayout
from baton.engine.loader import torch_dtype
from baton.engine.masks import Masks
from baton.engine.models.llama import LlamaModel
from baton.engine.outbox import Outbox
from baton.engine.page_book import PageBook
from baton.engine.parallel.model import ShardedModel
from baton.engine.parallel.pool import ShardedPool
from baton.engine.parallel.runner import ShardedRunner
from baton.engine.pool import KVPool
from baton.engine.ports import KVExporter, KVImporter
from baton.engine.prefix_tree import PrefixTree, PrefixWatcher
from baton.engine.prompt_speed import PromptSpeed
from baton.engine.runner import CpuRunner, Flight, LayerDone, Runner
from baton.engine.scheduling.base import Scheduler
from baton.engine.scheduling.decode import DecodeScheduler
from baton.engine.scheduling.plain import PlainScheduler
from baton.engine.scheduling.prefill import PrefillScheduler
from baton.engine.scheduling.sequence import NO_LOGPROBS, Limits, Sequence, StepPlan
from baton.engine.short_of_memory import FEWER_GRAPHS, SHORTER_STEPS, asked_for
from baton.engine.step_time import ADMIT, COMMIT, DELIVER, LAUNCH, SCHEDULE, WAIT, StepTime
from baton.engine.types import EngineEvent, EngineStats, Failure, Request, Role
from baton.engine.warming import run_unasked

#: Longest wait for a launched step inside `Engine.step`, and how many of them follow each other while nobody is woken: a turn of the loop around each
#: costs the host as much of a step as its plan.
WAIT_S = 0.001
MAX_WAITS = 10


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way. began: when it was launched. goes_on: what it computes had a decode step before, so the device had work all the time."""

    plan: StepPlan
    flight: Flight
    began: float
    given_up: GivenUp
    goes_on: bool


class Engine:
    """Serves rooms in one role. Every method but `give_up` must be called from one and the same thread; none waits for a peer.

    The loop of a service:

        while running:
            take commands -> engine.add / engine.abort
            engine.reap(time.monotonic())
            events = engine.step()
            if not engine.has_work(): sleep until a command, the port's wake or the next reap

    buffer: host memory for the KV pool, at least `plan_layout(...).pool_bytes`, writable, 64-byte aligned; owned by the caller and alive
    for as long as the engine. pool: instead of it, a whole pool of `plan_layout(...)` on the model's device or devices; the only one of the two
    that a sharded model takes. Neither: the engine makes one.
    exporter, importer: the prefill role needs the first, the decode role the second, the plain role neither.
    """

    def __init__(
        self,
        role: Role,
        model: LlamaModel | DeviceModel | ShardedModel,
        config: EngineConfig,
        *,
        buffer: memoryview | None = None,
        pool: KVPool | ShardedPool | None = None,
        exporter: KVExporter | None = None,
        importer: KVImporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if torch_dtype(config.dtype) is not model.dtype:
            raise InvalidSettingError("dtype", config.dtype, f"the model was loaded as {model.dtype}")
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.role = role
        self.layout = plan_layout(model.config, config)
        self.max_model_len = max_model_len(model.config, config)
        self._clock = clock
        pool = pool or _make_pool(model, self.layout, buffer)
        self._device = model.device
        with asked_for("seats of sequences and captured steps", self._device, FEWER_GRAPHS):
            self._runner = _runner(role, model, config, pool, self.max_model_len)
        self._flights: deque[Launched] = deque()
        self._ending: dict[int, Failure] = {}
        self._masks = Masks()
        limits = Limits(
            page_size=config.page_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_running=config.max_running,
            max_model_len=self.max_model_len,
            growth_tokens=config.growth_tokens,
            max_passes=config.max_passes,
            vocab_size=model.config.vocab_size,
            mixed_prompt_tokens=config.mixed_prompt_tokens,
        )
        self._max_batched = config.max_num_batched_tokens
        self._num_added = 0
        self._exporter = exporter
        self._book = PageBook(PageAllocator(self.layout.num_pages), PrefixTree(config.page_size), caches=config.prefix_cache)
        self._scheduler = _scheduler(role, self._book, limits, exporter, importer, self._runner.release)
        self._outbox = Outbox(self._scheduler.take_events)
        self._steps = 0
        self._num_computed_tokens = 0
        self._prompt_speed = PromptSpeed()
        self._last_progress = clock()
        self._tell_step: Callable[[float, int, int], None] | None = None
        self._is_woken: Callable[[], bool] = lambda: True
        #: Where the host's part of steps goes; who calls `step` may add to it.
        self.step_time = StepTime()

    def add(self, request: Request) -> None:
        """Takes a room in. A request that can never fit is answered with a Failed event that has the numbers.

        Raises DuplicateRoomError when the room is still open here.
        """
        self._num_added += 1
        self._scheduler.add(request)

    def abort(self, room: int, failure: Failure) -> None:
        """Ends a room with Failed(failure). Idempotent; unknown rooms are ignored. Pages that a peer may still read or write are
        held back until it is known not to."""
        self._scheduler.abort(room, failure)
        self._ending.pop(room, None)

    def give_up(self, room: int, failure: Failure) -> None:
        """From any thread, right before `abort(room, failure)` is on its way to the engine's: a forward pass that has no room left but such ones
        leaves before its next layer, and ends them. A pass with other rooms in it goes on as it is, and the room is ended by its `abort`."""
        self._ending[room] = failure

    def reap(self, now: float) -> None:
        """Ends every room whose deadline, bootstrap or waiting time has passed; `now` on time.monotonic(). Cheap: call it on a timer."""
        self._scheduler.reap(now)

    def warm_up(self) -> None:
        """Runs steps that nobody asked for, prompts and decode steps of the role, so that the first request does not pay for kernels that are
        compiled, plans that are made and memory that is touched first. Only before the first `add`: it writes into free pages.

        Raises InsufficientMemoryError where a step finds no memory."""
        if self._num_added:
            raise RuntimeError(f"warm_up after {self._num_added} rooms were added: it may run only before the first")
        pool_tokens = self.layout.num_pages * self.layout.page_size
        longest = min(self.max_model_len - 1, self._max_batched, pool_tokens - 1)
        with asked_for(f"a first step of {longest} tokens", self._device, SHORTER_STEPS):
            run_unasked(self._runner, self.role, self.layout, longest)
        self._runner.launches.clear()

    def on_milestones(self, tell: Callable[[list[EngineEvent]], None]) -> None:
        """`tell` gets, on the engine's thread, what is known before a forward pass, between its layers and behind its launch; the step does not
        return it again.

        Without it a room that is bootstrapped, or whose transfer has begun, would be known only when a whole chunk is computed; and a device's next
        step would be launched only when the tokens of the last one are told.
        """
        self._outbox.tell = tell

    def on_step(self, tell: Callable[[float, int, int], None]) -> None:
        """`tell` gets, on the engine's thread, each step that has run: its seconds, its sequences, and its tokens. It returns at once."""
        self._tell_step = tell

    def on_wait(self, is_woken: Callable[[], bool]) -> None:
        """`is_woken` says, on the engine's thread, whether there is a command, or a port has something to tell: asked every `WAIT_S` for which a
        step waits for a device, which waits on while it says False, `MAX_WAITS` times in all. Without it a step returns after the first."""
        self._is_woken = is_woken

    def watch_prefixes(self, watcher: PrefixWatcher) -> None:
        """Tells `watcher`, on the engine's thread, which pages its prefix cache can find, now and whenever that changes: before the step that changed
        it returns, or tells, what came of it."""
        self._book.watch(watcher)

    def step(self) -> list[EngineEvent]:
        """Polls the port, launches at most one forward pass, reads those that have run, and returns everything that happened since the last
        step, in order. Waits for a device at most `WAIT_S` while there is something else to do, so that commands are taken between two steps."""
        self.step_time.skip()
        self._scheduler.poll()
        self.step_time.lap(ADMIT)
        launched = len(self._flights) <= self._runner.depth and self._launch()
        waits = bool(self._flights) and not (launched and len(self._flights) <= self._runner.depth)
        if (waits or self._outbox.has_kept) and self._outbox.tell_all():  # what is known by now waits for no device
            self.step_time.lap(DELIVER)
        if waits:
            self._read(WAIT_S, MAX_WAITS)
        events = self._outbox.rest(self._decodes_on)
        self.step_time.lap(COMMIT)
        return events

    def close(self) -> None:
        """Ends its threads. From the engine's own, or when that has ended; no step after it."""
        self._masks.close()

    def _launch(self) -> bool:
        plan = self._scheduler.plan()
        if not plan.slices:
            self.step_time.lap(SCHEDULE)
            return False
        self._tell_before(plan)
        self._masks.begin(plan)
        self._scheduler.advance(plan)
        began = self._clock()
        self._hand_over_resident(plan)
        given_up = GivenUp([piece.sequence.room for piece in plan.slices], self._ending)
        goes_on = any(piece.start > piece.sequence.num_prompt for piece in plan.slices)
        self.step_time.lap(SCHEDULE)
        self._flights.append(Launched(plan, self._runner.launch(plan, self._layer_done(plan), given_up), began, given_up, goes_on))
        self.step_time.lap(LAUNCH)
        if given_up.at is not None:
            # At once: what they have not computed must be in no further plan, and told to nobody.
            for room in given_up.rooms:
                self._scheduler.abort(room, self._ending[room])
        return True

    def _read(self, timeout_s: float, max_waits: int = 1) -> None:
        """Reads the oldest launched steps as far as they have run."""
        while self._flights:
            flight, waits = self._flights[0].flight, 1
            while not (has_run := flight.wait(timeout_s)) and waits < max_waits and not self._is_woken():
                waits += 1
            self.step_time.lap(WAIT)
            if not has_run:
                return
            launched = self._flights.popleft()
            left = launched.given_up.at is not None
            drawn = [None for piece in launched.plan.slices if piece.samples] if left else launched.flight.drawn()
            if not left and (scored := launched.flight.scored()):
                self._scheduler.score(scored)
            self._scheduler.resolve(launched.plan, drawn, NO_LOGPROBS if left else launched.flight.logprobs())
            self._count(launched)
            self.step_time.lap(COMMIT)
            self.step_time.end(launched.flight.idle_s() if launched.goes_on and self.step_time.is_told else None)
            timeout_s, max_waits = 0.0, 1

    def has_work(self) -> bool:
        """False: another step would do nothing until a command, a wake of the port or a reap."""
        return bool(self._flights) or self._outbox.has_kept or self._scheduler.has_work()

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.steps = self._steps
        stats.last_progress = self._last_progress
        stats.extra["computed_tokens"] = self._num_computed_tokens
        stats.extra["prompt_tokens_per_s"] = self._prompt_speed.tokens_per_s
        stats.extra |= {f"launches_{way}": count for way, count in self._runner.launches.items()}
        return stats

    def _hand_over_resident(self, plan: StepPlan) -> None:
        """Pages of the prefix tree go out before the forward pass: their bytes have been there since a pass whose outcome was read."""
        if self._exporter is not None and plan.resident:
            for layer in range(self.layout.num_layers):
                self._exporter.layer_done(layer, plan.resident, None)

    def _layer_done(self, plan: StepPlan) -> LayerDone | None:
        exporter = self._exporter
        if exporter is None or not plan.exports:
            return None

        def layer_done(layer: int, ready: object | None) -> None:
            exporter.layer_done(layer, plan.exports, ready)
            self.step_time.lap(LAUNCH)
            if isinstance(self._scheduler, PrefillScheduler):
                self._scheduler.poll_started()
            self._read(0.0)  # a first token that waits for the launch of the next prompt is late for nothing
            self._outbox.tell_all()
            self.step_time.lap(COMMIT)

        return layer_done

    def _tell_before(self, plan: StepPlan) -> None:
        """Launching prompts may take milliseconds, and on a CPU it is the computing: nothing waits for that."""
        if self._runner.depth and plan.decodes_only:
            self._outbox.tell_news()
        else:
            self._outbox.tell_all()

    def _decodes_on(self) -> bool:
        """Whether the next call launches a step at once, on a device that computes beside the host."""
        beside = self.role is not Role.PREFILL and self._runner.depth > 0
        return beside and len(self._flights) <= self._runner.depth and self._scheduler.has_work()

    def _count(self, launched: Launched) -> None:
        """A step may have waited for the one before it; one that was given up says nothing about speed."""
        now, plan = self._clock(), launched.plan
        self._steps += 1
        if launched.given_up.at is None:
            took_s = now - max(launched.began, self._last_progress)
            chunks = plan.slices[plan.num_decodes :]
            num_tokens = plan.num_decodes + sum(piece.count for piece in chunks)
            self._num_computed_tokens += num_tokens
            self._prompt_speed.note(sum(piece.count for piece in chunks if piece.count > 1), took_s)
            if self._tell_step is not None:
                self._tell_step(took_s, len(plan.slices), num_tokens)
        self._last_progress = now


def _make_pool(model: LlamaModel | DeviceModel | ShardedModel, layout: KVLayout, buffer: memoryview | None) -> KVPool | ShardedPool:
    if not isinstance(model, ShardedModel):
        return KVPool(layout, model.dtype, buffer, model.device)
    if buffer is not None:
        raise InvalidSettingError("buffer", f"{buffer.nbytes} bytes", f"a model of {model.degree} ranks takes a ShardedPool as pool")
    return ShardedPool.make(layout, model.dtype, model.devices)


def _runner(
    role: Role, model: LlamaModel | DeviceModel | ShardedModel, config: EngineConfig, pool: KVPool | ShardedPool, max_model_len: int
) -> Runner:
    if isinstance(model, ShardedModel):
        parts, shards = pool.parts if isinstance(pool, ShardedPool) else (), model.shards
        if len(parts) != model.degree:
            raise InvalidSettingError("pool", type(pool).__name__, f"a model of {model.degree} ranks takes a ShardedPool of as many parts")
        model.share_cores(config.num_threads)
        runner = ShardedRunner(model.ranks, lambda rank: _runner(role, shards[rank], config, parts[rank], max_model_len))
        model.on_close(runner.close)
        return runner
    if isinstance(pool, ShardedPool):
        raise InvalidSettingError("pool", type(pool).__name__, "a model of one rank takes a KVPool")
    if isinstance(model, LlamaModel):
        return CpuRunner(model, pool)
    max_pages = pool.layout.pages_for(max_model_len)
    return DeviceRunner(
        model,
        pool,
        role,
        config.max_running,
        max_pages,
        config.max_num_batched_tokens,
        deterministic=config.deterministic,
        capture=config.cuda_graphs,
    )


def _scheduler(
    role: Role,
    book: PageBook,
    limits: Limits,
    exporter: KVExporter | None,
    importer: KVImporter | None,
    on_release: Callable[[Sequence], None],
) -> Scheduler:
    wanted = {Role.PREFILL: "exporter", Role.DECODE: "importer", Role.PLAIN: "neither"}[role]
    given = {"exporter": exporter is not None, "importer": importer is not None}
    for port, present in given.items():
        if present is not (port == wanted):
            raise InvalidSettingError(port, "given" if present else None, f"the {role.value} role takes {wanted} of exporter and importer")
    if exporter is not None:
        return PrefillScheduler(book, limits, exporter)
    if importer is not None:
        return DecodeScheduler(book, limits, importer, on_release)
    return PlainScheduler(book, limits, on_release)
