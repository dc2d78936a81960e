"""Runs a command on some cores only: `python -m baton.cli.services.pinned 0-1 COMMAND ...`. The command replaces this process."""

import os
import sys
from collections.abc import Sequence


def pinned(command: Sequence[str], cores: Sequence[int]) -> tuple[str, ...]:
    """`command` as it has to be started to stay on `cores`."""
    return (sys.executable, "-m", "baton.cli.services.pinned", ",".join(map(str, cores)), *command)


def main(argv: Sequence[str]) -> None:
    os.sched_setaffinity(0, {int(core) for core in argv[0].split(",")})
    os.execvp(argv[1], list(argv[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
