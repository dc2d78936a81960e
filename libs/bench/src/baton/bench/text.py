"""Plain words drawn from a seed: the same text on every machine, about one token a word for the usual vocabularies."""

from collections.abc import Sequence

import numpy as np

WORDS = """
the of and to in is was for on are with as at be this have from or one had by word but not what all were we when your can said there use an each
which she do how their if will up other about out many then them these so some her would make like him into time has look two more write go see
number no way could people my than first water been call who oil its now find long down day did get come made may part over new sound take only
little work know place year live me back give most very after thing our just name good sentence man think say great where help through much
before line right too mean old any same tell boy follow came want show also around form three small set put end does another well large must big
even such
""".split()  # noqa: SIM905 - a list of two hundred quoted words is harder to read
SENTENCE_WORDS = 14


def generator(*key: int) -> np.random.Generator:
    """A generator for this key alone, so that request i is a pure function of the workload and i, in whatever order they are made."""
    return np.random.default_rng([len(key), *key])  # numpy takes a short key for one that ends in zeros


def plain_text(draw: np.random.Generator, num_words: int) -> str:
    """`num_words` words in sentences of 14."""
    words = [WORDS[pick] for pick in draw.integers(len(WORDS), size=num_words)]
    sentences = [words[start : start + SENTENCE_WORDS] for start in range(0, num_words, SENTENCE_WORDS)]
    return " ".join(_sentence(words) for words in sentences)


def _sentence(words: Sequence[str]) -> str:
    return " ".join([words[0].capitalize(), *words[1:]]) + "."


def about(draw: np.random.Generator, middle: int, spread: float) -> int:
    """A whole number above 0 around `middle`: log-normal with this sigma, cut off at a quarter and at four times the middle."""
    return max(1, round(middle * float(np.clip(np.exp(draw.normal(0.0, spread)), 0.25, 4.0))))
