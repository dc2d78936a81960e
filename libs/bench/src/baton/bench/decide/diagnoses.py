"""What is wrong with a topology or with the measurement, from the record, each with its cause where the record shows one. Pure."""

from collections import Counter
from collections.abc import Iterator

from baton.bench.decide.calm import is_busy, load_words
from baton.bench.decide.record import DecideRecord, IdlePoint
from baton.bench.decide.weights import has_dummy_weights
from baton.bench.numbers import plain

#: The split's first token may be this many times that of a plain server before it is looked into.
TTFT_RATIO = 1.15
#: Tokens without a text (end of sequence, which the load asks to go past) and words that are cut otherwise make up a few in a hundred.
TOKENS_PART = 0.05
SLOW_TRANSPORTS = ("tcp",)
TIMEOUT_WORDS = ("timeout", "deadline", "timed_out")
REMEDIES = {
    "client": "the client left or its deadline was too short",
    "gateway": "look at its --bootstrap-, --waiting-, --transfer- and --request-timeout-s and the client's deadline before suspecting the transfer",
    "prefill": "see the prefill server's log",
    "decode": "see the decode server's log: pages or rooms may have run out",
    "transfer": "the move of pages itself failed: look at the transport",
    "load": "the load generator gave up: a longer --timeout-s shows whether an answer would have come",
}


def diagnose(record: DecideRecord) -> Iterator[str]:
    yield from _first_token(record)
    yield from _under_load(record)
    yield from _failures(record)
    yield from _tokens(record)
    yield from _lag(record)
    yield from _energy(record)
    if is_busy(record.machine):
        yield f"the machine was busy with other work ({load_words(record.machine)}, before the first server was started): repeat when it is calm"
    if record.shared_device:
        yield "servers share a device: they take time from one another, which servers with a device of their own would not"


def _first_token(record: DecideRecord) -> Iterator[str]:
    """Split against one plain server, idle, prompt length by prompt length."""
    plain = {point.prompt_tokens: point for point in record.idle if point.topology == "one" and point.concurrency == 1}
    kinds = {topology.name: topology.kind for topology in record.topologies}
    for point in record.idle:
        base = plain.get(point.prompt_tokens)
        if point.concurrency == 1 and kinds.get(point.topology) == "split" and base is not None and point.ttft_ms > TTFT_RATIO * base.ttft_ms:
            yield (
                f"{point.topology}: the first token of a prompt of {point.prompt_tokens} takes {point.ttft_ms:.0f} ms idle, "
                f"{point.ttft_ms / base.ttft_ms:.2f} x the {base.ttft_ms:.0f} ms of one plain server: {_cause(point, base)}"
            )
    for name in sorted({point.topology for point in record.idle if any(slow in (point.transport or "") for slow in SLOW_TRANSPORTS)}):
        yield f"{name}: KV pages move over tcp; on one host shared memory, between hosts RDMA would be faster (see --transport)"


def _cause(point: IdlePoint, base: IdlePoint) -> str:
    """The largest of what the split adds, if it explains a third of the difference."""
    extra_ms = point.ttft_ms - base.ttft_ms
    parts = {
        f"waiting for the bootstrap ({point.bootstrap_ms or 0:.1f} ms): decode's pages are announced late": point.bootstrap_ms or 0.0,
        f"transfer exposed after the last layer ({point.exposed_ms or 0:.1f} ms over {point.transport}), if the answer waits for it": point.exposed_ms
        or 0.0,
    }
    name, part_ms = max(parts.items(), key=lambda part: part[1])
    return (
        name
        if part_ms >= extra_ms / 3
        else "neither bootstrap nor transfer explains it; compare the machines under both (device, threads, library versions)"
    )


def _under_load(record: DecideRecord) -> Iterator[str]:
    """Exposed transfer that grows with load: pages that wait for something else than the path."""
    for topology in record.topologies:
        idle = [point.exposed_ms for point in record.idle if point.topology == topology.name and point.exposed_ms is not None]
        loaded = [cell.server["transfer_exposed_ms"].p99 for cell in record.cells_of(topology.name) if "transfer_exposed_ms" in cell.server]
        if idle and loaded and max(loaded) > 10 * max(idle) and max(loaded) > record.targets.itl_p99_ms:
            yield (
                f"{topology.name}: under load {max(loaded):.0f} ms (p99) of a transfer lie after the last layer, {max(idle):.0f} ms when idle: "
                "pages wait for a busy sender or receiver, not for the path"
            )


def _failures(record: DecideRecord) -> Iterator[str]:
    for topology in record.topologies:
        cells = record.cells_of(topology.name)
        failures = Counter[str]()
        for cell in cells:
            failures.update(cell.failures)
        for what, num in failures.most_common():
            author = what.partition("ended by ")[2].split() or [""]
            remedy = REMEDIES.get("load" if "load generator" in what else author[0], "no author was named: the server's own text is in the samples")
            kind = "time limit" if any(word in what for word in TIMEOUT_WORDS) else "failure"
            lowest = min(cell.rate_rps for cell in cells if what in cell.failures)
            yield f"{topology.name}: {num} requests ended by a {kind} from {plain(lowest)} requests/s on ({what}): {remedy}"


def _tokens(record: DecideRecord) -> Iterator[str]:
    if has_dummy_weights(record):
        return
    for topology in record.topologies:
        cells = record.cells_of(topology.name)
        differing = sum(cell.num_tokens_differing for cell in cells)
        reported = sum(cell.tokens_reported for cell in cells)
        counted = sum(cell.tokens_retokenised or 0 for cell in cells)
        if differing and abs(counted - reported) > TOKENS_PART * reported:
            counts = f"{counted} in the texts, {reported} reported"
            yield f"{topology.name}: {differing} answers hold another number of tokens than reported ({counts}): distrust its rates"


def _lag(record: DecideRecord) -> Iterator[str]:
    late = [cell for cell in record.cells if cell.lag]
    if late:
        yield f"the load generator was late in {len(late)} of {len(record.cells)} cells, first in cell {late[0].number}: {late[0].lag[0]}"


def _energy(record: DecideRecord) -> Iterator[str]:
    missing = [(cell, cell.energy.missing) for cell in record.cells if cell.energy is not None and cell.energy.missing]
    if missing:
        cell, why = missing[0]
        yield f"the energy of {len(missing)} of {len(record.cells)} cells could not be read, first in cell {cell.number}: {why}"
