"""The raw record of one request; everything that is reported is computed from these."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.bench.errors import BenchFileError


@dataclass(frozen=True)
class Sample:
    """Times are seconds from the start of its repeat, by the generator's clock.

    `scheduled_s`: when it should have been sent; `sent_s`: when it was. `token_s[i]`: arrival of the i-th message that carried output, with
    `token_counts[i]` tokens (1 where the protocol does not say). `output_tokens`: as the server reported, None if it did not.
    `error`: a bounded word, None for success. `server`: numbers that the server gave about this request (KV bytes, exposed transfer, tokens
    of the prompt that a prefix cache had)."""

    repeat: int
    index: int
    kind: str
    is_long: bool
    is_warm_up: bool
    prompt_words: int
    max_tokens: int
    scheduled_s: float
    sent_s: float
    ended_s: float
    token_s: tuple[float, ...] = ()
    token_counts: tuple[int, ...] = ()
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish: str = ""
    error: str | None = None
    error_detail: str = ""
    server: Mapping[str, float] = field(default_factory=dict)

    @property
    def lag_s(self) -> float:
        return self.sent_s - self.scheduled_s

    @property
    def first_s(self) -> float | None:
        """When the first output arrived."""
        return self.token_s[0] if self.token_s else None

    @property
    def num_tokens(self) -> int:
        """As reported; where the server did not report, as counted from the messages."""
        return sum(self.token_counts) if self.output_tokens is None else self.output_tokens

    def to_json(self) -> dict[str, Any]:
        return {name: _rounded(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Sample":
        """Raises BenchFileError for missing or unknown fields."""
        try:
            return cls(**(fields | {name: tuple(fields[name]) for name in ("token_s", "token_counts")}))
        except (TypeError, KeyError) as error:
            raise BenchFileError(f"a sample has other fields than this version writes: {error}") from error


def _rounded(value: Any) -> Any:
    """Microseconds are finer than an event loop can see."""
    if isinstance(value, float):
        return round(value, 6)
    return [_rounded(item) for item in value] if isinstance(value, tuple) else value
