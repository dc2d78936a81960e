"""A geometry made servable: its config.json beside a tokenizer and a chat template, for weights that are dummies anyway.

    python benchmarks/gpu/geometry.py benchmarks/gpu/qwen3-8b TARGET        prints TARGET/qwen3-8b

Every word of the benchmarks' texts is one token, so that a prompt of n words has n tokens (and a few), and no two texts are the same tokens.
"""

import json
import shutil
import sys
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Digits, Punctuation, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as InTurn

from baton.bench.text import WORDS

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def vocabulary(size: int) -> dict[str, int]:
    """Exactly `size` words: the texts' own first, any word for the rest, since a random model answers with any token."""
    words = ["[UNK]", ".", *WORDS, *(word.capitalize() for word in WORDS), *(str(digit) for digit in range(10))]
    known = dict.fromkeys(words)
    names = [*known, *(f"w{index}" for index in range(size - len(known)))]
    return {name: index for index, name in enumerate(names)}


def served_folder(model: Path, target: Path) -> Path:
    """A folder in `target` that a fleet can serve with `--load-format=dummy`."""
    folder = target / model.name
    folder.mkdir(parents=True)
    shutil.copy(model / "config.json", folder)
    tokenizer = Tokenizer(WordLevel(vocabulary(json.loads((model / "config.json").read_text())["vocab_size"]), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = InTurn([WhitespaceSplit(), Punctuation(), Digits(individual_digits=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


if __name__ == "__main__":
    print(served_folder(Path(sys.argv[1]), Path(sys.argv[2])))
