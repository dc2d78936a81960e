"""Fleets of real services with dummy weights, for the scripts here that measure through them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from geometry import served_folder

from baton.cli.fleet import FleetAddresses, FleetOptions, start_fleet
from baton.cli.services import Supervisor

STOP_PATIENCE_S = 10.0


def arguments(description: str | None, kv_bytes: int) -> argparse.ArgumentParser:
    """Those of every such script. kv_bytes: a server's, where the command says nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--device", default="cuda:0", help="of all servers but those that have one of their own")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-bytes", type=int, default=kv_bytes)
    parser.add_argument("--ready-timeout-s", type=float, default=180.0)
    parser.add_argument("--json", type=Path, help="write what was found there too")
    return parser


class Served:
    """The folder of one run: the model as fleets serve it, and a folder for each fleet."""

    def __init__(self, given: argparse.Namespace, run_dir: Path, stack: ExitStack) -> None:
        self.model = served_folder(given.model, run_dir)
        self._given, self._run_dir, self._stack = given, run_dir, stack

    def worker_flags(self, *, kv_bytes: int, max_running: int, max_batched_tokens: int, max_model_len: int) -> tuple[str, ...]:
        return (
            f"--device={self._given.device}", f"--dtype={self._given.dtype}", "--load-format=dummy", f"--kv-bytes={kv_bytes}",
            f"--max-running={max_running}", f"--max-batched-tokens={max_batched_tokens}", f"--max-model-len={max_model_len}",
        )  # fmt: skip

    def fleet(self, name: str, **options: Any) -> tuple[Supervisor, Callable[[], FleetAddresses]]:
        """The supervisor of a fleet, which ends with the run, and what starts it, from any thread. options: of FleetOptions."""
        supervisor = self._stack.enter_context(Supervisor(self._run_dir / name.replace(" ", "-"), STOP_PATIENCE_S))
        asked = FleetOptions(
            self.model, self.model.name, http_port=0, grpc_port=0, bootstrap_port=0, ready_timeout_s=self._given.ready_timeout_s, **options
        )
        return supervisor, partial(start_fleet, asked, supervisor, partial(print, f"# {name}:", flush=True))

    def print_logs(self) -> None:
        for log in sorted(self._run_dir.rglob("*.log")):
            print(f"--- {log.relative_to(self._run_dir)}\n{log.read_text()[-2000:]}", file=sys.stderr)


@contextmanager
def serving(given: argparse.Namespace) -> Iterator[Served]:
    """Ends every fleet; prints the ends of their logs first where something failed."""
    with ExitStack() as stack:
        served = Served(given, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-"))), stack)
        try:
            yield served
        except Exception:
            served.print_logs()
            raise
