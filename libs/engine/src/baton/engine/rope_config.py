"""Rotary embedding as config.json describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.engine.config_json import Fields

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of kind default, linear, llama3 or yarn; fields that a kind has no use for keep their defaults.

    original_max_position: context in tokens before it was stretched. low_freq_factor, high_freq_factor: llama3's. beta_fast, beta_slow:
    yarn's, in turns over the original context; truncate: yarn's range of dimensions is rounded outwards to whole ones.
    attention_scaling: factor on rotated queries and keys alike (yarn's temperature), so scores carry its square.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scaling: float = 1.0


def parse_rope(fields: Fields, default_theta: float, max_position: int) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the longest context that it is made for: max_position_embeddings, or what yarn stretches it to."""
    # transformers 5 writes rope_parameters; 4 wrote rope_theta beside rope_scaling.
    scaling = fields.inside("rope_parameters" if fields.raw.get("rope_parameters") is not None else "rope_scaling")
    for place in (fields, scaling):
        if place.raw.get("partial_rotary_factor", 1.0) != 1.0:
            place.fail("partial_rotary_factor", place.raw["partial_rotary_factor"], "must be 1.0")
    theta = scaling.number("rope_theta", fields.number("rope_theta", default_theta))
    kind = scaling.raw.get("rope_type", scaling.raw.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta), max_position
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=scaling.number("factor")), max_position
    if kind == "llama3":
        return _llama3(scaling, theta), max_position
    if kind != "yarn":
        why = "; dynamic turns keys by the length of the text, and pages keep keys that were turned before" if kind == "dynamic" else ""
        scaling.fail("rope_type", kind, f"must be one of {', '.join(KINDS)}{why}")
    return _yarn(scaling, theta, max_position)


def _llama3(scaling: Fields, theta: float) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.count("original_max_position_embeddings"),
    )


def _yarn(scaling: Fields, theta: float, max_position: int) -> tuple[RopeConfig, int]:
    original = scaling.count("original_max_position_embeddings", max_position)
    factor = scaling.number("factor", max_position / original)
    rope = RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        # transformers takes 0 for "not given" in these four.
        beta_fast=scaling.number("beta_fast", 32.0) if scaling.raw.get("beta_fast") else 32.0,
        beta_slow=scaling.number("beta_slow", 1.0) if scaling.raw.get("beta_slow") else 1.0,
        truncate=scaling.flag("truncate", True),
        attention_scaling=_yarn_scaling(scaling, factor),
    )
    if rope.beta_fast < rope.beta_slow:
        scaling.fail("beta_fast", rope.beta_fast, f"must not be below beta_slow ({rope.beta_slow})")
    # Folders keep the original context in max_position_embeddings, or the stretched one: the longer is what the model takes.
    stretched = math.floor(factor * original) if scaling.raw.get("original_max_position_embeddings") else 0
    return rope, max(max_position, stretched)


def _yarn_scaling(scaling: Fields, factor: float) -> float:
    if scaling.raw.get("attention_factor") is not None:
        return scaling.number("attention_factor")

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.raw.get("mscale") and scaling.raw.get("mscale_all_dim"):
        return temperature(scaling.number("mscale")) / temperature(scaling.number("mscale_all_dim"))
    return temperature(1.0)
