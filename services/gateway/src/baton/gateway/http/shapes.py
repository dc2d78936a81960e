"""Answers in OpenAI's shapes: whole and in chunks, of a chat and of a completion. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.answer import Piece
from baton.gateway.tools.scanner import CallPart
from baton.wire.v1 import common_pb2, inference_pb2

_FINISH = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length", common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls"}


def finish_name(reason: common_pb2.FinishReason.ValueType | None) -> str | None:
    return None if reason is None else _FINISH[reason]


def usage_body(usage: inference_pb2.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Style:
    """What of an answer's body the request chose. include_usage: every chunk has a usage field, null but in the last. echo: by prompt, text that
    comes before the answer's; empty: none is. top_logprobs: of so many tokens with each of the answer's, and of the echo's. prompt_logprobs: the same
    of the prompt's, in a field of their own. spell: the bytes that a token stands for. num_choices: to each prompt."""

    spell: Callable[[int], bytes]
    include_usage: bool = False
    echo: Sequence[str] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_choices: int = 1


class Shape(ABC):
    """Bodies of one answer."""

    def __init__(self, answer_id: str, model: str, created_s: int, style: Style) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "created": created_s, "model": model}
        self._style = style
        self._prompts: dict[int, tuple[Sequence[int], Sequence[inference_pb2.TokenLogprobs]]] = {}

    def prompted(self, number: int, prompt: Sequence[int], logprobs: Sequence[inference_pb2.TokenLogprobs]) -> None:
        """A prompt, and the log probabilities of its tokens behind the first where they were asked for: to be told before anything of its answers."""
        self._prompts[number] = prompt, logprobs

    def _prompt_of(self, choice: int) -> int:
        return choice // self._style.num_choices

    def _prompt_logprobs(self, choice: int) -> list[dict[str, Any] | None]:
        """As vLLM has them: for each of the prompt's tokens by id, its own and the most probable ones'; null for the first."""
        told: list[dict[str, Any] | None] = [None]
        prompt, of_prompt = self._prompts[self._prompt_of(choice)]
        for token, said in zip(prompt[1:], of_prompt, strict=True):
            best = list(zip(said.top_token_ids, said.top_logprobs, strict=True))[: self._style.prompt_logprobs]
            entries = {other: (logprob, rank) for rank, (other, logprob) in enumerate(best, start=1)} | {token: (said.logprob, said.rank)}
            told.append({str(i): {"logprob": value, "rank": rank, "decoded_token": self._spelt(i)} for i, (value, rank) in entries.items()})
        return told

    def whole(self, pieces: Sequence[Piece], usage: inference_pb2.Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed. pieces: of all choices."""
        of_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            of_choice.setdefault(piece.choice, []).append(piece)
        choices = [{"index": index} | self._choice(own) | {"finish_reason": finish_name(own[-1].finish)} for index, own in sorted(of_choice.items())]
        return self._head | {"object": self._object().removesuffix(".chunk"), "choices": choices, "usage": usage_body(usage)}

    @abstractmethod
    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""

    @abstractmethod
    def first(self, choice: int) -> list[dict[str, Any]]:
        """Chunks before a choice's text."""

    @abstractmethod
    def piece(self, piece: Piece) -> dict[str, Any]:
        """A chunk of text, and the log probabilities of its tokens."""

    @abstractmethod
    def last(self, piece: Piece) -> dict[str, Any]:
        """The chunk with the finish reason, which a choice's last piece has."""

    @abstractmethod
    def _object(self) -> str: ...

    def usage(self, usage: inference_pb2.Usage) -> list[dict[str, Any]]:
        """The chunk after the last, if the client asked for it."""
        if not self._style.include_usage:
            return []
        return [self._head | {"object": self._object(), "choices": [], "usage": usage_body(usage)}]

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        body = self._head | {"object": self._object(), "choices": [{"index": index, "logprobs": None} | choice]}
        return body | {"usage": None} if self._style.include_usage else body

    def _spelt(self, token: int) -> str:
        """A part of a character is a replacement character."""
        return self._style.spell(token).decode("utf-8", "replace")


class ChatShape(Shape):
    def whole(self, pieces: Sequence[Piece], usage: inference_pb2.Usage) -> dict[str, Any]:
        body = super().whole(pieces, usage)
        return body if self._style.prompt_logprobs is None else body | {"prompt_logprobs": self._prompt_logprobs(0)}

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        text, thought = "".join(piece.text for piece in pieces), "".join(piece.reasoning for piece in pieces)
        calls = _whole_calls([part for piece in pieces for part in piece.calls])
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._logprobs(pieces)}

    def first(self, choice: int) -> list[dict[str, Any]]:
        return [self._chunk(choice, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None})]

    def piece(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.text or not (piece.reasoning or piece.calls):
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [_call_delta(part) for part in piece.calls]
        return self._chunk(piece.choice, {"delta": delta, "logprobs": self._logprobs([piece]), "finish_reason": None})

    def last(self, piece: Piece) -> dict[str, Any]:
        return self._chunk(piece.choice, {"delta": {}, "finish_reason": finish_name(piece.finish)})

    def _object(self) -> str:
        return "chat.completion.chunk"

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        content = [
            self._entry(token, said.logprob)
            | {"top_logprobs": [self._entry(*best) for best in zip(said.top_token_ids, said.top_logprobs, strict=True)]}
            for piece in pieces
            for token, said in zip(piece.token_ids, piece.logprobs, strict=bool(piece.logprobs))
        ]
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._spelt(token), "logprob": logprob, "bytes": list(self._style.spell(token))}


