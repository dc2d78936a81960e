"""What things cost, in seconds: the numbers that a calibration finds and a simulation spends."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from baton.bench.errors import BenchFileError, require

#: A jitter of nothing: every step takes what its formula says.
EXACT = (1.0,)


@dataclass(frozen=True)
class StepCosts:
    """A step with `rows` decode rows over `context` tokens takes decode_step_s + decode_row_s * rows + decode_context_s * context.

    A step with prompt chunks takes prefill_step_s + prefill_token_s * tokens + prefill_square_s * square, where a chunk [start, start + count) has
    the square count * (2 * start + count), so that the chunks of a prompt of n tokens have n * n together; and, if it has decode rows too,
    `mixed_share` of what they would take alone.

    `rows_factor`: what steps of 1, 2, ... decode rows took over that formula; devices compute some numbers of rows at the price of more of them.
    For larger ones the formula stands alone."""

    prefill_step_s: float
    prefill_token_s: float
    prefill_square_s: float
    decode_step_s: float
    decode_row_s: float
    decode_context_s: float
    mixed_share: float = 1.0
    rows_factor: tuple[float, ...] = ()

    def decode_s(self, rows: int, context: int) -> float:
        return self.factor_of(rows) * (self.decode_step_s + self.decode_row_s * rows + self.decode_context_s * context)

    def factor_of(self, rows: int) -> float:
        return self.rows_factor[rows - 1] if 0 < rows <= len(self.rows_factor) else 1.0

    def prefill_s(self, tokens: int, square: int) -> float:
        return self.prefill_step_s + self.prefill_token_s * tokens + self.prefill_square_s * square

    def step_s(self, tokens: int, square: int, rows: int, context: int) -> float:
        if not tokens:
            return self.decode_s(rows, context)
        prefill_s = self.prefill_s(tokens, square)
        return prefill_s + self.mixed_share * self.decode_s(rows, context) if rows else prefill_s


@dataclass(frozen=True)
class PathCosts:
    """From a prefill to a decode server. `bandwidth`: bytes a second of one server's link, shared by what moves over it at a time.

    `tail_share`: part of a chunk's bytes that can only leave when its last layer is computed (one layer of many); the rest moves meanwhile.
    `handoff_s`: from the last byte's landing until decode has seen the doorbell. `bootstrap_s`: from decode's reservation until prefill knows it
    (measured by the gateway, so its own way to decode, some ms, is in it).
    `request_s`: of a request's first token beside all that, over a plain server's: two servers are told of it and its pages are exported."""

    kv_bytes_per_token: float
    bandwidth: float
    tail_share: float
    handoff_s: float
    bootstrap_s: float
    request_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.bandwidth > 0, "bandwidth", self.bandwidth, "above 0")
        require(0 <= self.tail_share <= 1, "tail_share", self.tail_share, "from 0 to 1")


@dataclass(frozen=True)
class Roles:
    """What a step costs in the role over what it costs on a plain server: exporting pages, another process layout."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True)
class Neighbours:
    """Servers that share a host: a step takes `prefill` (with a chunk) or `decode` times as long while one other server there is busy."""

    prefill: float = 1.0
    decode: float = 1.0

    def slowdown(self, num_busy: int, *, has_chunk: bool) -> float:
        return 1 + num_busy * ((self.prefill if has_chunk else self.decode) - 1)


@dataclass(frozen=True)
class Jitter:
    """Evenly spaced quantiles of measured over fitted time of single steps: how a step scatters around its formula."""

    prefill: tuple[float, ...] = EXACT
    decode: tuple[float, ...] = EXACT


@dataclass(frozen=True)
class Costs:
    """`request_s`: of a request outside of the servers' steps: gateway, tokenizer, network. `path` is None where no split was measured."""

    steps: StepCosts
    request_s: float = 0.0
    path: PathCosts | None = None
    roles: Roles = Roles()
    neighbours: Neighbours = Neighbours()
    jitter: Jitter = Jitter()

    def outside_s(self, *, is_split: bool) -> float:
        """Of a request outside of the servers' steps."""
        return self.request_s + (self.path.request_s if is_split and self.path is not None else 0.0)

    def first_token_s(self, tokens: int, max_batched: int) -> float:
        """Of a prompt that has a plain server of so many tokens a step for itself."""
        steps, num_chunks = self.steps, -(-tokens // max_batched)
        return self.request_s + steps.prefill_step_s * num_chunks + steps.prefill_token_s * tokens + steps.prefill_square_s * tokens**2

    def with_path(self, **changes: float) -> "Costs":
        """The same servers over another link."""
        if self.path is None:
            raise BenchFileError(f"the calibration has no path between prefill and decode, so it cannot change {', '.join(changes)}")
        return replace(self, path=replace(self.path, **changes))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Costs":
        """Raises BenchFileError for missing or unknown fields."""
        try:
            path = found["path"]
            return cls(
                steps=StepCosts(**{**found["steps"], "rows_factor": tuple(found["steps"].get("rows_factor", ()))}),
                request_s=found["request_s"],
                path=None if path is None else PathCosts(**path),
                roles=Roles(**found["roles"]),
                neighbours=Neighbours(**found["neighbours"]),
                jitter=Jitter(**{field.name: tuple(found["jitter"][field.name]) for field in fields(Jitter)}),
            )
        except (KeyError, TypeError) as error:
            raise BenchFileError(f"the costs have other fields than this version writes: {error}") from error
