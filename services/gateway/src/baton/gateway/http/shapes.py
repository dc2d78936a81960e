"""Answers in OpenAI's shapes: whole and in chunks, of a chat and of a completion. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from baton.wire.v1 import common_pb2, inference_pb2

_FINISH = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


def finish_name(reason: common_pb2.FinishReason.ValueType | None) -> str | None:
    return None if reason is None else _FINISH[reason]


def usage_body(usage: inference_pb2.Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class Shape(ABC):
    """Bodies of one answer. With `include_usage`, every chunk has a usage field, null but in the last."""

    def __init__(self, answer_id: str, model: str, created_s: int, *, include_usage: bool = False) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "created": created_s, "model": model}
        self._include_usage = include_usage

    @abstractmethod
    def whole(self, text: str, finish: str | None, usage: inference_pb2.Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def first(self) -> list[dict[str, Any]]:
        """Chunks before the text."""

    @abstractmethod
    def piece(self, text: str) -> dict[str, Any]:
        """A chunk of text."""

    @abstractmethod
    def last(self, finish: str | None) -> dict[str, Any]:
        """The chunk with the finish reason."""

    @abstractmethod
    def _object(self) -> str: ...

    def usage(self, usage: inference_pb2.Usage) -> list[dict[str, Any]]:
        """The chunk after the last, if the client asked for it."""
        if not self._include_usage:
            return []
        return [self._head | {"object": self._object(), "choices": [], "usage": usage_body(usage)}]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = self._head | {"object": self._object(), "choices": [{"index": 0, "logprobs": None} | choice]}
        return body | {"usage": None} if self._include_usage else body


class ChatShape(Shape):
    def whole(self, text: str, finish: str | None, usage: inference_pb2.Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": usage_body(usage)}

    def first(self) -> list[dict[str, Any]]:
        return [self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})]

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"delta": {"content": text}, "finish_reason": None})

    def last(self, finish: str | None) -> dict[str, Any]:
        return self._chunk({"delta": {}, "finish_reason": finish})

    def _object(self) -> str:
        return "chat.completion.chunk"


class CompletionShape(Shape):
    def whole(self, text: str, finish: str | None, usage: inference_pb2.Usage) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return self._head | {"object": "text_completion", "choices": [choice], "usage": usage_body(usage)}

    def first(self) -> list[dict[str, Any]]:
        return []

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"text": text, "finish_reason": None})

    def last(self, finish: str | None) -> dict[str, Any]:
        return self._chunk({"text": "", "finish_reason": finish})

    def _object(self) -> str:
        return "text_completion"
