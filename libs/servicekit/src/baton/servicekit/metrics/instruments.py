"""Every metric of every service: the one table that services record by, that docs/metrics.md is made from, and that tests compare with what is
scraped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

#: What a label says whose value is none of those that the table allows.
OTHER = "other"
#: In place of a label's values: a name that something else bounds.
PEER_INSTANCE = ("an instance id of the fleet",)
GPU_INDEX = ("a GPU's index",)
_OPEN = (PEER_INSTANCE, GPU_INDEX)

WORKERS = ("prefill", "decode", "plain")
DECODING = ("decode", "plain")
ALL = ("gateway", *WORKERS)

ORIGINS = ("client", "gateway", "prefill", "decode", "transfer")
STAGES = ("bootstrapping", "waiting", "transferring", "success")
PEERS = ("prefill", "decode", "plain", "none")
TRANSPORTS = ("cuda_ipc", "cuda_copy", "rc", "dc", "ud", "sysv", "posix", "xpmem", "cma", "knem", "tcp", "self", "loopback", "none")

#: Why a room, a request or a publication ends badly. A cause that is not here is counted as `other`.
CAUSES = (
    # clients
    "client_gone", "slow_reader", "deadline", "cancelled", "key_missing", "key_malformed", "key_unknown", "key_role", "key_concurrency",
    "key_rate", "key_tokens", "invalid_request", "malformed_body", "body_not_utf8", "body_too_large", "body_late", "missing_field",
    "wrong_type", "out_of_range", "unsupported", "stop_list", "prompt_empty", "prompt_too_long", "chat_template", "model_not_found",
    "direct_request", "room_missing", "token_out_of_range", "max_tokens_out_of_range", "max_tokens_too_small", "sampling_out_of_range", "wrong_leg",
    "priority_out_of_range", "structured_output", "grammar_invalid", "grammar_too_large",
    # the gateway
    "bootstrap_timeout", "waiting_timeout", "transfer_timeout", "no_route", "overloaded", "queue_timeout", "queue_deadline", "gateway_draining",
    "gateway_stopped", "gateway_lost", "gateway_error", "worker_protocol", "token_conflict", "tokens_lost", "leg_not_ended", "stop_string",
    "other_answer_failed",
    # servers
    "prefill_lost", "decode_lost", "plain_lost", "prefill_silent", "decode_silent", "plain_silent", "prefill_unreachable", "draining", "drained",
    "engine_failed", "logits_not_finite", "no_such_token", "lease_lost", "kv_pool_too_small", "room_used", "too_many_rooms", "internal", "unknown",
    "fork_source_gone", "grammar_fault",
    # the hand-over
    "bad_publication", "digest_failed", "digest_mismatch", "digest_missing", "doorbells_exhausted", "first_token_differs", "first_token_missing",
    "length_mismatch", "page_hash", "published_twice", "quiesced", "revoked", "declined", "room_unclaimed", "too_many_unmatched", "wrong_decode",
    "ticket", "ticket_forged", "ticket_key_unknown", "ticket_malformed", "ticket_memory_full", "ticket_missing", "ticket_expired",
    "ticket_replayed", "ticket_unchecked", "ticket_wrong_room", "ticket_wrong_decode", "ticket_wrong_prefill", "way_lost",
)  # fmt: skip

_LATENCY_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MOVE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STEP_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_HOST_S = tuple(factor * 10.0**power for power in (-6, -5, -4, -3, -2) for factor in (1, 1.5, 2, 3, 5, 7.5))
_SPEED = tuple(factor * 10.0**power for power in (7, 8, 9, 10, 11) for factor in (1, 2.5, 5))
_ROOM_BYTES = tuple(float(4**power) for power in range(8, 19))
_PUT_BYTES = tuple(float(4**power) for power in range(5, 15))
_PUTS = tuple(float(4**power) for power in range(9))
_SEQUENCES = tuple(float(2**power) for power in range(11))
_TOKENS = tuple(float(2**power) for power in range(15))


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. name, unit: OpenTelemetry's (UCUM). labels: what each may say; every metric also has `role`, whose values are `roles`.

    bounds: a histogram's upper bounds. always: whether a service that did nothing yet shows it; else it comes with what it counts.
    """

    name: str
    kind: Kind
    unit: str
    roles: tuple[str, ...]
    about: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()
    always: bool = True

    @property
    def prometheus(self) -> str:
        """As Prometheus names it; a histogram's has _bucket, _sum and _count behind it."""
        units = {"s": "_seconds", "By": "_bytes", "By/s": "_bytes_per_second", "J": "_joules", "1": "_ratio"}
        return self.name.replace(".", "_") + units.get(self.unit, "") + ("_total" if self.kind == "counter" else "")

    def value_of(self, label: str, value: str) -> str:
        """`value` if the table allows it, else "other"."""
        allowed = self.labels[label]
        return value if value in allowed or allowed in _OPEN else OTHER