def _call_delta(part: CallPart) -> dict[str, Any]:
    """A call's first part has its id and its name."""
    head = {"id": part.call_id, "type": "function"} if part.call_id else {}
    named = {"name": part.name} if part.call_id else {}
    return {"index": part.index} | head | {"function": named | {"arguments": part.arguments}}


def _whole_calls(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        function = {"name": part.name, "arguments": ""}
        call = calls.setdefault(part.index, {"id": part.call_id, "type": "function", "function": function})
        call["function"]["arguments"] += part.arguments
    return list(calls.values())


class CompletionShape(Shape):
    def __init__(self, answer_id: str, model: str, created_s: int, style: Style) -> None:
        super().__init__(answer_id, model, created_s, style)
        self._offsets: dict[int, int] = {}

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        index = pieces[0].choice
        text = self._echo(index) + "".join(piece.text for piece in pieces)
        choice = {"text": text, "logprobs": _joined(self._echoed_logprobs(index), self._logprobs(pieces))}
        return choice if self._style.prompt_logprobs is None else choice | {"prompt_logprobs": self._prompt_logprobs(index)}

    def first(self, choice: int) -> list[dict[str, Any]]:
        if not self._style.echo:
            return []
        return [self._chunk(choice, {"text": self._echo(choice), "logprobs": self._echoed_logprobs(choice), "finish_reason": None})]

    def _echo(self, choice: int) -> str:
        return self._style.echo[self._prompt_of(choice)] if self._style.echo else ""

    def _echoed_logprobs(self, choice: int) -> dict[str, Any] | None:
        """Of the prompt's tokens, where it is echoed and they are asked for; the first has none."""
        if not self._style.echo or self._style.top_logprobs is None:
            return None
        told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        prompt, of_prompt = self._prompts[self._prompt_of(choice)]
        for token, said in zip(prompt, [None, *of_prompt], strict=True):
            text = self._spelt(token)
            told["tokens"].append(text)
            told["token_logprobs"].append(None if said is None else said.logprob)
            told["top_logprobs"].append(None if said is None else self._top(token, said, self._style.top_logprobs))
            told["text_offset"].append(offset)
            offset += len(text)
        return told

    def _top(self, token: int, said: inference_pb2.TokenLogprobs, most: int | None = None) -> dict[str, float]:
        """Where tokens spell alike, of the most probable ones the first is told."""
        top: dict[str, float] = {}
        best = list(zip(said.top_token_ids, said.top_logprobs, strict=True))[:most]
        for other, logprob in (*best, (token, said.logprob)):
            top.setdefault(self._spelt(other), logprob)
        return top

    def piece(self, piece: Piece) -> dict[str, Any]:
        return self._chunk(piece.choice, {"text": piece.text, "logprobs": self._logprobs([piece]), "finish_reason": None})

    def last(self, piece: Piece) -> dict[str, Any]:
        return self._chunk(piece.choice, {"text": "", "finish_reason": finish_name(piece.finish)})

    def _object(self) -> str:
        return "text_completion"

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        tokens, values, tops, offsets = [], [], [], []
        for piece in pieces:
            for token, said in zip(piece.token_ids, piece.logprobs, strict=bool(piece.logprobs)):
                text = self._spelt(token)
                tokens.append(text)
                values.append(said.logprob)
                tops.append(self._top(token, said))
                offset = self._offsets.get(piece.choice, len(self._echo(piece.choice)))
                offsets.append(offset)
                self._offsets[piece.choice] = offset + len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets} if tokens else None


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in first}
