"""Measures what a calibration needs on live servers: prompts one at a time, rows in growing numbers, and prompts among rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.bench.arrivals import ArrivalOptions
from baton.bench.errors import require
from baton.bench.runfile import Run, load_run
from baton.bench.session import Contestant, Plan, Progress, measure
from baton.bench.workload import WorkloadOptions

#: Parts of the longest prompt that are measured one at a time.
PROMPT_PARTS = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0)
SHORT_WORDS = 16


@dataclass(frozen=True)
class Effort:
    """`longest_words`: of a prompt; longer ones are extrapolated. `most_rows`: of streams at a time. `num_each`: requests of a point."""

    longest_words: int = 512
    most_rows: int = 8
    num_each: int = 6
    answer_tokens: int = 24

    def __post_init__(self) -> None:
        require(self.longest_words >= 64, "longest_words", self.longest_words, "at least 64")
        require(self.most_rows >= 2, "most_rows", self.most_rows, "at least 2")
        require(self.num_each >= 4, "num_each", self.num_each, "at least 4")
        require(self.answer_tokens >= 8, "answer_tokens", self.answer_tokens, "at least 8")


def stages(effort: Effort, seed: int) -> Iterator[tuple[str, Plan]]:
    """Each stage has prompts of its own, so that no prefix cache answers."""
    for words in sorted({max(4, round(part * effort.longest_words)) for part in PROMPT_PARTS}):
        workload = WorkloadOptions("fixed", seed + words, prompt_words=words, answer_tokens=3)
        yield f"prompt-{words}", Plan(workload, ArrivalOptions("closed", num_clients=1), effort.num_each, num_warm_up=1)
    rows = effort.most_rows
    batches = ((1, SHORT_WORDS), (max(2, rows // 4), SHORT_WORDS), (rows, SHORT_WORDS), (max(2, rows // 2), effort.longest_words // 2))
    for clients, words in dict.fromkeys(batches):
        workload = WorkloadOptions("fixed", seed + 10_000 + clients + words, prompt_words=words, answer_tokens=effort.answer_tokens)
        arrivals = ArrivalOptions("closed", num_clients=clients)
        yield f"rows-{clients}-{words}", Plan(workload, arrivals, max(effort.num_each, 2 * clients), num_warm_up=1)
    workload = WorkloadOptions(
        "chat",
        seed + 20_000,
        prompt_words=SHORT_WORDS,
        answer_tokens=effort.answer_tokens,
        document_words=effort.longest_words // 4,
        document_share=0.34,
    )
    yield "mixed", Plan(workload, ArrivalOptions("closed", num_clients=3), 6 * effort.num_each, num_warm_up=1)


async def measure_stages(contestants: Sequence[Contestant], folder: Path, effort: Effort, seed: int, progress: Progress) -> dict[str, list[Run]]:
    """Runs of each contestant by its name, the contestants in turns in every stage; raw samples stay in `folder`."""
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for name, plan in stages(effort, seed):
        for path in await measure(plan, contestants, folder / name, progress):
            runs[path.stem].append(load_run(path))
    return runs
