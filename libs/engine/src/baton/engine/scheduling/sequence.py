"""One request on its way through an engine, and the piece of it that one step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from baton.engine.page_table import PageTable
from baton.engine.prefix_tree import PrefixNode
from baton.engine.types import EngineEvent, FinishReason, Logprobs, PromptLogprobs, Request

#: Of a step in which nobody asked for any.
NO_LOGPROBS: Mapping[int, Logprobs] = MappingProxyType({})


NOTHING = range(0)


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens: prompt, then answer, as far as known here. num_pending: tokens that a launched step draws and the host has not read yet.
    num_computed: leading tokens whose keys and values are in `pages`, or will be when all that was launched has run.
    num_in_flight: launched slices whose outcome has not been read, and copies of a page for forks: until then a device may still write into `pages`,
    or read them.
    num_sure: leading tokens whose keys and values have been computed, and gave logits that were finite.
    source: a fork's, until it has pages: whose last page of the prompt it copies. retracted: it had pages and gave them up.
    num_scored: leading tokens of the prompt whose successors' log probabilities are told, or will be, or are nobody's wish.
    num_resident: leading tokens that were here before the sequence came. prefix, num_shared_pages: what of `pages` is the prefix tree's, and held.

    A sequence computes tokens [num_computed, length); when all are computed, the last one's logits give the next token.
    So a decode step, a prompt's chunk and the recompute after a retraction are the same thing with other numbers.

    Of the request, which does not change meanwhile, and looked up once because every step asks: room, num_prompt, last_length (tokens with which
    the answer is as long as was asked for), stops (tokens that end it), runs_ahead (the token behind one that is not read yet may be computed: what a
    grammar allows there depends on that one).
    """

    request: Request
    tokens: list[int]
    num_computed: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    num_sure: int = 0
    num_scored: int = 0
    num_resident: int = 0
    num_shared_pages: int = 0
    prefix: PrefixNode | None = None
    source: Sequence | None = None
    retracted: bool = False
    pages: PageTable = field(default_factory=PageTable)
    room: int = field(init=False)
    num_prompt: int = field(init=False)
    last_length: int = field(init=False)
    stops: frozenset[int] = field(init=False)
    runs_ahead: bool = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.room = self.request.room
        self.num_prompt = len(self.request.prompt)
        self.last_length = self.num_prompt + sampling.max_tokens
        self.stops = sampling.stop_token_ids
        self.runs_ahead = sampling.grammar is None

    @property
    def num_own_pages(self) -> int:
        """Pages that nobody else may hold."""
        return self.pages.num_pages - self.num_shared_pages

    @property
    def length(self) -> int:
        """Tokens, those that are drawn but not yet read included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - self.num_prompt

    def max_tokens_left(self, max_model_len: int) -> int:
        """How many tokens this sequence may still be extended by."""
        return min(self.last_length, max_model_len) - len(self.tokens) - self.num_pending

    def launch(self, count: int, samples: bool) -> None:
        """`count` more tokens are being computed."""
        self.num_computed += count
        if self.num_scored < self.num_computed:
            self.num_scored = self.num_computed
        self.num_pending += samples
        self.num_in_flight += 1

    def land(self, samples: bool) -> None:
        """The outcome of the oldest launched slice was read."""
        self.num_pending -= samples
        self.num_in_flight -= 1

    def wants_scores(self) -> bool:
        """Whether log probabilities of the prompt are still to be told: then none of its tokens may be left out of a pass."""
        return self.request.sampling.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    def slice(self, count: int, samples: bool) -> Slice:
        """The next `count` tokens."""
        end = self.num_computed + count
        scored = range(max(self.num_computed, self.num_scored), min(end, self.num_prompt - 1)) if self.wants_scores() else NOTHING
        return Slice(self, self.num_computed, count, samples, scored)

    def next_token(self) -> Slice:
        """Of a sequence that lacks its last token only: no token of the prompt is behind that one, and nothing is scored."""
        return Slice(self, self.num_computed, 1, True)

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Whether the answer ends with the token that was appended last."""
        length = len(self.tokens)
        if self.tokens[-1] in self.stops and length - self.num_prompt >= self.request.sampling.min_tokens:
            return FinishReason.STOP
        if length >= self.last_length or length >= max_model_len:
            return FinishReason.LENGTH
        return None


