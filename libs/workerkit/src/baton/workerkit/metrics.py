"""A worker's metrics: looked up in what its engine and its front count anyway, and recorded once a step and once a room."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.engine.step_time import PARTS
from baton.engine.types import KVReady, Role, TransferStats
from baton.servicekit import FailedRoom, Metrics
from baton.servicekit.metrics import Values, transport_label
from baton.workerkit.host import EngineHost

if TYPE_CHECKING:
    from baton.engine import Engine


class StepMetrics:
    """Told of every step by the engine, on its thread: a dozen searches and additions, and nothing when metrics are off."""

    def __init__(self, metrics: Metrics) -> None:
        self._duration = metrics.buckets("baton.step.duration")
        self._sequences = metrics.buckets("baton.step.sequences")
        self._tokens = metrics.buckets("baton.step.tokens")
        self._idle = metrics.buckets("baton.step.idle") if metrics.enabled else None
        self._parts = [buckets for part in PARTS if (buckets := metrics.buckets("baton.step.host", part=part)) is not None]

    def watch(self, engine: Engine) -> None:
        engine.on_step(self.step)
        if self._parts:
            engine.step_time.on_step(self.host)

    def step(self, took_s: float, num_sequences: int, num_tokens: int) -> None:
        if self._duration is None or self._sequences is None or self._tokens is None:
            return
        self._duration.add(took_s)
        self._sequences.add(num_sequences)
        self._tokens.add(num_tokens)

    def host(self, spent: Sequence[float], idle_s: float | None) -> None:
        """spent: of each of PARTS."""
        if not self._parts:
            return
        for buckets, part_s in zip(self._parts, spent, strict=True):
            buckets.add(part_s)
        if idle_s is not None and self._idle is not None:
            self._idle.add(idle_s)


class ReplyTime:
    """Processor time of the front's thread from one batch of events to the next: reports made and written, and whatever else it did."""

    def __init__(self, metrics: Metrics) -> None:
        self._buckets = metrics.buckets("baton.step.host", part="reply")
        self._before: float | None = None

    def batch(self) -> None:
        """On that thread."""
        if self._buckets is None:
            return
        now = time.thread_time()
        if self._before is not None:
            self._buckets.add(now - self._before)
        self._before = now


class TransferMetrics:
    """What prefill says of a room's transfer, and decode of its landing: once a room."""

    def __init__(self, metrics: Metrics, role: Role) -> None:
        names = {
            Role.PREFILL: ("transfer.duration", "transfer.speed", "transfer.size", "transfer.puts", "transfer.put.size", "transfer.exposed"),
            Role.DECODE: ("landing.exposed",),
            Role.PLAIN: (),
        }[role]
        self._of = {name: metrics.recorder(f"baton.{name}") for name in names}

    def transferred(self, stats: TransferStats) -> None:
        transport = transport_label(stats.transport)
        values = {"transfer.exposed": stats.exposed_s}
        if stats.num_puts:  # else all of it was resident at decode, or nothing was moved
            values |= {
                "transfer.duration": stats.duration_s,
                "transfer.size": stats.num_bytes,
                "transfer.puts": stats.num_puts,
                "transfer.put.size": stats.num_bytes / stats.num_puts,
            }
        if stats.busy_s > 0:
            values["transfer.speed"] = stats.num_bytes / stats.busy_s
        for name, value in values.items():
            self._of[name].record(value, transport=transport)

    def landed(self, event: KVReady) -> None:
        """An exposed time of 0 says that the two servers share no clock."""
        if event.exposed_s > 0:
            self._of["landing.exposed"].record(event.exposed_s)


def observe_engine(metrics: Metrics, host: EngineHost, role: Role) -> None:
    """What the engine's last snapshot says (host.stats), which is replaced as a whole and never changed."""
    metrics.observe("baton.kv.pages", lambda: _pages(host))
    metrics.observe("baton.queue.length", lambda: _queues(host, role))
    metrics.observe("baton.step.launches", lambda: _launches(host))
    metrics.observe_one("baton.tokens.computed", lambda: _extra(host, "computed_tokens"))
    metrics.observe_one("baton.tokens.in_flight", lambda: host.stats.tokens_in_flight)
    metrics.observe_one("baton.tokens.pending", lambda: _extra(host, "pending_tokens" if role is Role.PREFILL else "pending_prompt_tokens"))
    metrics.observe_one("baton.engine.stalled", lambda: host.pulse.stalled_s(time.monotonic()))
    metrics.observe("baton.prefix.tokens", lambda: _prefix_tokens(host))
    metrics.observe_one("baton.prefix.pages", lambda: _extra(host, "prefix_pages"))
    metrics.observe_one("baton.prefix.evictions", lambda: _extra(host, "prefix_evicted_pages"))
    if role is not Role.PREFILL:
        metrics.observe_one("baton.retractions", lambda: _extra(host, "retractions"))
        metrics.observe_one("baton.tokens.recomputed", lambda: _extra(host, "recomputed_tokens"))
    if role is Role.DECODE:
        metrics.observe_one("baton.prefills.on_decode", lambda: _extra(host, "local_prefills"))


def observe_front(metrics: Metrics, counters: Counter[str], failures: Counter[FailedRoom], num_rooms: Callable[[], int]) -> None:
    """counters, failures: the front's, which its event loop goes on counting in."""
    metrics.observe_failures(failures)
    metrics.observe_one("baton.rooms.open", num_rooms)
    metrics.observe_one("baton.rooms.succeeded", lambda: counters["succeeded"])
    metrics.observe("baton.rooms.refused", lambda: by_cause(counters, "refused/"))


def by_cause(counters: Counter[str], prefix: str) -> Values:
    """Counts under "prefix<cause>"."""
    return [(count, {"cause": name.removeprefix(prefix)}) for name, count in list(counters.items()) if name.startswith(prefix)]


def _extra(host: EngineHost, name: str) -> float:
    return host.stats.extra.get(name, 0)


def _pages(host: EngineHost) -> Values:
    stats = host.stats
    pages = {
        "free": stats.free_pages - stats.cached_pages,
        "cached": stats.cached_pages,
        "reserved": stats.reserved_pages,
        "published": stats.published_pages,
        "quarantined": stats.quarantined_pages,
        "running": stats.running_pages,
    }
    return [(count, {"state": state}) for state, count in pages.items()]


def _prefix_tokens(host: EngineHost) -> Values:
    found = _extra(host, "prefix_found_tokens")
    return [(found, {"outcome": "found"}), (_extra(host, "prefix_asked_tokens") - found, {"outcome": "missed"})]


def _queues(host: EngineHost, role: Role) -> Values:
    stats = host.stats
    in_transfer = stats.extra.get("in_transfer", 0)
    queues: dict[str, float] = {"running": stats.running}
    if role is Role.PREFILL:
        bootstrapping = stats.extra.get("bootstrapping", 0)
        queues |= {"bootstrap": bootstrapping, "waiting": stats.waiting - bootstrapping, "transfer": in_transfer}
    else:
        queues |= {"pre_allocation": stats.waiting}
        if role is Role.DECODE:
            queues |= {"transfer": in_transfer}
    return [(count, {"queue": queue}) for queue, count in queues.items()]


def _launches(host: EngineHost) -> Values:
    """None on a CPU, which has no graphs."""
    extra = host.stats.extra
    return [(extra[f"launches_{way}"], {"way": way}) for way in ("replayed", "launched") if f"launches_{way}" in extra]
