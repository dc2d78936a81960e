"""docs/failures.md: read, compared with a run, and written."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from faults.cells import FAULTS, STATES, Outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "failures.md"

#: Between outcomes that were all seen: which of two processes notices a fault first is chance.
OR = " *or* "

HEAD = """\
# What fails, and what everybody sees of it

Made by `python -m tests.faults` (as root: it puts each service in a network namespace of its own), which leads a request on real processes into each
state, holds it there, lets each fault strike and writes down what it saw. `python -m tests.faults --check` runs it again and compares codes, causes,
origins, stages and what was counted, not times. `--only "kill decode"` (or a state) runs a part; `--merge` adds what a run saw to what is here. The
long tests (`tox run -e long`) run a part of it ([tests/test_fault_table.py](../tests/test_fault_table.py)).

{made}

One prefill server, one decode server, one gateway, KV pages over UCX tcp, every digest compared, prefill in chunks of 64 tokens, other settings as
they are by default: `--retries` has nowhere to go, and `--kv-load-failure-policy` is `fail`. With a second pair, every failure of a server before
decode's first token is answered by that pair instead ([tests/test_retry.py](../tests/test_retry.py)): it sees nothing. *kill* is SIGKILL,
*stop* is SIGSTOP for 10 s and then SIGCONT, *cut* is a wire on which frames vanish for 20 s, in both directions, without any socket being closed.

* **client sees**: gRPC code, cause, origin and stage of the status; *from its own gRPC* where no gateway was left to say more. Over HTTP the same
  failure has its status from the table in [errors.py](../services/gateway/src/baton/gateway/http/errors.py): UNAVAILABLE is 503,
  DEADLINE_EXCEEDED 504, or, in a stream that has begun, a last event with the error in it. *answered* and *stream goes on*: it sees nothing.
* **counted**: what each service counts ([baton_rooms_failed_total](metrics.md), and a failed bootstrap or transfer where it was one), and logs as
  `room failed`, as cause (origin). [The test](../tests/test_fault_table.py) scrapes every service: each kill in each state moves those and no others.
* **pages back**: when no page and no room was held any more on any server that lives.
* **told**, **back**: seconds from the fault, in this run. A run under load takes longer. gRPC notices a peer that answers nothing after 5 s where
  something was under way, and after 15 s where all was quiet, so that some stops of 10 s are noticed and some are not.
* Where several outcomes were seen, they are joined by *or*, said once where they do not differ: whose notice comes first is chance.
"""

COLUMNS = ("fault", "client sees", "counted", "pages back", "quarantine seen", "told", "back")


def read(path: Path = DOCUMENT) -> dict[tuple[str, str], Outcome]:
    """The cells of the committed document; each fact may be alternatives joined by OR."""
    found: dict[tuple[str, str], Outcome] = {}
    state = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            state = line.removeprefix("## ").strip()
        if state in STATES and line.startswith("| ") and not line.startswith(("| fault", "| ---")):
            fault, client, counted, pages, quarantined, told, back = (cell.strip() for cell in line.strip("|").split("|"))
            found[fault, state] = Outcome(fault, state, client, counted, pages, _number(told), _number(back), quarantined == "yes")
    return found


def differences(committed: dict[tuple[str, str], Outcome], seen: list[Outcome]) -> list[str]:
    """Each fact of a run that is not among those of the document."""
    wrong = []
    for outcome in seen:
        known = committed.get(outcome.key)
        if known is None:
            wrong.append(f"{outcome.fault} in {outcome.state}: not in the document")
        elif outcome.facts not in _alternatives(known):
            wrong.append(f"{outcome.fault} in {outcome.state}: seen {outcome.facts}, the document has {_alternatives(known)}")
    return wrong


def merged(committed: dict[tuple[str, str], Outcome], seen: list[Outcome]) -> dict[tuple[str, str], Outcome]:
    """The document's cells and what a run saw of them: alternatives are added, times are the run's."""
    cells = dict(committed)
    for outcome in seen:
        known = cells.get(outcome.key)
        facts = [] if known is None else _alternatives(known)
        if outcome.facts not in facts:
            facts.append(outcome.facts)
        client, counted, pages = (_joined(fact) for fact in zip(*facts, strict=True))
        quarantined = outcome.quarantined or (known is not None and known.quarantined)
        cells[outcome.key] = Outcome(outcome.fault, outcome.state, client, counted, pages, outcome.told_s, outcome.back_s, quarantined)
    return cells


def write(cells: dict[tuple[str, str], Outcome], path: Path = DOCUMENT) -> None:
    parts = [HEAD.format(made=_made())]
    for state in STATES:
        rows = [_row(cells[fault, state]) for fault in FAULTS if (fault, state) in cells]
        parts.append("\n".join([f"## {state}\n", _line(*COLUMNS), _line(*["---"] * len(COLUMNS)), *rows]) + "\n")
    path.write_text("\n".join(parts), encoding="utf-8")


def _joined(facts: tuple[str, ...]) -> str:
    """What is the same in all of them is said once."""
    return facts[0] if len(set(facts)) == 1 else OR.join(facts)


def _alternatives(outcome: Outcome) -> list[tuple[str, str, str]]:
    columns = [fact.split(OR) for fact in outcome.facts]
    num = max(map(len, columns))
    return list(zip(*(column * num if len(column) == 1 else column for column in columns), strict=True))


def _row(outcome: Outcome) -> str:
    quarantined = "yes" if outcome.quarantined else ""
    return _line(outcome.fault, *outcome.facts, quarantined, _seconds(outcome.told_s), _seconds(outcome.back_s))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _number(text: str) -> float | None:
    return float(text.removesuffix(" s")) if text else None


def _made() -> str:
    models = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    where = f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"
    return f"This one: {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {where}, Python {platform.python_version()}, SmolLM2-135M in float32."
