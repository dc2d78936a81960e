"""How the served model is told of tools, how it writes calls, and whether it marks what it thinks: its chat template says, or an operator. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from baton.gateway.errors import UnsupportedError
from baton.gateway.reasoning import thinks
from baton.gateway.requests import ChatPrompt
from baton.gateway.tools.formats import FORMATS, CallFormat, format_of, instruction, written

ToolCallFormat = Literal["auto", "none", "hermes", "llama3", "mistral"]
ReasoningFormat = Literal["auto", "none", "think"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """form: None: this model is offered no tools. by_template: the chat template takes them; else a system message tells of them. thinks: what stands
    between <think> and </think> is no part of the answer."""

    form: CallFormat | None = None
    by_template: bool = False
    thinks: bool = False

    def view(self, prompt: ChatPrompt) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools, as the chat template gets them. Raises UnsupportedError."""
        if self.form is None:
            self._refuse(prompt)
            return prompt.messages, None
        offer = prompt.offer
        if self.by_template:
            return prompt.messages, None if offer is None else [tool.told() for tool in offer.tools]
        messages = [written(self.form, message) if "tool_calls" in message else message for message in prompt.messages]
        if offer is None:
            return messages, None
        told = instruction(self.form, offer.tools)
        if messages and messages[0]["role"] == "system":
            return [messages[0] | {"content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]], None
        return [{"role": "system", "content": told}, *messages], None

    @property
    def marks(self) -> tuple[str, ...]:
        """Text that a tokenizer may have as a special token, and that is looked for in answers."""
        of_calls = () if self.form is None else (self.form.begin, self.form.end)
        return tuple(mark for mark in of_calls if mark)

    @staticmethod
    def _refuse(prompt: ChatPrompt) -> None:
        asked = None if prompt.offer is None else prompt.offer.field
        for number, message in enumerate(prompt.messages):
            if asked is None and "tool_calls" in message:
                asked = f"{prompt.field}[{number}].tool_calls"
        if asked is not None:
            text = f"{asked}: this model's chat template says nothing of tools; a gateway with --tool-call-format would tell it in a system message"
            raise UnsupportedError(asked, text)


def dialect_of(template: str | None, takes_tools: bool, calls: ToolCallFormat = "auto", reasoning: ReasoningFormat = "auto") -> Dialect:
    """takes_tools: the template has a place for them."""
    by_template = format_of(template) if takes_tools else None
    form = by_template if calls == "auto" else FORMATS.get(calls)
    return Dialect(form, takes_tools, thinks(template) if reasoning == "auto" else reasoning == "think")
