"""The gateway's half of room tickets: decode gets one that prefill can check, and prefill gets none."""

from __future__ import annotations

import time
from pathlib import Path

from gateway_harness import eventually

from baton.wire.ticket import TicketKeys

SECRET = "the gateway's and prefill's, and nobody else's"
NEXT = "the secret that comes after the first one, here"


async def test_every_room_of_a_pair_is_signed_for_its_own_servers(stack_of, tmp_path: Path) -> None:
    path = tmp_path / "tickets"
    path.write_text(SECRET + "\n")
    stack = await stack_of(ticket_secret_file=path, bootstrap_timeout_s=40.0)
    before = time.time()
    await stack.reply()
    await stack.reply()
    starts = stack.decode.starts
    claims = [TicketKeys([SECRET.encode()]).verify(start.decode.ticket) for start in starts]
    assert [said.room for said in claims] == [start.room for start in starts]
    assert {(said.prefill_instance_id, said.decode_instance_id) for said in claims} == {(stack.prefill.instance_id, stack.decode.instance_id)}
    for said in claims:  # long enough to publish, not for ever
        assert 40 < said.expires_at_ms / 1e3 - before < 200
    assert not any(start.prefill.SerializeToString().count(b"ticket") for start in stack.prefill.starts)

    path.write_text(f"{NEXT}\n{SECRET}\n")
    await eventually(lambda: stack.gateway._watched[0].counters["reloaded"] == 1)
    await stack.reply()
    assert stack.decode.starts[-1].decode.ticket.key_id == TicketKeys([NEXT.encode()]).signing_id


async def test_without_a_secret_nothing_is_signed(split) -> None:
    await split.reply()
    assert not split.decode.starts[-1].decode.HasField("ticket")
