"""One simulated request, and the limits of a server that it meets."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.bench.errors import require

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ServerLimits:
    """As the servers' flags: --page-size, --num-pages, --max-batched-tokens, --mixed-prompt-tokens (None: no other limit), --max-running.

    growth_tokens and max_passes are the engine's own."""

    page_size: int = 16
    num_pages: int = 1_000_000
    max_batched_tokens: int = 1024
    mixed_prompt_tokens: int | None = None
    max_running: int = 64
    growth_tokens: int = 64
    max_passes: int = 16

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_batched_tokens", "max_running"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(
            self.max_running <= self.max_batched_tokens, "max_running", self.max_running, f"at most {self.max_batched_tokens}, the tokens of a step"
        )

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def prompt_budget(self, num_decoding: int) -> int:
        """Most tokens of prompts in a step with so many decode rows."""
        left = self.max_batched_tokens - num_decoding
        return left if self.mixed_prompt_tokens is None or not num_decoding else min(left, self.mixed_prompt_tokens)

    @property
    def pool_tokens(self) -> int:
        return self.page_size * self.num_pages


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. `prompt` and `answer` are numbers of tokens; `answer` at least 1.

    `length`: tokens so far, those of the answer included. `computed`: leading tokens whose keys and values are there.
    `held`: pages. `ticket`: order of admission. `pieces`: (step ends of a server, first, last + 1): one token at each of these ends.
    Times in seconds: `reserved_s` decode's pages, `bootstrapped_s`, `started_s` first chunk, `first_s` first token, `landed_s`,
    `last_s` the token before it joined rows, `ended_s`."""

    index: int
    arrived_s: float
    prompt: int
    answer: int
    is_long: bool = False
    length: int = 0
    computed: int = 0
    held: int = 0
    ticket: int = 0
    epoch: int = 0
    joined_at: int = 0
    reserved_s: float = 0.0
    bootstrapped_s: float = 0.0
    started_s: float = -1.0
    first_s: float = -1.0
    landed_s: float = -1.0
    ended_s: float = -1.0
    last_s: float = -1.0
    pieces: list[tuple[list[float], int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = self.prompt

    @property
    def left(self) -> int:
        """Tokens of the answer that are still to come."""
        return self.prompt + self.answer - self.length

    def gaps_s(self) -> Times:
        """Between its tokens; empty for an answer of one."""
        times = [self.first_s]
        for ends, first, last in self.pieces:
            times += ends[first:last]
        ends_s = np.asarray(times)
        gaps_s: Times = ends_s[1:] - ends_s[:-1]
        return gaps_s
