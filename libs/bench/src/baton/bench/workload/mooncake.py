"""A trace in the form of Mooncake's: JSON lines with timestamp (ms), input_length, output_length (tokens) and hash_ids, one a block of 512 tokens."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.arrivals import TraceArrivals
from baton.bench.errors import BenchFileError, require
from baton.bench.request import Message, Request
from baton.bench.text import generator, plain_text
from baton.bench.workload.base import LONG_WORDS, Description

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRow:
    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class MooncakeTrace:
    """Prompts whose blocks of text are functions of their hash ids: requests that shared a prefix in the trace share it here.

    A word stands for a token. `length_scale` shrinks blocks and answers alike, for servers smaller than the trace's."""

    seed: int
    rows: tuple[TraceRow, ...]
    sha256: str
    length_scale: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.length_scale <= 1, "length_scale", self.length_scale, "above 0 and at most 1")

    @classmethod
    def load(cls, path: Path, seed: int, length_scale: float = 1.0) -> "MooncakeTrace":
        """Reads the whole file. Raises BenchFileError with the line that is not of this form, OSError."""
        data = path.read_bytes()
        rows = [_row(f"{path}:{number}", line) for number, line in enumerate(data.decode().splitlines(), start=1) if line.strip()]
        if not rows:
            raise BenchFileError(f"{path} holds no requests")
        return cls(seed, tuple(sorted(rows, key=lambda row: row.at_s)), hashlib.sha256(data).hexdigest(), length_scale)

    @property
    def size(self) -> int:
        return len(self.rows)

    def arrivals(self, speed: float = 1.0) -> TraceArrivals:
        return TraceArrivals(tuple(row.at_s for row in self.rows), speed)

    def request(self, index: int) -> Request:
        require(0 <= index < self.size, "index", index, f"below {self.size}, the requests of the trace")
        row = self.rows[index]
        num_words = max(1, round(row.input_tokens * self.length_scale))
        block_words = max(1, round(BLOCK_TOKENS * self.length_scale))
        blocks = [plain_text(generator(self.seed, hash_id), block_words) for hash_id in row.hash_ids]
        text = " ".join(" ".join(blocks).split()[:num_words])
        max_tokens = max(1, round(row.output_tokens * self.length_scale))
        return Request(index, "trace", (Message("user", text),), max_tokens, is_long=num_words >= LONG_WORDS, arrival_s=row.at_s)

    def describe(self) -> Description:
        return {"workload": "mooncake", "seed": self.seed, "requests": self.size, "length_scale": self.length_scale, "sha256": self.sha256}


def _row(where: str, line: str) -> TraceRow:
    try:
        fields: Any = json.loads(line)
        hash_ids = tuple(int(hash_id) for hash_id in fields["hash_ids"])
        row = TraceRow(fields["timestamp"] / 1000, int(fields["input_length"]), int(fields["output_length"]), hash_ids)
    except (ValueError, TypeError, KeyError) as error:
        raise BenchFileError(f"{where} is not a row of a Mooncake trace (timestamp, input_length, output_length, hash_ids): {error!r}") from error
    if min(row.hash_ids, default=0) < 0:
        raise BenchFileError(f"{where}: hash_ids holds {min(row.hash_ids)}, but must hold numbers of at least 0")
    needed = -(-row.input_tokens // BLOCK_TOKENS)
    if row.input_tokens < 1 or len(row.hash_ids) < needed:
        raise BenchFileError(
            f"{where}: input_length is {row.input_tokens} with {len(row.hash_ids)} hash_ids, but must be at least 1 and have {needed} of them"
        )
    return row
