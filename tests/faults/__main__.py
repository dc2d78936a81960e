"""`python -m tests.faults`: drives every cell and writes docs/failures.md; `--check` compares instead. See tests/faults/table.py."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.cells import FAULTS, STATES, FaultFleet, Outcome, drive, fault_fleet, restore
from faults.net import why_not
from faults.table import DOCUMENT, differences, merged, read, write


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Every fault in every state, on real processes.")
    parser.add_argument("--check", action="store_true", help="compare with docs/failures.md and write nothing")
    parser.add_argument("--merge", action="store_true", help="keep what the document has and add what is seen")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="cells whose fault or state holds these words; repeatable")
    return parser.parse_args()


def model_path() -> Path:
    command = [sys.executable, "-m", "baton.cli.main", "model", "path", "smollm2"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def chosen(only: list[str]) -> list[tuple[str, str]]:
    """By fault, so that the four states of one fault follow one another."""
    return [(fault, state) for fault in FAULTS for state in STATES if not only or any(words in f"{fault} in {state}" for words in only)]


def main() -> int:
    options = arguments()
    reason = why_not()
    if reason:
        print(f"the table cannot be made: {reason}", file=sys.stderr)
        return 2
    seen: list[Outcome] = []
    keep = options.merge or bool(options.only)
    before = read() if DOCUMENT.exists() and (keep or options.check) else {}
    cells = chosen(options.only)
    with tempfile.TemporaryDirectory(prefix="baton-faults-") as run_dir, fault_fleet(FaultFleet, model_path(), Path(run_dir)) as fleet:
        for number, (fault, state) in enumerate(cells, 1):
            outcome = drive(fleet, fault, state)
            print(f"{number}/{len(cells)} {fault} in {state}: {' | '.join(outcome.facts)}", flush=True)
            seen.append(outcome)
            if not options.check:
                write(merged(before, seen))
            restore(fleet)
    if options.check:
        wrong = differences(before, seen)
        print("\n".join(wrong) or f"{len(seen)} cells are as {DOCUMENT.name} says")
        return 1 if wrong else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
