"""What goes into an engine and what comes out of it: plain data, no torch, no network."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.grammar import Constraint


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


#: A captured step keeps so many places a sequence. The public limit for a client's own is 64, and no model ends answers in as many ways.
MAX_STOP_TOKENS = 128

#: What one unit of priority is worth, in seconds of waiting, and the range of priorities.
PRIORITY_S = 1.0
MAX_PRIORITY = 100

#: Of the most probable tokens at one place, so many can be told.
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Every field is already checked and filled in by the gateway.

    temperature: 0 is greedy. top_p: (0, 1]. top_k: 0 is off. min_p: [0, 1], 0 is off.
    seed: with the token's position it keys a counter-based generator, so that a retry, a recompute or another batch draws the same token.
    max_tokens: answer length, the first token included. stop_token_ids: at most MAX_STOP_TOKENS of the vocabulary, end-of-sequence tokens
    included, unless the client ignores them. repetition_penalty: 1 is off; of prompt and answer. presence_penalty, frequency_penalty: 0 is off; of
    the answer alone, to which the prompt's last `answered_tokens` count as well: an earlier room drew them. logit_bias: (token, what is added).
    prompt_logprobs: the same of the prompt's tokens behind the first; the prompt is then computed whole where it is computed.
    top_logprobs: how many of the most probable tokens are told with each token and its own log probability; None: neither is.
    grammar: what the answer is held to, this request's own; `min_tokens` is 0 then, and `stop_token_ids` has the end-of-sequence tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    answered_tokens: int = 0
    grammar: Constraint | None = None

    @property
    def penalises(self) -> bool:
        """Whether a draw depends on which tokens came before it in another way than through the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before they are drawn from."""
        return self.penalises or bool(self.logit_bias) or self.grammar is not None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one place of an answer, by the model's own logits: the drawn token's log probability, and (token, log probability) of the most
    probable ones, the most probable first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    # Of a prompt's token: how many tokens were at least as probable at its place, itself included. 0: not counted.
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of pages of the KV pool: [first, first + count)."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a room ended badly. `code` is a gRPC status name (e.g. "UNAVAILABLE"), `origin` one of client, gateway, prefill, decode, transfer;
    `cause` a bounded word for metrics; `message` names field, value, limit and remedy."""

    code: str
    origin: str
    cause: str
    message: str


@dataclass(slots=True)
class Request:
    """One room's work for one engine. `prompt` is token ids. `deadline` and the two timeouts are on time.monotonic(), in seconds; None: no limit."""

    room: int
    prompt: list[int]
    sampling: SamplingParams
    deadline: float | None = None
    bootstrap_deadline: float | None = None
    waiting_deadline: float | None = None
    arrived: float = 0.0
    # Where the other half of the room lives; the engine only hands it to its port.
    peer: object | None = None
    # Decode role: the prompt is computed here and has no other half.
    local: bool = False
    # Lower is sooner: the room waits as if it had come `priority` times PRIORITY_S later.
    priority: int = 0
    # Another answer to the prompt of that room (0: of none), which is open here: it begins when that one's prompt is computed or has landed.
    # Decode and plain roles.
    fork_of: int = 0
    # So many forks of this room follow it.
    num_forks: int = 0
    # Prefixes are found again under the salt that they were computed under, and no other.
    cache_salt: str = ""

    @property
    def turn(self) -> float:
        """By which those who wait are let in, the least first. Waiting does not change it, and yet nobody starves: whoever comes later than the two
        priorities are apart is behind."""
        return self.arrived + PRIORITY_S * self.priority


# --- what an engine reports ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    room: int


@dataclass(frozen=True, slots=True)
class Reserved:
    room: int
    num_pages: int
    resident_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """cached_tokens: leading tokens of the prompt that the prefix cache had. Of a fork: 0, its prompt is there."""

    room: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TransferStarted:
    room: int


@dataclass(frozen=True, slots=True)
class TransferPart:
    """Some neighbouring layers of a room on their way over one queue. begin_s: since the room's first put. Seconds."""

    queue: int
    first_layer: int
    num_layers: int
    begin_s: float
    duration_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What the sender counted for one room. Durations in seconds: first put posted to the flush before the doorbell; last layer to doorbell rung."""

    transport: str
    num_bytes: int
    num_puts: int
    duration_s: float
    exposed_s: float
    digest: bool
    # Seconds with a write under way: num_bytes over it is the speed of the path, however long the prefill took.
    busy_s: float = 0.0
    # When which layers were on their way, where that is known.
    parts: tuple[TransferPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Transferred:
    room: int
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class KVReady:
    room: int
    digest_checked: bool
    # From the sender's last layer to this report, seconds; 0 when the clocks cannot be compared.
    exposed_s: float
    # The answer's token number 0, which prefill drew.
    first_token: int


@dataclass(slots=True)
class Token:
    """Token number `index` of the answer (0 is the first). logprobs: where the request asked for them.

    Never changed, and yet not frozen: a step makes one for each of its rows, and frozen ones take three times as long to make."""

    room: int
    index: int
    token: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens [first, first + len(logprobs)), where the request asked for them; the first that is told is number 1, and all come
    before the answer's first token."""

    room: int
    first: int
    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    room: int
    reason: FinishReason
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    room: int
    failure: Failure


EngineEvent = Bootstrapped | Reserved | PrefillStarted | TransferStarted | Transferred | KVReady | Token | PromptLogprobs | Finished | Failed


@dataclass(slots=True)
class EngineStats:
    """A snapshot. Pages always satisfy free + reserved + published + quarantined + running = total.

    cached_pages: of the free ones, those that the prefix cache can still find; they are given back before an allocation fails."""

    total_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    reserved_pages: int = 0
    published_pages: int = 0
    quarantined_pages: int = 0
    running_pages: int = 0
    rooms: int = 0
    waiting: int = 0
    running: int = 0
    steps: int = 0
    tokens_in_flight: int = 0
    # time.monotonic() of the last step that did work
    last_progress: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
