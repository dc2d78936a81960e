"""An answer's text as it comes, split into what is said and the calls that are made. Nothing is lost: what turns out to be no call is text. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from baton.gateway.tools.formats import CallFormat
from baton.gateway.tools.offer import Offer
from baton.gateway.tools.scanner import CallPart, CallScanner, new_call_id


@dataclass(slots=True)
class Said:
    text: str = ""
    calls: list[CallPart] = field(default_factory=list)


class CallParser(Protocol):
    @property
    def num_calls(self) -> int:
        """Calls that were found so far."""

    def feed(self, text: str) -> Said:
        """What this text brings."""

    def finish(self) -> Said:
        """What was held back when the answer ended."""


def parser_of(offer: Offer, form: CallFormat) -> CallParser:
    if offer.choice == "named":
        return _Arguments(offer.function)
    return _Marked(offer, _FORCED if offer.is_forced else form)


#: Calls alone, from the first character on.
_FORCED = CallFormat("forced", "")


class _Arguments:
    """The whole answer is the arguments of one function."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._begun = False

    @property
    def num_calls(self) -> int:
        return int(self._begun)

    def feed(self, text: str) -> Said:
        if not text:
            return Said()
        head = [] if self._begun else [CallPart(0, call_id=new_call_id(), name=self._function)]
        self._begun = True
        return Said(calls=[*head, CallPart(0, text)])

    def finish(self) -> Said:
        return Said()


class _Marked:
    """Text, and calls between a format's marks."""

    def __init__(self, offer: Offer, form: CallFormat) -> None:
        self._form = form
        self._most = None if offer.parallel else 1
        self._scanner = CallScanner([tool.name for tool in offer.callable])
        self._in_calls = form is _FORCED
        self._held = ""  # of text: what may be a mark, or white space before one
        self._marks = ""  # of calls: what stands between objects, and is text again where no call follows
        self._has_text = False

    @property
    def num_calls(self) -> int:
        return self._scanner.num_calls if self._most is None else min(self._most, self._scanner.num_calls)

    def feed(self, text: str) -> Said:
        said = Said()
        for char in text:
            if self._in_calls:
                self._call_char(char, said)
            else:
                self._text_char(char, said)
        return said

    def finish(self) -> Said:
        said = Said()
        if self._in_calls:
            self._add(said, self._scanner.cut())
            left = self._scanner.refused
            if left is not None or not self.num_calls:
                said.text += self._marks + (left or "")
        elif not self.num_calls or self._held.strip():
            said.text += self._held
        self._held = self._marks = ""
        return said

    def _text_char(self, char: str, said: Said) -> None:
        self._held += char
        form = self._form
        kept = self._held.lstrip()
        if form.bare and not self._has_text and not self.num_calls and kept == "{":
            self._marks, self._held, self._in_calls = self._held[: -len(kept)], "", True
            self._call_char(char, said)
        elif form.begin and self._held.endswith(form.begin):
            before = self._held[: -len(form.begin)]
            space = before[len(before.rstrip()) :]
            said.text += before[: len(before) - len(space)]
            self._marks, self._held, self._in_calls = space + form.begin, "", True
        else:
            keep = _tail(self._held, form.begin)
            out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            said.text += out
            self._has_text = self._has_text or bool(out.strip())

    def _call_char(self, char: str, said: Said) -> None:
        was_between = self._scanner.is_between
        if was_between and self._ends_calls(char, said):
            return
        calls = self._scanner.num_calls
        self._add(said, self._scanner.feed(char))
        if self._scanner.refused is not None:
            said.text += self._marks + self._scanner.refused
            self._scanner.refused, self._marks = None, ""
            self._has_text = True
            self._in_calls = False
        elif self._scanner.num_calls > calls:
            self._marks = ""
        elif was_between and self._scanner.is_between:
            self._marks += char

    def _ends_calls(self, char: str, said: Said) -> bool:
        """Reads an end mark, character by character; True: this one belongs to it."""
        end = self._form.end
        seen = self._held + char
        if not end or not end.startswith(seen):
            if self._held:  # it was none
                self._marks, self._held = self._marks + self._held, ""
            return False
        self._held = seen
        if seen == end:
            if self._form.begin in self._marks:  # nothing was called
                said.text += self._marks + end
            self._marks, self._held, self._in_calls = "", "", False
        return True

    def _add(self, said: Said, parts: list[CallPart]) -> None:
        said.calls += [part for part in parts if self._most is None or part.index < self._most]


def _tail(text: str, mark: str) -> int:
    """How many of the last characters may be white space before a mark, and the mark's beginning."""
    begun = next((count for count in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-count:])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
