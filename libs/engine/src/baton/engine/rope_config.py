"""Rotary embedding as config.json describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.engine.config_json import MOST_OF_ANYTHING, Fields

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
    _refuse_contradictions(fields, scaling)
    for place in (fields, scaling):
        if place.raw.get("partial_rotary_factor") not in (None, 1.0):
            place.fail("partial_rotary_factor", place.raw["partial_rotary_factor"], "must be 1.0")
    # A base of 1 turns all dimensions alike.
    theta = scaling.number("rope_theta", fields.number("rope_theta", default_theta, 1.001, 1e15), 1.001, 1e15)
    kind = _kind(scaling)
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


def _said(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What an object says of the kind: without nulls, with one name for the type, and without what silence means too."""
    said = {name: value for name, value in raw.items() if value is not None and name not in ("rope_theta", "type", "rope_type")}
    kind = raw.get("rope_type") if raw.get("rope_type") is not None else raw.get("type")
    return said if kind in (None, "default") else {**said, "rope_type": kind}


def _refuse_contradictions(fields: Fields, scaling: Fields) -> None:
    """Where config.json describes the embedding twice, both must say the same: nobody knows which of the two was trained with."""
    given = scaling.raw.get("rope_theta")
    for place in (fields, fields.inside("rope_scaling")):
        theta = place.raw.get("rope_theta")
        if None not in (theta, given) and theta != given:
            place.fail("rope_theta", theta, f"contradicts the rope_theta of rope_parameters, {given!r}")
    old, new = fields.inside("rope_scaling").raw, fields.inside("rope_parameters").raw
    if old and new and _said(old) != _said(new):
        fields.fail("rope_scaling", old, f"contradicts rope_parameters, {new!r}; give one of the two")


def _kind(scaling: Fields) -> Any:
    """The type as it is given, default without one; then nothing may stand beside it that only a type would give a meaning to."""
    for name, value in scaling.raw.items():
        if isinstance(value, dict):
            scaling.fail(name, value, "must not be an object: all layers share one rotary embedding here")
    for name in ("rope_type", "type"):
        if scaling.raw.get(name) is not None:
            return scaling.raw[name]
    for name, value in scaling.raw.items():
        if value is not None and name not in ("rope_theta", "partial_rotary_factor"):
            scaling.fail(name, value, f"has no meaning without rope_type, one of {', '.join(KINDS)}")
    return "default"


def _llama3(scaling: Fields, theta: float) -> RopeConfig:
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.count("original_max_position_embeddings"),
    )
    if rope.low_freq_factor >= rope.high_freq_factor:
        scaling.fail("low_freq_factor", rope.low_freq_factor, f"must be below high_freq_factor ({rope.high_freq_factor})")
    return rope


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
    if stretched > MOST_OF_ANYTHING:
        scaling.fail("factor", factor, f"times original_max_position_embeddings ({original}) must be at most {MOST_OF_ANYTHING}")
    return rope, max(max_position, stretched)


def _yarn_scaling(scaling: Fields, factor: float) -> float:
    if scaling.raw.get("attention_factor") is not None:
        return scaling.number("attention_factor")

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.raw.get("mscale") and scaling.raw.get("mscale_all_dim"):
        return temperature(scaling.number("mscale")) / temperature(scaling.number("mscale_all_dim"))
    return temperature(1.0)
