"""Answers that are held to a grammar: valid, drawn from what is left, and the same however and wherever they are computed."""

from __future__ import annotations

import json
import re
import string

import numpy as np
import pytest
import torch
from engine_reference import answers, assert_all_free, ends, engine, prompts, request, run
from test_engine_device import DEVICE, on_device
from test_engine_split import Pair, legs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.engine import grammar as grammars
from baton.engine.grammar import GrammarError, Grammars
from baton.engine.sampler import Draw, sample
from baton.engine.types import Failed, Finished, FinishReason, SamplingParams

END = 1
ORDER = json.dumps({"grammars": [{"json_schema": {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "abc", "x"]}, "count": {"type": "integer", "minimum": 0, "maximum": 999}, "open": {"type": "boolean"}},
    "required": ["name", "count", "open"],
    "additionalProperties": False,
}}]})  # fmt: skip
DIGITS = "start: /[0-9]{3}-[a-f]{1,6}/"
WORDS = 'start: word+\nword: "ab" | "cd" | " "'
FORMS = (ORDER, DIGITS, WORDS)


@pytest.fixture(autouse=True)
def plain_twins(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """A token for each printable character and for some pairs of them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    chars = {char if char != " " else "Ġ": number for number, char in enumerate(string.printable[:95], start=2)}
    pairs = ["ab", "cd", '{"', '":', "12", "00"]
    vocab = {"<pad>": 0, "<end>": END, **chars} | {pair: 97 + number for number, pair in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(pair) for pair in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END]}))
    made = Grammars(folder, 131)
    made.spell = tokenizer.decode
    return made


def held(forms, room: int, prompt: list[int], text: str, max_tokens: int = 60, **fields):
    """A request of its own each time: one engine's state is nobody else's."""
    constraint = (forms.known(text) or forms.compile(text)).constraint()
    return request(room, prompt, max_tokens=max_tokens, grammar=constraint, stop_token_ids=frozenset({END}), **fields)


def fits(text: str, answer: str) -> bool:
    if text == ORDER:
        value = json.loads(answer)
        return list(value) == ["name", "count", "open"] and value["name"] in ("ab", "abc", "x") and 0 <= value["count"] <= 999
    return re.fullmatch(r"[0-9]{3}-[a-f]{1,6}" if text == DIGITS else r"(ab|cd| )+", answer) is not None


def test_what_a_mask_rules_out(forms):
    """Everything but what the definition lets in, token by token; at the end only the end."""
    constraint = forms.compile(DIGITS).constraint()
    spelt = [forms.spell([token], skip_special_tokens=False) for token in range(103)]
    answer: list[int] = []
    for text, regex in (("", r"[0-9]"), ("12", r"[0-9]"), ("0", r"-"), ("-", r"[a-f]"), ("f", r"[a-f]|cd|ab"), ("abcde", "")):
        answer += [spelt.index(char) for char in text] if text != "12" else [spelt.index("12")]
        constraint.begin([5, 5, *answer], 2)
        constraint.make()
        allowed = np.nonzero(~constraint.forbidden())[0].tolist()
        wanted = [number for number, piece in enumerate(spelt) if number > 1 and piece and regex and re.fullmatch(regex, piece)]
        ends_here = [END] if text in ("f", "abcde") else []
        pairs = [spelt.index(pair) for pair in (("12", "00") if text == "" else ("ab", "cd") if text == "-" else ())]
        assert sorted(allowed) == sorted({*wanted, *ends_here, *pairs}), text


def test_what_is_left_is_drawn_from_by_its_probability(forms):
    """The mask comes behind penalties and bias and before temperature: the chances of what is left are those of the masked softmax."""
    constraint = forms.compile("start: /[abxyz]/").constraint()
    constraint.begin([3], 1)
    constraint.make()
    allowed = torch.from_numpy(~constraint.forbidden())
    logits = torch.randn(131, generator=torch.Generator().manual_seed(4)) * 2
    bias = ((int(allowed.nonzero()[0]), 1.5), (7, 50.0))
    expected = logits.double().clone()
    for token, value in bias:
        expected[token] += value
    expected = (expected / 0.8).masked_fill(~allowed, -torch.inf).softmax(-1)
    num_draws = 4000
    draws = [Draw(SamplingParams(temperature=0.8, seed=seed, logit_bias=bias, grammar=constraint), 1, 0) for seed in range(num_draws)]
    counts = torch.bincount(torch.tensor(sample(logits.repeat(num_draws, 1), draws)), minlength=131).double()
    assert counts[~allowed].sum() == 0
    assert float(((counts - expected * num_draws) ** 2 / (expected * num_draws))[allowed].sum()) < 20  # 4 degrees of freedom


def test_the_same_answer_on_every_way(tiny, forms):
    """Plain, split (whose first token prefill draws), with pages lost and prompts in chunks, on the GPU's path that launches ahead, beside rooms that
    are held to nothing; and goes on in another room."""
    asked = dict(enumerate(prompts([9, 33, 1, 20, 14, 50], seed=6), start=1))
    settings = {room: {"temperature": 1.0, "seed": 40 + room, **({"frequency_penalty": 0.6} if room == 2 else {})} for room in asked}

    def requests():
        return [
            request(room, prompt, max_tokens=30, **settings[room]) if room == 4 else held(forms, room, prompt, FORMS[room % 3], **settings[room])
            for room, prompt in asked.items()
        ]

    models = (tiny.ours, on_device(tiny.folder))
    found = []
    for model in models:
        for shape in ({}, {"max_num_batched_tokens": 13}, {"num_pages": 40, "growth_tokens": 2}):
            plain = engine(model, **shape)
            for each in requests():
                plain.add(each)
            events = run(plain)
            found.append(answers(events))
            assert bool(plain.stats().extra["retractions"]) is ("num_pages" in shape)
            assert_all_free(plain)
            plain.close()
        if DEVICE.type == "cpu":
            pair = Pair(model, decode_pages=40, growth_tokens=2)
            for one, other in zip(requests(), requests(), strict=True):
                pair.prefill.add(one)
                pair.decode.add(other)
            found.append(legs(pair.run()))
            pair.assert_clean()
    assert all(each == found[0] for each in found)
    for room in (1, 2, 3, 5, 6):
        tokens = found[0][room]
        if tokens[-1] == END:
            assert fits(FORMS[room % 3], forms.spell(tokens)), forms.spell(tokens)
    assert sum(tokens[-1] == END for tokens in found[0].values()) >= 3
    whole = found[0][3]
    plain = engine(tiny.ours)
    for given in (1, len(whole) // 2, len(whole) - 1):
        start = asked[3] + whole[:given]
        plain.add(held(forms, given, start, FORMS[0], max_tokens=60 - given, answered_tokens=given, **settings[3]))
    assert answers(run(plain)) == {given: whole[given:] for given in (1, len(whole) // 2, len(whole) - 1)}


def test_an_answer_that_is_cut(tiny, forms):
    plain = engine(tiny.ours)
    plain.add(held(forms, 1, [5, 6, 7], ORDER, max_tokens=5, temperature=1.0))
    assert ends(run(plain))[1] == Finished(1, FinishReason.LENGTH, 5)


def test_an_answer_that_has_left_its_grammar_ends_alone(tiny, forms):
    """As it would where a prefill server of another kind drew the first token."""
    for model in (tiny.ours, on_device(tiny.folder)):
        plain = engine(model)
        plain.add(held(forms, 1, [5, 6, 7, 99], DIGITS, answered_tokens=1))
        plain.add(held(forms, 2, [5, 6, 7], DIGITS, temperature=1.0))
        found = ends(run(plain))
        assert isinstance(found[1], Failed)
        assert (found[1].failure.code, found[1].failure.origin, found[1].failure.cause) == ("INVALID_ARGUMENT", "client", "grammar_fault")
        assert found[2].reason is FinishReason.STOP
        assert_all_free(plain)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('start: "a', "a"),
        ("start: nobody", "nobody"),
        ("start: /(/", "regex"),
        ('{"grammars":[{"json_schema":{"type":"thing"}}]}', "thing"),
        ("start: a\na: a", "no text"),
    ],
)
def test_what_cannot_be_compiled(forms, text, said):
    with pytest.raises(GrammarError, match=said):
        forms.compile(text)
    assert forms.known(text) is None


def test_few_are_kept(forms, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 200)
    texts = [f"start: /a{{{number}}}/ # " + "x" * 60 for number in range(1, 6)]
    for text in texts:
        forms.compile(text)
    assert [forms.known(text) is not None for text in texts] == [False, False, False, True, True]


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        Grammars(tmp_path, 131).compile(DIGITS)
