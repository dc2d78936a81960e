"""Several pytest runs at a time, because much of each waits: the rooms' tests and those between rooms, in groups, the longest first.

    python tests/side_by_side.py unit|integration|every|long [pytest arguments]

`every` is unit and integration in one queue: whoever is done takes the next group. `long` is what is marked so, of all places, and is left out of the
others. With arguments it is one plain pytest run of those. A group's output comes when it ends; the exit status is 1 when one failed.

Each run's torch has one thread, but for long ones: matrices this small gain little from a second, and threads that wait for one another in a loop, as
OpenMP's do, take the cores from those who would compute.

A few tests that failed are run once more when all is over, as CPython's own test runner does: tests that run side by side starve one another on a
small machine, and a fault fails alone too. A test that passes only then is named at the end, for somebody to look at: it may be a race.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: More than the two cores of a small machine: a third run goes on where two wait for a clock, a peer or a process that starts.
NUM_RUNS = 3
#: One pytest run each, the longest first. What no group names is one more at the end, so that a new room or file is never left out.
UNIT = (
    ("services/gateway", "libs/servicekit", "libs/wire"),
    ("libs/kvtransfer", "libs/workerkit"),
    ("services/decode", "services/prefill"),
    ("libs/engine",),
    ("libs/bench", "libs/cli"),
    ("libs/kernels", "libs/sglangcompat"),
)
INTEGRATION = (
    ("tests/test_equality.py",),
    # They share a fleet.
    ("tests/clients", "tests/test_bad_input.py", "tests/test_docs_examples.py"),
    ("tests/test_retry.py", "tests/test_storm.py"),
    ("tests/test_baton_command.py", "tests/test_console.py"),
    ("tests/test_broken_folder.py", "tests/test_metrics.py", "tests/test_otlp.py", "tests/test_prefix_cache.py"),
    ("tests/test_leaving_chunks.py", "tests/test_secure_fleet.py"),
    ("tests/test_faults.py",),
    ("tests/test_docs_bench.py", "tests/test_docs_decide.py", "tests/test_docs_plan.py"),
)
#: Hosts and cut wires are network devices that come and go, in this process's own namespace too: a transfer over tcp that takes one of them ends when
#: it goes. So they stay in one run with everything that transfers over tcp or kills peers, one after the other: the rest.
LONG = (("tests/test_decide.py", "tests/test_plan.py"), ("tests/test_sglang_gateway.py",))
GROUPS = {"unit": UNIT, "integration": INTEGRATION, "every": (INTEGRATION[0], *UNIT[:3], INTEGRATION[1], *UNIT[3:], *INTEGRATION[2:]), "long": LONG}
#: More failed tests than these are no accident, and are not tried again.
MOST_AGAIN = 6


class Group:
    """One pytest run of some targets, with a cache of its own that knows what failed."""

    def __init__(self, targets: list[str], marked: str, cache: Path, environment: dict[str, str]) -> None:
        self.name = " ".join(targets)
        self.status = 0
        self.took_s = 0.0
        self._arguments = ["-m", marked, *targets]
        self._cache = cache
        self._environment = environment

    def run(self) -> None:
        self.status = self._pytest(self.name, ["--cache-clear", *self._arguments])

    def run_failed_again(self) -> None:
        failed = self.failed()
        self.status = self._pytest(f"{self.name}, what failed once more", ["--last-failed", *self._arguments])
        if not self.status:
            print(f"--- PASSED ONLY THE SECOND TIME, ALONE: {' '.join(failed)}")

    def failed(self) -> list[str]:
        """Names of the tests that failed in the last run."""
        path = self._cache / "v" / "cache" / "lastfailed"
        return sorted(json.loads(path.read_text())) if path.is_file() else []

    def _pytest(self, name: str, arguments: list[str]) -> int:
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={self._cache}", *arguments]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            status = subprocess.run(command, cwd=ROOT, env=self._environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
            output.seek(0)
            text = output.read()
        took_s = time.monotonic() - begun
        self.took_s += took_s
        sys.stdout.write(f"--- {name}: {' '.join(arguments)}\n{text}--- {name}: status {status} after {took_s:.0f} s\n")
        sys.stdout.flush()
        return status


def everything(kind: str) -> set[str]:
    """Each room with tests, each file or folder of tests between rooms, or where there are long ones."""
    rooms = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/*/tests") if path.is_dir()}
    between = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("tests/test_*.py"), *(file.parent for file in ROOT.glob("tests/*/test_*.py")))}
    if kind == "long":
        # Only those that have some: the others need not be imported for it.
        return {path for path in between | {f"{room}/tests" for room in rooms} if any(b"mark.long" in file.read_bytes() for file in files_of(path))}
    return {"unit": rooms, "integration": between, "every": rooms | between}[kind]


def files_of(path: str) -> list[Path]:
    place = ROOT / path
    return [place] if place.is_file() else sorted(place.glob("test_*.py"))


def run_all(groups: list[Group], num_runs: int) -> None:
    """Each group once, as many at a time, in their order."""
    waiting: queue.SimpleQueue[Group] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)

    def work() -> None:
        while True:
            try:
                group = waiting.get_nowait()
            except queue.Empty:
                return
            group.run()

    threads = [threading.Thread(target=work) for _ in range(num_runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(kind: str, arguments: list[str]) -> int:
    # Long ones measure servers as they are run (decide, plan).
    environment = dict(os.environ) if kind == "long" else {"OMP_NUM_THREADS": "1", **os.environ}
    if arguments:
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=environment, check=False).returncode
    named = [target for group in GROUPS[kind] for target in group]
    all_of_it = everything(kind)
    if gone := set(named) - all_of_it:
        print(f"a group of {kind!r} names {sorted(gone)}, which are not there", file=sys.stderr)
        return 2
    others = sorted(all_of_it - set(named))
    with tempfile.TemporaryDirectory() as caches:
        parts = [list(group) for group in GROUPS[kind]] + ([others] if others else [])
        marked = "long" if kind == "long" else "not long"
        groups = [Group(targets, marked, Path(caches, str(number)), environment) for number, targets in enumerate(parts)]
        run_all(groups, NUM_RUNS)
        failed = [group for group in groups if group.status == 1 and group.failed()]
        if sum(len(group.failed()) for group in failed) <= MOST_AGAIN:
            for group in failed:
                group.run_failed_again()
    print("\n".join(f"--- {group.took_s:5.0f} s  status {group.status}  {group.name}" for group in groups))
    return 1 if any(group.status for group in groups) else 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in GROUPS:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