_OUTCOMES = ("success", "failed", "left")
_FAILURE = {"origin": ORIGINS, "cause": CAUSES}


def _counter(name: str, unit: str, roles: tuple[str, ...], about: str, **labels: tuple[str, ...]) -> Instrument:
    return Instrument(name, "counter", unit, roles, about, labels, always=not labels)


def _gauge(name: str, unit: str, roles: tuple[str, ...], about: str, *, always: bool = True, **labels: tuple[str, ...]) -> Instrument:
    return Instrument(name, "gauge", unit, roles, about, labels, always=always)


def _histogram(
    name: str, unit: str, roles: tuple[str, ...], bounds: tuple[float, ...], about: str, *, always: bool = False, **labels: tuple[str, ...]
) -> Instrument:
    return Instrument(name, "histogram", unit, roles, about, labels, bounds, always)


_ROOMS = (
    _gauge("baton.rooms.open", "{room}", ALL, "Rooms that are open now."),
    _counter("baton.rooms.succeeded", "{room}", ALL, "Rooms (on a worker: its leg of them) that ended as they should."),
    Instrument(
        "baton.rooms.failed", "counter", "{room}", ALL, "Rooms that failed: who ended them, in which stage, and why.", {"stage": STAGES, **_FAILURE}
    ),
    Instrument(
        "baton.bootstrap.failed",
        "counter",
        "{room}",
        ("gateway", "prefill", "decode"),
        "Rooms of a pair that failed in BOOTSTRAPPING. `peer`: on a worker the role at the other end; on the gateway the server that said so.",
        {**_FAILURE, "peer": PEERS},
    ),
    Instrument(
        "baton.transfer.failed",
        "counter",
        "{room}",
        ("gateway", "prefill", "decode"),
        "Rooms of a pair that failed when decode's pages were published and not yet landed: in WAITING or TRANSFERRING. `peer` as above.",
        {**_FAILURE, "peer": PEERS},
    ),
    _counter("baton.rooms.retried", "{room}", ("gateway",), "Rooms whose failure was answered by another room.", stage=STAGES, **_FAILURE),
    _counter("baton.rooms.refused", "{room}", WORKERS, "Rooms that a worker did not take.", cause=CAUSES),
    _gauge(
        "baton.queue.length",
        "{room}",
        ALL,
        "Rooms by what they wait for. Gateway: admission (a place). Prefill: bootstrap (where to write), waiting (their turn), running (being "
        "computed), transfer (computed, not all written). Decode and plain: pre_allocation (pages), transfer (reserved or published, not landed), "
        "running.",
        queue=("admission", "bootstrap", "pre_allocation", "waiting", "running", "transfer"),
    ),
)

