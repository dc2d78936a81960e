"""Two pytest runs at a time, because much of either waits: what is named, and everything else of the kind.

    python tests/side_by_side.py unit|integration [pytest arguments]

With arguments it is one plain pytest run of those. What looks at the machine's shared memory as a whole stays together in the first run. A run's
output comes when it ends; the exit status is 1 when either failed.
"""

from __future__ import annotations

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
}


def everything(kind: str) -> set[str]:
    """Each room with tests, or each file of tests between rooms."""
    found = ROOT.glob("tests/test_*.py") if kind == "integration" else (path.parent for path in ROOT.glob("*/*/tests") if path.is_dir())
    return {str(path.relative_to(ROOT)) for path in found}


def run(name: str, targets: list[str], failed: list[str]) -> None:
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        ended = subprocess.run([sys.executable, "-m", "pytest", *targets], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
        output.seek(0)
        text = output.read()
    sys.stdout.write(f"--- {name}: {' '.join(targets)}\n{text}--- {name}: status {ended.returncode} after {time.monotonic() - begun:.0f} s\n")
    sys.stdout.flush()
    if ended.returncode:
        failed.append(name)


def main(kind: str, arguments: list[str]) -> int:
    if arguments:
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
    first, all_of_it = FIRST[kind], everything(kind)
    if not first < all_of_it:
        print(f"FIRST[{kind!r}] names {sorted(first - all_of_it)}, which are not there", file=sys.stderr)
        return 2
    failed: list[str] = []
    halves = (("first half", sorted(first)), ("second half", sorted(all_of_it - first)))
    threads = [threading.Thread(target=run, args=(name, targets, failed)) for name, targets in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
