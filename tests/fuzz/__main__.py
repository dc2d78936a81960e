"""`python -m tests.fuzz [--seconds 60] [TARGET ...]`: each decoder under atheris (coverage-guided, in a process of its own)."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
sys.path.insert(0, TESTS)

#: What one target runs as: imports are instrumented, then the fuzzer takes the process over.
ONE = """
import sys
import atheris
sys.path.insert(0, sys.argv.pop(1))
name, seconds, corpus = sys.argv[1:4]
rooms = ("kvtransfer", "prefill", "workerkit", "wire.ticket", "wire.member", "gateway")
with atheris.instrument_imports(include=[f"baton.{room}" for room in rooms]):
    from fuzz.targets import TARGETS

def run(data):
    TARGETS[name](data)

flags = (f"-max_total_time={seconds}", "-max_len=4096", "-print_final_stats=1", f"-artifact_prefix={corpus}/found-")
atheris.Setup([name, corpus, *flags], run)
atheris.Fuzz()
"""


def main() -> int:
    from fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all when none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: pip install atheris==3.0.0 (it has wheels for CPython 3.11 to 3.13 on Linux)", file=sys.stderr)
        return 2
    failed = []
    for name in options.targets or TARGETS:
        with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as corpus:
            for number, seed in enumerate(TARGETS[name].seeds):
                Path(corpus, f"seed-{number}").write_bytes(seed)
            command = [sys.executable, "-c", ONE, TESTS, name, str(options.seconds), corpus]
            ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            executed = [line.split()[-1] for line in ended.stderr.splitlines() if line.startswith("stat::number_of_executed_units")]
            print(f"{name}: {executed[0] if executed else 'no'} runs, status {ended.returncode}", flush=True)
            if ended.returncode or not executed:
                failed.append(name)
                print(ended.stderr[-6000:], flush=True)
    print(f"{len(failed)} of {len(options.targets or TARGETS)} targets failed: {failed}" if failed else "nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
