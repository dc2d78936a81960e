"""What an answer must look like, as a client says it, and as the grammar that servers hold it to. Pure but for `GrammarCheck`, which has threads."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance

from baton.gateway.errors import OutOfRangeError, OverloadedError, StructuredOutputError
from baton.servicekit.deep_work import DeepWork

#: Of a schema, expression or grammar; servers take no more either.
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_TEXTS = 1024
#: Texts of grammars that are known to be sound, so that the next request need not wait for a thread.
MAX_KNOWN_BYTES = 4 * 1024 * 1024

#: Between the parts of JSON: nothing, one space, or a line break and an indent. A model that may write any white space may write it for ever.
WHITESPACE = r"( ?|\n {0,24})"
_JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE}


@dataclass(frozen=True, slots=True)
class Structure:
    """grammar: as llguidance reads it. field: where the client said it, for messages."""

    grammar: str
    field: str


def json_schema(schema: Mapping[str, Any] | str | bool, field: str) -> Structure:
    """JSON of a schema, which may be JSON text. Raises StructuredOutputError."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise StructuredOutputError(field, f"{field} must be a JSON schema, an object")
        return _structure(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(value), defaults=_JSON_OPTIONS), field)
    except (ValueError, RecursionError) as error:
        raise StructuredOutputError(field, f"{field} is no JSON schema: {error or 'it is nested too deeply'}") from error


def json_object(field: str) -> Structure:
    """Any JSON object."""
    return json_schema({"type": "object"}, field)


def regex(expression: str, field: str) -> Structure:
    """A text that the expression matches as a whole."""
    return _structure(llguidance.LLMatcher.grammar_from_regex(_given(expression, field)), field)


def lark(grammar: str, field: str) -> Structure:
    """A text of the context-free grammar."""
    return _structure(llguidance.LLMatcher.grammar_from_lark(_given(grammar, field)), field)


def choice(texts: Sequence[str], field: str) -> Structure:
    """One of the texts."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise OutOfRangeError(field, f"{len(texts)} texts", f"[1, {MAX_TEXTS}] texts")
    for number, text in enumerate(texts):
        _given(text, f"{field}[{number}]")
    return _structure(llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)), field)


def _given(text: str, field: str) -> str:
    if not text:
        raise StructuredOutputError(field, f"{field} is empty: leave it out for any text")
    return text


def _structure(grammar: str, field: str) -> Structure:
    num_bytes = len(grammar.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise OutOfRangeError(field, f"{num_bytes} bytes", f"[1, {MAX_GRAMMAR_BYTES}] bytes", "as a grammar; shorten it")
    return Structure(grammar, field)


class GrammarCheck:
    """Whether a grammar can be compiled, before anything is asked of a server. What the library takes over it is bounded by its limits (the servers'
    too): a few milliseconds, for the largest some hundred, on a thread with a deep stack: the library recurses along rules that name one another."""

    def __init__(self, tokenizer: Path) -> None:
        """tokenizer: the model's tokenizer.json, read when a grammar names special tokens, and not before (45 MB for 49,152 tokens)."""
        self._path = tokenizer
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._work = DeepWork(1, "grammars")
        self._sound: OrderedDict[str, None] = OrderedDict()
        self._num_bytes = 0

    async def check(self, structure: Structure | None) -> None:
        """Raises StructuredOutputError, OverloadedError."""
        if structure is None:
            return
        if structure.grammar in self._sound:
            self._sound.move_to_end(structure.grammar)
            return
        try:
            found = await self._work.run(self._problem, structure.grammar)
        except RuntimeError as error:
            raise OverloadedError(f"no thread could be started to look at {structure.field}: {error}") from error
        if found:
            raise StructuredOutputError(structure.field, f"{structure.field} cannot be compiled: {found}")
        self._note(structure.grammar)

    def _problem(self, grammar: str) -> str:
        """On the thread; empty: there is none. What could not be told without a tokenizer is a warning."""
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        if messages and not is_error:
            try:
                self._tokenizer = self._tokenizer or llguidance.LLTokenizer(str(self._path))
            except ValueError as error:
                return f"it names special tokens, and this model's tokenizer cannot be read for them: {error}"
            is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        return "; ".join(messages) if is_error else ""

    def _note(self, grammar: str) -> None:
        if grammar not in self._sound:
            self._sound[grammar] = None
            self._num_bytes += len(grammar)
        while self._num_bytes > MAX_KNOWN_BYTES:
            self._num_bytes -= len(self._sound.popitem(last=False)[0])
