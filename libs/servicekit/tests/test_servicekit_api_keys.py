"""API keys: hashed at rest, found in constant time, and a file that says what is wrong with it without showing what is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.servicekit import ApiKeys, KeyLimits, KeyRole, SecretFileError, new_key, read_api_keys
from baton.servicekit import api_keys as module
from baton.servicekit.api_keys import parse_line

number = st.none() | st.integers(1, 10**12)
limits = st.builds(
    KeyLimits,
    max_concurrent=number,
    requests_per_minute=number,
    tokens_in_flight=number,
    weight=st.sampled_from([0.001, 0.5, 1.0, 2.0, 1000.0]),
)


@given(st.sampled_from(KeyRole), limits)
def test_a_line_says_all_of_a_key_but_the_key(role: KeyRole, given_limits: KeyLimits) -> None:
    text, key = new_key(role, given_limits)
    line = key.line()
    assert parse_line(line) == key
    assert text.split("-", 2)[2] not in line
    assert text.split("-", 2)[2] not in repr(key)


def test_a_key_is_found_and_nothing_else_is() -> None:
    text, key = new_key(KeyRole.CLIENT)
    other, _ = new_key(KeyRole.CLIENT)
    keys = ApiKeys([key])
    assert keys.find(text) == key
    wrong = [other, text[:-1], text + "a", text.upper(), text[:-1] + ("A" if text[-1] != "A" else "B"), key.line(), key.digest.hex(), "", " " + text]
    mixed = f"baton-{key.id}-{other.split('-', 2)[2]}"
    assert [keys.find(presented) for presented in [*wrong, mixed]] == [None] * 10


@given(st.text(max_size=100))
def test_no_text_opens_anything_or_breaks_anything(text: str) -> None:
    assert ApiKeys([new_key(KeyRole.ADMIN)[1]]).find(text) is None


def test_an_unknown_id_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of an answer would tell which ids exist."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    text, key = new_key(KeyRole.CLIENT)
    ApiKeys([key]).find(text)
    ApiKeys([]).find(text)
    assert [len(one) == len(other) == 32 for one, other in compared] == [True, True]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("baton-{id}-{secret}", "line 2: it is not <id> <role> sha256:<hex>"),
        ("{id} client {secret}", "it is not <id> <role>"),
        ("{id} owner sha256:{digest}", "role 'owner' is none of client, admin"),
        ("{id} client sha256:{digest} max_concurrent=0", "max_concurrent='0' is no whole number of at least 1"),
        ("{id} client sha256:{digest} weight=-1", "weight='-1' is outside"),
        ("{id} client sha256:{digest} weight=nan", "weight='nan' is outside"),
        ("{id} client sha256:{digest} speed=9", "speed: no such limit"),
        ("{id} client sha256:{digest}\n{id} admin sha256:{digest}", "line 3: id {id} is there twice"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_never_shown(tmp_path: Path, line: str, why: str) -> None:
    text, key = new_key(KeyRole.CLIENT)
    parts = {"id": key.id, "secret": text.split("-", 2)[2], "digest": key.digest.hex()}
    path = tmp_path / "keys"
    path.write_text("# keys\n" + line.format(**parts) + "\n")
    with pytest.raises(SecretFileError) as caught:
        read_api_keys("--api-key-file", path)
    assert why.format(**parts) in str(caught.value)
    assert parts["secret"] not in str(caught.value)
    assert parts["digest"] not in str(caught.value)
