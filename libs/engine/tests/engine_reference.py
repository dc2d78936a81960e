"""transformers as the reference, and loops that drive engines to their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_forward import VOCAB, forward_of
from engine_forward import prompts as prompts  # tests take it from here

from baton.engine import Engine, EngineConfig, Request, Role, SamplingParams, load_model
from baton.engine.models.llama import LlamaModel
from baton.engine.types import EngineEvent, Extent, Failed, Failure, Finished, Token

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "sliding_window": None,
}
CANCEL = Failure("CANCELLED", "client", "client_gone", "the client left")


@dataclass
class Reference:
    """A model folder, transformers' model of it, and ours."""

    folder: Path
    theirs: Any
    ours: LlamaModel

    def greedy(self, prompt: list[int], num_tokens: int, use_cache: bool = True) -> list[int]:
        ids = torch.tensor([prompt])
        # Without a mask, generate takes every pad token inside the prompt for padding.
        settings = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
        out = self.theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return list(out[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary] float32."""
        logits: torch.Tensor = self.theirs(torch.tensor([tokens])).logits[0].float()
        return logits


def make_reference(folder: Path, family: str, **config: Any) -> Reference:
    """Random weights, biases and norms included, so that a forgotten one is seen."""
    torch.manual_seed(7)
    config_class, model_class = FAMILIES[family]
    theirs = model_class(config_class(**{**SHAPE, **config})).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    theirs.generation_config.eos_token_id = None
    theirs.save_pretrained(folder)
    return Reference(folder, theirs, load_model(folder))


def forward(model: LlamaModel, tokens: list[int], extents: list[Extent], chunks: list[int], page_size: int = 4) -> torch.Tensor:
    """Logits of the last token of every chunk; the pool is poisoned with NaN, so that a slot read before it is written shows."""
    return forward_of(model, model.config, tokens, extents, chunks, page_size)[0]


def rms(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt())


def engine(model: LlamaModel, role: Role = Role.PLAIN, **settings: Any) -> Engine:
    ports = {name: settings.pop(name) for name in ("exporter", "importer", "buffer", "pool", "clock") if name in settings}
    given = {"num_pages": 64, "page_size": 4, "max_num_batched_tokens": 64, "max_running": 8, "growth_tokens": 8, **settings}
    return Engine(role, model, EngineConfig(**given), **ports)


def request(room: int, prompt: list[int], max_tokens: int = 16, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **{name: fields.pop(name) for name in list(fields) if name in SamplingParams.__slots__})
    return Request(room, prompt, sampling, **fields)


def run(*engines: Engine, max_steps: int = 5000) -> list[EngineEvent]:
    """Steps all engines until none has work and none has anything to tell another."""
    events: list[EngineEvent] = []
    idle_rounds = 0
    for _ in range(max_steps):
        before = len(events)
        for each in engines:
            events += each.step()
        idle = len(events) == before and not any(each.has_work() for each in engines)
        idle_rounds = idle_rounds + 1 if idle else 0
        if idle_rounds == 3:
            return events
    raise AssertionError(f"still at work after {max_steps} steps")


def answers(events: Iterable[EngineEvent]) -> dict[int, list[int]]:
    """Tokens by room; asserts that each room's come in order, none twice and none missing."""
    tokens: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Token):
            room = tokens.setdefault(event.room, [])
            assert event.index == len(room), f"room {event.room}: token {event.index} after {len(room)}"
            room.append(event.token)
    return tokens


def ends(events: Iterable[EngineEvent]) -> dict[int, EngineEvent]:
    """Finished or Failed by room; asserts that there is one."""
    found: dict[int, EngineEvent] = {}
    for event in events:
        if isinstance(event, (Finished, Failed)):
            assert event.room not in found, f"room {event.room} ended twice"
            found[event.room] = event
    return found


def assert_all_free(*engines: Engine) -> None:
    for each in engines:
        stats = each.stats()
        assert stats.rooms == 0
        assert stats.free_pages == stats.total_pages
