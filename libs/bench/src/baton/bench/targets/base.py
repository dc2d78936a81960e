"""How the generator talks to a server: the same way to every kind."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.bench.request import Request


@dataclass(frozen=True)
class Piece:
    """A message of an answer. `num_tokens` 0: it carried no output. The rest is set where the server said it, usually in the last one."""

    text: str = ""
    num_tokens: int = 0
    finish: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    server: Mapping[str, float] = field(default_factory=dict)


class Call(Protocol):
    """One request, built and serialised before it is due."""

    def stream(self) -> AsyncIterator[Piece]:
        """Sends now. Raises RequestFailedError; closing the iterator or cancelling the task that waits for it ends the request at the server too."""


class Target(Protocol):
    """Use on one event loop; `aclose` when done."""

    @property
    def name(self) -> str:
        """For reports: address and interface."""

    def prepare(self, request: Request) -> Call:
        """Everything that costs time and is not sending."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Asking:
    """What every request of a run has in common. `ignore_eos` is an extension that Baton, vLLM and SGLang share: answers of exact lengths."""

    model: str
    ignore_eos: bool = True
    temperature: float = 0.0
