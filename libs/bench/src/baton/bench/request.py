"""What is asked of a server, before it is known which server and how."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Request:
    """Request `index` of a workload. `is_long`: its prefill is what may disturb the streams of others.
    `arrival_s`: when a trace says that it arrives, from the start of the trace; None where the workload has no times of its own."""

    index: int
    kind: str
    messages: tuple[Message, ...]
    max_tokens: int
    is_long: bool
    arrival_s: float | None = None

    @property
    def prompt(self) -> str:
        """All messages as one text, for servers that are asked to continue a text."""
        return "\n\n".join(message.content for message in self.messages)

    @property
    def num_prompt_words(self) -> int:
        return sum(len(message.content.split()) for message in self.messages)
