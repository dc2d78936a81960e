"""A Hugging Face fast tokenizer from the tokens, merges and token types that a GGUF file carries."""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.cli.errors import ConversionError

# gguf.TokenType of tokens that text cannot spell: matched whole, skipped when special tokens are skipped.
CONTROL_TOKEN = 3


@dataclass(frozen=True)
class TokenizerParts:
    """The tokenizer section of a GGUF file. `tokens[i]` is the byte-level spelling of id i, `merges` are in order of rank."""

    model: str
    pre_tokenizer: str
    tokens: list[str]
    token_types: list[int]
    merges: list[tuple[str, str]]
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int
    chat_template: str
    adds_bos: bool
    context_len: int


def build_tokenizer(parts: TokenizerParts) -> Tokenizer:
    """Byte-level BPE after splitting off every single digit. Raises ConversionError for another kind of tokenizer."""
    if (parts.model, parts.pre_tokenizer) != ("gpt2", "smollm"):
        raise ConversionError(f"tokenizer {parts.model!r} with pre-tokenizer {parts.pre_tokenizer!r} is not known; only 'gpt2' with 'smollm' is")
    if parts.adds_bos:
        raise ConversionError("tokenizer.ggml.add_bos_token is true; only tokenizers that add no token of their own can be converted")
    vocabulary = {token: index for index, token in enumerate(parts.tokens)}
    if len(vocabulary) != len(parts.tokens):
        raise ConversionError(f"{len(parts.tokens) - len(vocabulary)} of {len(parts.tokens)} tokens are spelt alike")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=parts.merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of_text])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control_tokens(parts)])
    return tokenizer


def tokenizer_config(parts: TokenizerParts) -> dict[str, Any]:
    """tokenizer_config.json: the names of the special tokens and the chat template. The class is the one that takes tokenizer.json as it is."""
    chat_tokens = [parts.tokens[parts.bos_id], parts.tokens[parts.eos_id]]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": parts.context_len,
        "bos_token": parts.tokens[parts.bos_id],
        "eos_token": parts.tokens[parts.eos_id],
        "unk_token": parts.tokens[parts.unknown_id],
        "pad_token": parts.tokens[parts.padding_id],
        "additional_special_tokens": chat_tokens,
        "chat_template": parts.chat_template,
    }


def control_tokens(parts: TokenizerParts) -> list[str]:
    return [token for token, kind in zip(parts.tokens, parts.token_types, strict=True) if kind == CONTROL_TOKEN]
