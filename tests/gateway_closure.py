"""Run inside the gateway's own environment: exits 1 when torch is installed there or reached by importing the gateway."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

FORBIDDEN = {"torch", "triton", "transformers", "numpy", "baton-engine", "baton-kernels", "baton-kvtransfer", "baton-workerkit"}


def main() -> int:
    installed = {(d.metadata["Name"] or "").lower() for d in importlib.metadata.distributions()}
    importlib.import_module("baton.gateway.app")
    reached = {name.partition(".")[0] for name in sys.modules}
    wrong = sorted(FORBIDDEN & (installed | reached))
    if wrong:
        print(f"the gateway's closure holds {', '.join(wrong)}: remove the dependency that brings it", file=sys.stderr)
        return 1
    print(f"{len(installed)} distributions in the gateway's closure, no torch")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
