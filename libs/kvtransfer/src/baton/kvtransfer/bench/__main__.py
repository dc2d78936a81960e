"""python -m baton.kvtransfer.bench: ours, UCX's own program and NIXL in turns, one table."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from statistics import median

from baton.kvtransfer.bench import cost, nixl, perftest
from baton.kvtransfer.bench.cases import KIB, MIB, Case, cases
from baton.kvtransfer.bench.ours import Ours

_COLUMNS = ("path", "span", "puts", "ours GB/s", "ucx_perftest GB/s", "NIXL GB/s", "ours/ucx", "target", "")


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def _row(case: Case, ours: list[float], theirs: list[float], other: list[float]) -> str:
    ratio = median(ours) / median(theirs) if theirs else None
    verdict = "" if case.target is None or ratio is None else ("met" if ratio >= case.target else "MISSED")
    cells = (
        case.transport,
        _size(case.num_bytes),
        str(case.count),
        f"{median(ours):.2f}",
        f"{median(theirs):.2f}" if theirs else "not there",
        f"{median(other):.2f}" if other else "not there",
        f"{ratio:.2f}" if ratio else "",
        f"{case.target:.2f}" if case.target else "",
        verdict,
    )
    return _line(cells)


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(f"{cell:>{max(len(name), 8)}}" for cell, name in zip(cells, _COLUMNS, strict=True)).rstrip()


def measure(transport: str, repeats: int, total_bytes: int) -> None:
    executable = perftest.program()
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(transport))
        other = stack.enter_context(nixl.Nixl(transport)) if nixl.module_name() else None
        print(f"\n{ours.description}\n{_line(_COLUMNS)}")
        for case in cases(transport, total_bytes):
            results: tuple[list[float], list[float], list[float]] = ([], [], [])
            for _ in range(repeats):  # in turns, so that other work on the machine meets all of them
                results[0].append(ours.gigabytes_per_s(case))
                if executable:
                    results[1].append(perftest.gigabytes_per_s(executable, case))
                if other:
                    results[2].append(other.gigabytes_per_s(case))
            print(_row(case, *results), flush=True)
    spent = cost.measure(transport, repeats)
    print(
        f"{cost.NUM_SPANS} scattered spans of {_size(cost.SPAN_BYTES)} in one call: {spent.us_a_span:.4f} us a span in the caller "
        f"(target {cost.TARGET_US_A_SPAN}), Python's lock held at most {100 * spent.locked:.2f} % of the {spent.transfer_s * 1e3:.0f} ms "
        f"(target {100 * cost.TARGET_LOCKED:.0f} %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baton.kvtransfer.bench", description=__doc__)
    parser.add_argument("--transport", choices=("shm", "tcp"), action="append", help="default: both")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many runs (default 5)")
    parser.add_argument("--total-mib", type=int, default=512, help="how much each run moves, in puts of 20 to 4,000 (default 512)")
    arguments = parser.parse_args()
    for transport in arguments.transport or ("shm", "tcp"):
        measure(transport, arguments.repeats, arguments.total_mib * MIB)


if __name__ == "__main__":
    main()
