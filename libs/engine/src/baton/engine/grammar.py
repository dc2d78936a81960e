"""What an answer is held to: grammars, compiled for one model's tokenizer, and at each place the tokens that may not come next.

Nothing is kept that the tokens do not say: a sequence's state is where its answer so far leads from the grammar's beginning. So the server that
draws the first token, the one that goes on behind it, and one that computes it all again rule out the same tokens.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import llguidance
import numpy as np
from numpy.typing import NDArray

from baton.engine.errors import EngineError

#: Of one grammar, as text.
MAX_GRAMMAR_BYTES = 256 * 1024
#: Texts of the compiled grammars that are kept: a large one takes some 60 bytes of memory for each byte of its text.
MAX_KEPT_BYTES = 1024 * 1024


class GrammarError(EngineError):
    """A grammar that cannot be compiled. What is wrong with it, in words, which may quote it."""


class NoGrammarsError(GrammarError):
    """A model for which none can be: nothing of the grammar is in the message."""


def limits() -> llguidance.LLParserLimits:
    """What one grammar may cost: about 20 ms to begin with, 17 ms at each place, 40 MB; what would take more is an error."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_items_in_row=2_000, max_grammar_size=500_000,
        max_lexer_states=20_000, verbose_errors=False,
    )  # fmt: skip


class Constraint:
    """One sequence's. `begin` is called before each step that draws its next token, on the engine's thread; `forbidden` then waits for what a thread
    of `Masks` makes of it."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_taken = 0
        self._next: list[int] = []
        self._made: Future[None] | None = None
        self._forbidden: NDArray[np.bool_] = np.ones(vocab_size, dtype=np.bool_)
        #: Why it cannot go on: the answer has a token that the grammar does not allow, or following it takes too long. Empty: it can.
        self.fault = ""

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """tokens[first:] is the answer so far; it has grown since the last call, and is known to its end."""
        self._next = list(tokens[first + self._num_taken :])
        self._num_taken = len(tokens) - first

    def made_by(self, made: Future[None]) -> None:
        self._made = made

    def make(self) -> None:
        """What `forbidden` gives, on any thread. Raises nothing."""
        if not self.fault and not self._matcher.consume_tokens(self._next):
            self.fault = _fault_of(self._matcher) or f"the answer's tokens {self._next[:8]} do not go on with what the grammar allows"
        mask = b"" if self.fault else self._matcher.compute_bitmask()
        if not self.fault and self._matcher.is_error():
            self.fault = _fault_of(self._matcher) or "it is not said why"
        if self.fault:
            self._forbidden = np.ones(self._vocab_size, dtype=np.bool_)
            return
        allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=self._vocab_size, bitorder="little")
        self._forbidden = allowed == 0

    def forbidden(self) -> NDArray[np.bool_]:
        """[vocabulary]: the tokens that may not come next; all of them where there is a `fault`. Waits for `make`."""
        if self._made is not None:
            self._made.result()
        return self._forbidden


class Grammar:
    """Compiled; any number of sequences may be held to it at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def constraint(self) -> Constraint:
        """For one sequence, at the beginning of its answer."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size)


class Grammars:
    """Compiles for the model in `folder`, whose logits have `vocab_size` places. Any thread may ask. The tokenizer is read when the first grammar is
    compiled: a server that is never sent one has no memory for it (45 MB for 49,152 tokens)."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._num_kept_bytes = 0

    def known(self, text: str) -> Grammar | None:
        """The grammar, if it is kept: at once."""
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
            return self._kept.get(text)

    def compile(self, text: str) -> Grammar:
        """Takes milliseconds, for a large grammar a hundred, and the first time as long as reading the tokenizer. Raises GrammarError."""
        matcher = llguidance.LLMatcher(self._read(), text, log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        # The first mask builds most of what later ones need: here, off the engine's way.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_fault_of(matcher) or "it is not said why")
        grammar = Grammar(matcher, self._vocab_size)
        self._keep(text, grammar)
        return grammar

    def _keep(self, text: str, grammar: Grammar) -> None:
        with self._lock:
            if text in self._kept:
                return
            self._kept[text] = grammar
            self._num_kept_bytes += len(text)
            while self._num_kept_bytes > MAX_KEPT_BYTES:
                oldest, _ = self._kept.popitem(last=False)
                self._num_kept_bytes -= len(oldest)

    def _read(self) -> llguidance.LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                path = self._folder / "tokenizer.json"
                try:
                    ends = _end_tokens(self._folder)
                    self._tokenizer = llguidance.LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=ends or None)
                except (OSError, ValueError) as error:
                    raise NoGrammarsError(f"this model's tokenizer allows no structured output: {path}: {error}") from error
            return self._tokenizer


def _fault_of(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher cannot go on; empty: it does not say."""
    said = matcher.get_error().partition("\n")[0][:300] if matcher.is_error() else ""
    if said == "NoExtensionBias":
        return "it allows no text, not even an empty one"
    return "" if "no error message" in said else said


def _end_tokens(folder: Path) -> list[int]:
    """What ends an answer, as for the gateway: generation_config.json says it, else config.json; empty: the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return list(value) if isinstance(value, list) else [value]
    return []
