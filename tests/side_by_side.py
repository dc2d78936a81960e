"""Two pytest runs at a time, because much of either waits: what is named, and everything else of the kind.

    python tests/side_by_side.py unit|integration|long [pytest arguments]

`long` is what is marked so, of all places, and is left out of the other two. With arguments it is one plain pytest run of those. What looks at the
machine's shared memory as a whole stays together in the first run. A run's output comes when it ends; the exit status is 1 when either failed.

A few tests that failed are run once more when both halves are over, as CPython's own test runner does: two halves of tests starve one another on a
small machine, and a fault fails alone too. A test that passes only then is named at the end, for somebody to look at: it may be a race.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = {
    "unit": {"libs/kvtransfer", "libs/workerkit", "services/decode", "services/prefill"},
    "integration": {"tests/test_equality.py"},
    "long": {"tests/test_decide.py", "tests/test_plan.py", "tests/test_recompute.py", "tests/test_soak.py", "libs/kvtransfer/tests"},
}
#: More than these are no accident, and are not tried again.
MOST_AGAIN = 4


class Half:
    """One pytest run of some targets, with a cache of its own that knows what failed."""

    def __init__(self, name: str, targets: list[str], marked: str, cache: Path) -> None:
        self.name = name
        self._marked = marked
        self.status = 0
        self._targets = targets
        self._cache = cache

    def run(self) -> None:
        self.status = self._pytest(self.name, ["-m", self._marked, *self._targets, "--cache-clear"])

    def run_failed_again(self) -> None:
        failed = self.failed()
        if self.status == 1 and 0 < len(failed) <= MOST_AGAIN:
            self.status = self._pytest(f"{self.name}, what failed once more", ["--last-failed", "-m", self._marked, *self._targets])
            if not self.status:
                print(f"--- {self.name}: PASSED ONLY THE SECOND TIME, ALONE: {' '.join(failed)}")

    def failed(self) -> list[str]:
        """Names of the tests that failed in the last run."""
        path = self._cache / "v" / "cache" / "lastfailed"
        return sorted(json.loads(path.read_text())) if path.is_file() else []

    def _pytest(self, name: str, arguments: list[str]) -> int:
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={self._cache}", *arguments]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
            output.seek(0)
            text = output.read()
        sys.stdout.write(f"--- {name}: {' '.join(arguments)}\n{text}--- {name}: status {status} after {time.monotonic() - begun:.0f} s\n")
        sys.stdout.flush()
        return status


def everything(kind: str) -> set[str]:
    """Each room with tests, each file of tests between rooms, or where there are long ones."""
    rooms = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/*/tests") if path.is_dir()}
    between = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py")}
    if kind == "long":
        # Only those that have some: the others need not be imported for it.
        return {path for path in between | {f"{room}/tests" for room in rooms} if any(b"mark.long" in file.read_bytes() for file in files_of(path))}
    return between if kind == "integration" else rooms


def files_of(path: str) -> list[Path]:
    place = ROOT / path
    return [place] if place.is_file() else sorted(place.glob("test_*.py"))


def main(kind: str, arguments: list[str]) -> int:
    if arguments:
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
    first, all_of_it = FIRST[kind], everything(kind)
    if not first < all_of_it:
        print(f"FIRST[{kind!r}] names {sorted(first - all_of_it)}, which are not there", file=sys.stderr)
        return 2
    marked = "long" if kind == "long" else "not long"
    with tempfile.TemporaryDirectory() as caches:
        halves = [
            Half("first half", sorted(first), marked, Path(caches, "first")),
            Half("second half", sorted(all_of_it - first), marked, Path(caches, "second")),
        ]
        threads = [threading.Thread(target=half.run) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for half in halves:
            half.run_failed_again()
        return 1 if any(half.status for half in halves) else 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in FIRST:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
