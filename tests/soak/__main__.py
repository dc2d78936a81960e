"""`python -m tests.soak [--minutes 10 | --hours 8]`: rounds of restarts under load until the time is over, and a report of them."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from soak.clients import questions
from soak.house import House
from soak.report import text_of, write
from soak.rounds import KILLED, STOPPED, Round, Soak


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Every kind of process restarted under many clients.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; a round that has begun is ended (default 10)")
    parser.add_argument("--hours", type=float, default=0.0, help="added to --minutes")
    parser.add_argument("--clients", type=int, default=512, help="clients at once (default 512)")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="of each request (default 120)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write docs/results/<today>-soak.md")
    return parser.parse_args()


async def soak(house: House, options: argparse.Namespace) -> list[Round]:
    ends = time.monotonic() + 60 * options.minutes + 3600 * options.hours
    one = Soak(house, questions(house.model_path, 24, options.seed), options.clients, options.deadline_s, options.seed)
    await one.learn()
    rounds = [await one.play(())]
    print(f"round 0, nothing restarted: {rounds[0].judgement.right} right of {rounds[0].judgement.total}", flush=True)
    while time.monotonic() < ends or len(rounds) < 2:
        rounds.append(await one.play(KILLED if len(rounds) % 2 else STOPPED))
        said = rounds[-1].judgement
        print(f"round {len(rounds) - 1}: {said.right} right, {said.num_failed} failed by name, {said.cut_off} cut off of {said.total}", flush=True)
    return rounds


def main() -> int:
    options = arguments()
    found = subprocess.run([sys.executable, "-m", "baton.cli.main", "model", "path", "smollm2"], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as run_dir:
        house = House(Path(found.stdout.strip()), Path(run_dir), options.deadline_s)
        try:
            rounds = asyncio.run(soak(house.build(), options))
        except BaseException:
            house.kill_all()
            raise
        house.close()
    text = text_of(rounds, house, options.clients, f"python -m tests.soak {' '.join(sys.argv[1:])}")
    print(text)
    if options.write:
        print(f"written to {write(text)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