_REQUESTS = (
    Instrument(
        "baton.requests.ended",
        "counter",
        "{request}",
        ("gateway",),
        "Requests that were taken and are over, retries included; left: the client ended it.",
        {"outcome": _OUTCOMES},
    ),
    _counter(
        "baton.answers.finished",
        "{answer}",
        ("gateway",),
        "Answers that are complete, by what ended them: a token that means it, a stop string of the client, or max_tokens.",
        reason=("stop_token", "stop_string", "length"),
    ),
    _counter(
        "baton.clients.left",
        "{request}",
        ("gateway",),
        "Requests whose client was gone, or read nothing for too long, before the answer was complete, by stage; queued: before it had a room.",
        stage=("queued", *STAGES),
        cause=("client_gone", "slow_reader"),
    ),
    _counter("baton.requests.refused", "{request}", ("gateway",), "Requests that were not taken.", cause=CAUSES),
    _histogram("baton.request.duration", "s", ("gateway",), _WHOLE_S, "From acceptance to the end of the answer.", outcome=_OUTCOMES),
    _histogram("baton.request.time_to_first_token", "s", ("gateway",), _LATENCY_S, "From acceptance to the first token, of requests that had one."),
    _histogram(
        "baton.request.inter_token_latency",
        "s",
        ("gateway",),
        _GAP_S,
        "From each token of an answer to the next, as they reach the gateway; tokens that come together are 0 apart.",
        always=True,
    ),
    _histogram(
        "baton.request.stage.duration",
        "s",
        ("gateway",),
        _STAGE_S,
        "Time of a successful request in each stage: queued is the wait for a place and what is before a room; success is the stream.",
        stage=("queued", *STAGES),
    ),
    _counter("baton.tokens.prompt", "{token}", ("gateway",), "Tokens of prompts of requests that were taken and are over."),
    _counter("baton.tokens.completion", "{token}", ("gateway",), "Tokens of answers, of requests that are over."),
    _counter("baton.streams.continued", "{request}", ("gateway",), "Answers that went on in another room behind tokens that the client had."),
    _gauge("baton.routes", "{route}", ("gateway",), "Pairs and plain servers that a request could take now."),
    _gauge(
        "baton.servers",
        "{server}",
        ("gateway",),
        "Servers by role: known, connected, usable for a new room, avoided (silent, or failed again and again).",
        server=WORKERS,
        state=("known", "connected", "usable", "avoided"),
    ),
)

_WORK = (
    _gauge("baton.kv.pages", "{page}", WORKERS,
           "Pages of the KV pool by owner; all states together are the pool. cached: free, and the prefix cache can still find them.",
           state=("free", "cached", "reserved", "published", "quarantined", "running")),
    _counter("baton.tokens.computed", "{token}", WORKERS, "Tokens that went through the model, of prompts and of answers."),
    _counter("baton.tokens.recomputed", "{token}", ("gateway", *DECODING),
             "Tokens computed again: for rooms after a failure (gateway), for sequences that were retracted (servers)."),
    _gauge("baton.tokens.in_flight", "{token}", WORKERS, "Tokens of the rooms that hold pages."),
    _gauge("baton.tokens.pending", "{token}", WORKERS, "Tokens of prompts that were given to the engine and are not computed."),
    _counter("baton.prefix.tokens", "{token}", WORKERS,
             "Tokens of sequences that came, by whether the prefix cache had them: found ones are not computed (decode: not moved) again.",
             outcome=("found", "missed")),
    _gauge("baton.prefix.pages", "{page}", WORKERS, "Pages of the prefix cache, in use (running) or not (cached)."),
    _counter("baton.prefix.evictions", "{page}", WORKERS, "Pages that the prefix cache gave back because others needed them."),
    _counter("baton.retractions", "{sequence}", DECODING, "Sequences that gave their pages up in mid-stream because the pool was full."),
    _counter("baton.prefills.on_decode", "{room}", ("gateway", "decode"), "Prompts that a decode server computed itself."),
    _gauge("baton.engine.stalled", "s", WORKERS, "Since the engine's last progress while it had work; 0 when idle."),
    _histogram("baton.step.duration", "s", WORKERS, _STEP_S, "Of the engine's steps: one forward pass.", always=True),
    _histogram("baton.step.sequences", "{sequence}", WORKERS, _SEQUENCES, "Batch size: sequences in a step.", always=True),
    _histogram("baton.step.tokens", "{token}", WORKERS, _TOKENS, "Tokens in a step, rows of answers and of prompts.", always=True),
    _histogram("baton.step.host", "s", WORKERS, _HOST_S,
               "The host's part of a step: admit (commands, landed rooms), schedule, launch (on a CPU the forward pass), wait (for the device), "
               "commit (tokens become events), deliver (to the front's thread); reply is the front's processor time from batch to batch of events.",
               always=True, part=("admit", "schedule", "launch", "wait", "commit", "deliver", "reply")),
    _histogram("baton.step.idle", "s", WORKERS, _HOST_S,
               "Time for which the GPU stood still between two decode steps, of those that go on with an answer of the one before.",
               always=True),
    _counter("baton.step.launches", "{launch}", WORKERS,
             "Decode batches and chunks of prompts on a GPU: replayed as a captured graph (graph hits), or launched kernel by kernel.",
             way=("replayed", "launched")),
    _gauge("baton.gpu.memory.used", "By", WORKERS, "Memory in use on the server's GPUs, others' too.", always=False, gpu=GPU_INDEX),
    _gauge("baton.gpu.memory.limit", "By", WORKERS, "Memory of the server's GPUs.", always=False, gpu=GPU_INDEX),
    _gauge("baton.gpu.utilization", "1", WORKERS, "Part of the last sample period in which a kernel ran.", always=False, gpu=GPU_INDEX),
    _counter("baton.gpu.energy", "J", WORKERS, "Energy that the GPU has used since its driver was loaded.", gpu=GPU_INDEX),
)  # fmt: skip

