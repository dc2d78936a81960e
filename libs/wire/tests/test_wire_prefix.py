"""Names of blocks: as worker.proto defines them, by tenant and by gateway."""

from __future__ import annotations

import struct
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from baton.wire.prefix import block_ids

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(st.binary(max_size=64), st.text(max_size=10), tokens, st.integers(1, 8), st.integers(0, 12))
def test_they_are_what_the_contract_says(key: bytes, salt: str, prompt: list[int], size: int, most: int) -> None:
    digest, expected = blake2b(salt.encode(), key=key, digest_size=16).digest(), []
    for start in range(0, len(prompt) // size * size, size):
        digest = blake2b(digest + struct.pack(f"<{size}I", *prompt[start : start + size]), digest_size=16).digest()
        expected.append(struct.unpack("<Q", digest[:8])[0])
    assert block_ids(key, salt, prompt, size, most) == expected[:most]


def test_another_tenant_and_another_gateway_have_other_names() -> None:
    prompt = list(range(16))
    found = [set(block_ids(key, salt, prompt, 4, 100)) for key in (b"one", b"other") for salt in ("", "a", "b")]
    assert len(set().union(*found)) == 6 * 4
