"""A request as both fronts hand it over: what the client said, not yet checked against the model or the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context

from baton.gateway.callers import ANONYMOUS, Caller
from baton.gateway.structured import Structure
from baton.gateway.tools.offer import Offer

MAX_REQUEST_ID_CHARS = 128


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    field: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """ids: as the front has them; a list is made of them once they are known to be few enough."""

    ids: Sequence[int]
    field: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages of {"role", "content"} and more, as the model's chat template takes them. offer: tools that may be called; None: none may."""

    messages: list[dict[str, Any]]
    field: str = "messages"
    offer: Offer | None = None


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What the client asked for; None: not given. `names`: what a front calls a field that it calls differently, for messages."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    #: Token and what is added to its logit.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: Log probabilities of each token and of so many of the most probable ones; None: of none.
    top_logprobs: int | None = None
    #: No answer is wanted, the prompt alone is scored or echoed: max_tokens is 0.
    prompt_only: bool = False
    #: The same of the prompt's own tokens.
    prompt_logprobs: int | None = None
    #: How many answers.
    n: int | None = None
    #: What the answer must look like; None: like anything.
    structure: Structure | None = None
    names: dict[str, str] = field(default_factory=dict)

    def name(self, of: str) -> str:
        return self.names.get(of, of)


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request. accepted_at, deadline: time.monotonic(), seconds. request_id: empty when the client gave none."""

    model: str
    prompt: Prompt
    sampling: SamplingOptions
    accepted_at: float
    deadline: float | None = None
    report: bool = False
    caller: Caller = ANONYMOUS
    request_id: str = ""
    priority: int = 0
    trace: Context | None = None
    #: Each is answered as if it had come alone, behind `prompt`'s answers and in this order.
    more_prompts: Sequence[Prompt] = ()

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt, *self.more_prompts)

    @property
    def num_answers(self) -> int:
        """To all prompts; at least 1, also where `sampling.n` is out of its range."""
        return max(1, self.sampling.n or 1) * len(self.prompts)
