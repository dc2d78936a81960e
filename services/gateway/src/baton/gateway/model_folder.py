"""What the gateway reads of a model's Hugging Face folder: tokenizer, chat template, end-of-sequence tokens. Never its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.gateway.errors import ModelFolderError
from baton.gateway.token_bound import TokenBound, token_bound

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """chat_template: None when the model has none. special_tokens: name -> text, for the template. eos_token_ids: what ends an answer.

    context_tokens: what the model was made for; None: the folder does not say it.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    token_bound: TokenBound
    context_tokens: int | None


def read_model_folder(path: Path) -> ModelFolder:
    """Raises ModelFolderError that names the file."""
    tokenizer = _read_tokenizer(path / "tokenizer.json")
    settings = _read_json(path / "tokenizer_config.json", required=False)
    special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(settings.get(name))) is not None}
    return ModelFolder(
        tokenizer,
        _chat_template(path, settings),
        special_tokens,
        _eos_token_ids(path, tokenizer, special_tokens),
        token_bound(_read_json(path / "tokenizer.json", required=True)),
        _context_tokens(_read_json(path / "config.json", required=True)),
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelFolderError(f"{path} is missing: --model-path must be a Hugging Face folder with a fast tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFolderError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ModelFolderError(f"{path} is missing: --model-path must be a Hugging Face folder")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds {type(content).__name__}, not an object")
    return content


def _context_tokens(config: Mapping[str, Any]) -> int | None:
    """max_position_embeddings, or what its scaling stretches that to, whichever is more: servers take no more than the model was made for."""
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length < 1:
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if isinstance(original, int) and isinstance(factor, int | float) and math.isfinite(original * factor):
        return max(length, math.floor(original * factor))
    return length


def _token_text(value: Any) -> str | None:
    """A special token is written as text, or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, where it may also be a list of named ones."""
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFolderError(f"{path / 'tokenizer_config.json'}: chat_template is {type(template).__name__}, not text or a list of named texts")
    return template


def _eos_token_ids(path: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """As transformers' generate: generation_config.json, else config.json; else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name, required=name == "config.json").get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise ModelFolderError(f"{path / name}: eos_token_id={value!r} is neither a token id nor a list of them")
            return tuple(ids)
    own = tokenizer.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return () if own is None else (own,)