_TRANSFER = (
    _histogram("baton.transfer.duration", "s", ("prefill",), _MOVE_S, "Of a room: first put to the flush before the doorbell.", transport=TRANSPORTS),
    _histogram(
        "baton.transfer.speed", "By/s", ("prefill",), _SPEED, "Of a room: bytes over the time with a write under way.", transport=TRANSPORTS
    ),
    _histogram("baton.transfer.size", "By", ("prefill",), _ROOM_BYTES, "Bytes of a room's KV pages.", transport=TRANSPORTS),
    _histogram("baton.transfer.puts", "{put}", ("prefill",), _PUTS, "One-sided writes of a room.", transport=TRANSPORTS),
    _histogram("baton.transfer.put.size", "By", ("prefill",), _PUT_BYTES, "Bytes per put, mean of a room.", transport=TRANSPORTS),
    _histogram(
        "baton.transfer.exposed", "s", ("prefill",), _MOVE_S, "Of a room: last layer computed to doorbell rung, what is not hidden behind "
        "computing.", transport=TRANSPORTS,
    ),
    _histogram(
        "baton.landing.exposed", "s", ("decode",), _MOVE_S, "Of a room: last layer computed to its pages taken over by decode; where both servers "
        "share a clock.",
    ),
    _histogram(
        "baton.digest.wait", "s", ("prefill", "decode"), _MOVE_S, "Of a room with a digest, what it waited for that: on prefill from its first token "
        "to its doorbell given to the transfer library, on decode from the doorbell to the comparison's end.",
    ),
    _counter("baton.publications.declined", "{room}", ("prefill",), "Publications that were not taken, or given up.", cause=CAUSES),
    _counter("baton.revokes.received", "{room}", ("prefill",), "Rooms that decode wanted its pages back of."),
    _counter("baton.writes.failed", "{room}", ("prefill",), "Rooms whose writes the transfer library gave up: their session is fenced."),
    _counter(
        "baton.leases.ended", "{lease}", ("decode",),
        "Leases of decode's pages by what ended them: landed (and admitted), rejected (landed, and was not what was asked for), unpublished (nobody "
        "could write yet), aborted (landed, and unwanted), late (a doorbell after the abort), quiesced (the writer's word), fenced (proof).",
        outcome=("landed", "rejected", "unpublished", "aborted", "late", "quiesced", "fenced"),
    ),
    _counter("baton.leases.quarantined", "{lease}", ("decode",), "Leases whose writer was lost or did not answer a revoke in time."),
    _counter(
        "baton.leases.ignored", "{event}", ("decode",), "Events about leases that came twice, late or forged.",
        reason=("unknown", "ended", "stale", "out_of_order"),
    ),
    _counter("baton.doorbells.stale", "{event}", ("decode",), "Doorbells of rooms or generations that nobody waits for."),
    _counter("baton.revokes.overdue", "{room}", ("decode",), "Revokes that the writer did not answer in time."),
    _gauge("baton.peers", "{peer}", ("decode",), "Prefill servers that it knows, by whether there is a session.", state=("connected", "problem")),
    _gauge(
        "baton.peer.speed", "By/s", ("decode",), "The verdict on a pair: how fast the largest put of its probe was, and over what.", always=False,
        peer=PEER_INSTANCE, transport=TRANSPORTS,
    ),
)  # fmt: skip

INSTRUMENTS: tuple[Instrument, ...] = (*_ROOMS, *_REQUESTS, *_WORK, *_TRANSFER)
BY_NAME: dict[str, Instrument] = {instrument.name: instrument for instrument in INSTRUMENTS}


def transport_label(text: str) -> str:
    """The transport among those of the table that a chosen path, as UCX names it ("rc_mlx5/mlx5_0:1"), goes over."""
    words = text.replace("/", " ").replace(",", " ").replace("+", " ").split()
    for name in TRANSPORTS:
        if any(word == name or word.startswith(f"{name}_") for word in words):
            return name
    return OTHER if words else "none"