@dataclass(slots=True)
class Slice:
    """Tokens [start, start + count) of a sequence are computed in this step; `samples`: and the token after them is drawn. scored: those of them
    behind which the prompt's next token is scored.

    Never changed, and yet not frozen: a step makes one for each of its rows, and frozen ones take three times as long to make."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    scored: range = NOTHING


@dataclass(frozen=True, slots=True)
class StepPlan:
    """exports: (room, first page, number of pages) that are complete once this step has written its keys and values. resident: those that are
    complete already, of rooms that this step begins with. copies: (from, to), pages that are copied before anything else of the step. sources: whose
    pages those are that it reads. num_decodes: so many leading slices are each the last token of a sequence, and draw the next one."""

    slices: tuple[Slice, ...] = ()
    exports: tuple[tuple[int, int, int], ...] = ()
    resident: tuple[tuple[int, int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    sources: tuple[Sequence, ...] = ()
    num_decodes: int = 0

    @property
    def decodes_only(self) -> bool:
        """Whether no row is of a chunk of a prompt: those are behind the decode rows."""
        return self.num_decodes == len(self.slices) > 0


def launch_decodes(pieces: Iterable[Slice]) -> None:
    """`launch` of many sequences whose last tokens are being computed: in one loop, because every step has as many as it has rows. No token of a
    prompt is among them that has a successor to be scored."""
    for piece in pieces:
        sequence = piece.sequence
        sequence.num_computed += 1
        sequence.num_pending += 1
        sequence.num_in_flight += 1


def land(pieces: Iterable[Slice]) -> None:
    """`land` of each one's sequence, in one loop for the same reason."""
    for piece in pieces:
        sequence = piece.sequence
        sequence.num_pending -= piece.samples
        sequence.num_in_flight -= 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The part of the configuration that policy needs. max_model_len: prompt + answer, in tokens.

    mixed_prompt_tokens: most tokens of prompts in a step that also has decode rows; None: what the step has left.
    """

    page_size: int
    max_num_batched_tokens: int
    max_running: int
    max_model_len: int
    growth_tokens: int
    max_passes: int
    vocab_size: int
    mixed_prompt_tokens: int | None = None

    def prompt_budget(self, num_decoding: int) -> int:
        """How many tokens of prompts the step of so many decode rows may compute: each of them makes those rows wait."""
        left = self.max_num_batched_tokens - num_decoding
        return left if self.mixed_prompt_tokens is None or not num_decoding else min(left, self.mixed_prompt_tokens)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def headroom(self, sequence: Sequence) -> int:
        """Pages that the answer may come to want behind the pages it has: a hint for placement, capped so that one long
        answer does not scatter the others."""
        return self.pages_for(max(0, min(sequence.max_tokens_left(self.max_model_len), 8 * self.growth_tokens)))

    def room_for(self, num_free: int, alone: bool) -> Callable[[Sequence], bool]:
        """Whether a new sequence fits into `num_free` pages, its own growth included; one that has the pool for itself needs no spare."""
        if alone:
            return lambda sequence: self.pages_for(len(sequence.tokens)) <= num_free
        return lambda sequence: self.growth_pages(sequence) <= num_free

    def growth_pages(self, sequence: Sequence) -> int:
        """Pages that must stay free so that this sequence can go on for `growth_tokens` more tokens (or to its end)."""
        ahead = max(0, min(sequence.max_tokens_left(self.max_model_len), self.growth_tokens))
        return max(0, self.pages_for(sequence.length + ahead) - sequence.pages.num_pages)


def told_of_prompts(scored: Iterable[tuple[Slice, list[Logprobs]]], wanted: Callable[[Sequence], bool]) -> list[EngineEvent]:
    """What rooms are told of their prompts, where somebody still listens."""
    return [PromptLogprobs(piece.sequence.room, piece.scored.start + 1, tuple(logprobs)) for piece, logprobs in scored if wanted(piece.sequence)]
