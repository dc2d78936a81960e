"""Room tickets: what was signed verifies, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.wire.ticket import MIN_SECRET_BYTES, TicketError, TicketForgedError, TicketKeys, TicketKeyUnknownError, TicketMalformedError
from baton.wire.v1 import common_pb2

OLD, NEW = b"old secret, as long as it has to be, and more", b"new secret, as long as it has to be, and more"
CLAIMS = common_pb2.TicketClaims(room=7, prefill_instance_id="prefill-1", decode_instance_id="decode-1", expires_at_ms=1_000)

claims = st.builds(
    common_pb2.TicketClaims,
    room=st.integers(0, 2**64 - 1),
    prefill_instance_id=st.text(max_size=40),
    decode_instance_id=st.text(max_size=40),
    expires_at_ms=st.integers(-(2**63), 2**63 - 1),
)


@given(claims)
def test_what_was_signed_comes_back(said: common_pb2.TicketClaims) -> None:
    keys = TicketKeys([NEW])
    wire = common_pb2.RoomTicket.FromString(keys.sign(said).SerializeToString())
    assert keys.verify(wire) == said


@given(claims, st.data())
def test_no_bit_of_a_ticket_can_be_changed(said: common_pb2.TicketClaims, data: st.DataObject) -> None:
    keys = TicketKeys([NEW])
    ticket = keys.sign(said)
    field = data.draw(st.sampled_from(["claims", "mac"]))
    raw = bytearray(getattr(ticket, field) or b"\0")
    place = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[place // 8] ^= 1 << place % 8
    setattr(ticket, field, bytes(raw))
    with pytest.raises(TicketForgedError):
        keys.verify(ticket)


@given(st.binary(max_size=60), st.binary(max_size=40))
def test_bytes_that_nobody_signed_are_refused_by_name(said: bytes, mac: bytes) -> None:
    keys = TicketKeys([NEW])
    for key_id in (keys.signing_id, "", "ffffffff"):
        with pytest.raises(TicketError) as caught:
            keys.verify(common_pb2.RoomTicket(key_id=key_id, claims=said, mac=mac))
        assert caught.value.cause.startswith("ticket_")


def test_another_secret_is_named_by_its_id_and_never_shown() -> None:
    with pytest.raises(TicketKeyUnknownError) as caught:
        TicketKeys([NEW]).verify(TicketKeys([OLD]).sign(CLAIMS))
    text = str(caught.value)
    assert TicketKeys([OLD]).signing_id in text
    assert TicketKeys([NEW]).signing_id in text
    assert "secret, as long" not in text


def test_a_secret_is_replaced_in_three_steps_without_a_refusal() -> None:
    """Prefill learns the new one, the gateway signs with it, prefill forgets the old one."""
    gateway, prefill = TicketKeys([OLD]), TicketKeys([OLD, NEW])
    assert prefill.verify(gateway.sign(CLAIMS)) == CLAIMS
    gateway = TicketKeys([NEW, OLD])
    assert prefill.verify(gateway.sign(CLAIMS)) == CLAIMS
    prefill = TicketKeys([NEW])
    assert prefill.verify(gateway.sign(CLAIMS)) == CLAIMS


def test_signed_bytes_that_are_no_claims_are_malformed() -> None:
    """Only a holder of the secret can make one; it is still no crash."""
    keys = TicketKeys([NEW])
    from baton.wire.ticket import _mac

    raw = b"\xff\xff\xff"
    with pytest.raises(TicketMalformedError):
        keys.verify(common_pb2.RoomTicket(key_id=keys.signing_id, claims=raw, mac=_mac(NEW, raw)))


@pytest.mark.parametrize(
    ("secrets", "why"),
    [([], "no secret"), ([b"x" * (MIN_SECRET_BYTES - 1)], "has 31 bytes, at least 32"), ([NEW, NEW], "in it twice")],
)
def test_secrets_that_cannot_be_used_are_refused(secrets: list[bytes], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TicketKeys(secrets)
