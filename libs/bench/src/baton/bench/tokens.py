"""Output tokens as the server reported them against those that its text really holds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.bench.errors import BenchFileError
from baton.bench.sample import Sample
from baton.bench.text import generator, plain_text

CountTokens = Callable[[str], int]
TRIED_WORDS = 200


@dataclass(frozen=True)
class TokenCheck:
    """Of successful requests. `retokenised` is None when no tokenizer was given.

    `num_differing`: requests whose numbers differ by more than their end-of-sequence token, which is reported but has no text."""

    reported: int
    retokenised: int | None
    num_unreported: int
    num_differing: int


def load_counter(path: Path) -> CountTokens:
    """From a tokenizer.json or a model's folder that has one. Raises BenchFileError."""
    tokenizer = _tokenizer(path)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def gives_back(path: Path) -> bool:
    """Whether tokens of a plain text are the same after they have been text: only then can they be counted again. Raises BenchFileError."""
    tokenizer = _tokenizer(path)
    ids: list[int] = tokenizer.encode(plain_text(generator(0), TRIED_WORDS), add_special_tokens=False).ids
    again: list[int] = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False).ids
    return again == ids


def _tokenizer(path: Path) -> Any:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a missing file and for a bad one
        raise BenchFileError(f"{file} is not a tokenizer: {error}") from error


def check_tokens(samples: Iterable[Sample], count_tokens: CountTokens | None) -> TokenCheck:
    answered = [sample for sample in samples if sample.error is None]
    reported = sum(sample.output_tokens or 0 for sample in answered)
    num_unreported = sum(sample.output_tokens is None for sample in answered)
    if count_tokens is None:
        return TokenCheck(reported, None, num_unreported, 0)
    counts = [count_tokens(sample.text) for sample in answered]
    return TokenCheck(reported, sum(counts), num_unreported, sum(_differs(sample, count) for sample, count in zip(answered, counts, strict=True)))


def _differs(sample: Sample, count: int) -> bool:
    return sample.output_tokens is not None and abs(sample.output_tokens - count) > (sample.finish == "stop")
