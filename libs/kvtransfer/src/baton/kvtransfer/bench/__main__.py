"""python -m baton.kvtransfer.bench: ours, UCX's own program and NIXL in turns, one table."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from statistics import median, quantiles

from baton.kvtransfer.bench import cost, nixl, perftest, wake
from baton.kvtransfer.bench.cases import KIB, MIB, Case, cases
from baton.kvtransfer.bench.ours import Ours, in_new_processes

_COLUMNS = ("path", "span", "puts", "ours GB/s", "ucx_perftest GB/s", "NIXL GB/s", "ours/NIXL", "ours/ucx", "middle half", "target", "")


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def _middle_half(ours: list[float], theirs: list[float]) -> str:
    """Quartiles of the ratio turn by turn: how far one run of this program may be from another."""
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    if len(ratios) < 2:
        return ""
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return f"{low:.2f}-{high:.2f}"


def _row(case: Case, ours: list[float], theirs: list[float], others: list[float]) -> str:
    to_ucx = median(ours) / median(theirs) if theirs else None
    cells = (
        case.transport,
        _size(case.num_bytes),
        str(case.count),
        f"{median(ours):.2f}",
        f"{median(theirs):.2f}" if theirs else "left out",
        f"{median(others):.2f}" if others else "left out",
        f"{median(ours) / median(others):.2f}" if others else "",
        f"{to_ucx:.2f}" if to_ucx else "",
        _middle_half(ours, theirs) if theirs else "",
        f"{case.target:.2f}" if case.target else "",
        _verdict(to_ucx >= case.target) if case.target and to_ucx else "",
    )
    return _line(cells)


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(f"{cell:>{max(len(name), 8)}}" for cell, name in zip(cells, _COLUMNS, strict=True)).rstrip()


def measure_speed(transport: str, repeats: int, total_bytes: int, nixl_threads: list[int]) -> None:
    executable = perftest.program()
    runs = [partial(perftest.gigabytes_per_s, executable, tls=way) for way in perftest.ways(transport)] if executable else []
    with Ours(transport) as ours:
        print(f"\n{ours.description}\n{_line(_COLUMNS)}", flush=True)
    with ExitStack() as stack:
        others = [stack.enter_context(nixl.Nixl(transport, threads)) for threads in nixl_threads]
        for case in cases(transport, total_bytes):
            speeds: list[float] = []
            theirs: list[list[float]] = [[] for _ in runs]
            nixl_speeds: list[list[float]] = [[] for _ in others]
            for _ in range(repeats):  # in turns, so that other work on the machine meets all of them
                # Two new processes a turn, as ucx_perftest has: where their memory happens to lie is worth a fifth of the speed from 4 MiB on.
                speeds.append(in_new_processes(transport, case))
                for found, run in zip(theirs, runs, strict=True):
                    found.append(run(case))
                for found, other in zip(nixl_speeds, others, strict=True):
                    found.append(other.gigabytes_per_s(case))
            print(_row(case, speeds, max(theirs, key=median, default=[]), max(nixl_speeds, key=median, default=[])), flush=True)


def measure_cost(transport: str, num_rooms: int) -> None:
    spent = cost.measure(transport, num_rooms)
    verdict = _verdict(spent.locked + 2 * spent.error < cost.TARGET_LOCKED)
    print(
        f"{cost.NUM_SPANS} scattered spans of {_size(cost.SPAN_BYTES)} in one call: {spent.us_a_span:.4f} us a span in the caller "
        f"(target {cost.TARGET_US_A_SPAN}, {_verdict(spent.us_a_span <= cost.TARGET_US_A_SPAN)})\n"
        f"Python's lock is held for {100 * spent.locked:.2f} % (+- {100 * spent.error:.2f} %) of {num_rooms} such transfers of "
        f"{spent.transfer_s * 1e3:.1f} ms (target {100 * cost.TARGET_LOCKED:.0f} %, {verdict}): not free at {100 * spent.taken:.2f} % of "
        f"{spent.num_samples} random moments, and at {100 * spent.taken_in_pauses:.2f} % of {spent.num_in_pauses} in pauses between them",
        flush=True,
    )
    floor_s, wake_s = wake.floor_seconds(), wake.queue_seconds(transport)
    print(
        f"from post to the first put of a sleeping queue: {wake_s * 1e6:.1f} us "
        f"(target {wake.TARGET_S * 1e6:.0f}, {_verdict(wake_s <= wake.TARGET_S)}); a process that waits for a byte of a pipe: {floor_s * 1e6:.1f} us",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baton.kvtransfer.bench", description=__doc__)
    parser.add_argument("--transport", choices=("shm", "tcp"), action="append", help="default: both")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many runs (default 5)")
    parser.add_argument("--total-mib", type=int, default=512, help="how much each run moves, in puts of 20 to 4,000 (default 512)")
    parser.add_argument("--rooms", type=int, default=100, help="transfers during which Python's lock is watched (default 100)")
    parser.add_argument("--nixl-threads", type=int, nargs="*", default=[0, 4], help="NIXL with each so many threads, its best counts (default 0 4)")
    arguments = parser.parse_args()
    reason = nixl.why_not()
    print(f"NIXL is left out: {reason}" if reason else f"NIXL: {nixl.description()}, threads {arguments.nixl_threads}, the best counts", flush=True)
    for transport in arguments.transport or ("shm", "tcp"):
        measure_speed(transport, arguments.repeats, arguments.total_mib * MIB, [] if reason else arguments.nixl_threads)
        measure_cost(transport, arguments.rooms)
    seconds = cost.digest_seconds(arguments.repeats)
    num_bytes = cost.NUM_SPANS * cost.SPAN_BYTES
    print(f"\ndigest of such a room, when it is on (each side): {seconds * 1e3:.1f} ms, {num_bytes / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
