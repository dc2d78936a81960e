"""Our figures beside the peers' of the same run: python benchmarks/gpu/beside.py OUT (the folder that all.sh filled)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

GOAL = 1.0
LEAST = 0.95


def main() -> int:
    out = Path(sys.argv[1])
    if not all((out / name).exists() for name in ("engine.json", "peers.json")):
        print(f"{out} lacks engine.json or peers.json: run their parts first")
        return 1
    found = {line["name"]: line["measured"] for line in json.loads((out / "engine.json").read_text())["found"]}
    ours = {f"decode_{batch}_ms": found.get(f"decode step, batch {batch}") for batch in (1, 16, 64)} | {"prefill_ms": found.get("prefill, ms")}
    ours |= {f"prefill_{length}_ms": found.get(f"prefill of {length}, ms") for length in (64, 256, 512, 1024)}
    good, ahead, compared = True, True, set()
    for peer, theirs in json.loads((out / "peers.json").read_text()).items():
        for name, value in theirs.items():
            mine = ours.get(name)
            if mine is None:
                continue
            ratio = value / mine
            good, ahead = good and ratio >= LEAST, ahead and ratio >= GOAL
            compared.add(peer)
            print(f"{name:<16} ours {mine:8.2f}  {peer:<12} {value:8.2f}  {peer}/ours {ratio:5.2f}  goal {GOAL}, at least {LEAST}")
    if compared != {"vllm", "transformers"}:
        print(f"compared with {', '.join(sorted(compared)) or 'nobody'} only: vLLM and transformers belong to a whole run")
        return 1
    print(f"ahead of both in every cell: {'yes' if ahead else 'no'}; no cell below {LEAST}: {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
