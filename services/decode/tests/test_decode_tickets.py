"""Room tickets between real servers: decode carries what the gateway signed, and prefill believes nothing else."""

from __future__ import annotations

import asyncio
import time

import grpc

from baton.wire.ticket import TicketKeys
from baton.wire.v1 import common_pb2, worker_pb2

SECRET = "prefill's and the gateway's, and not decode's"


def signed(pair, room: int, secret: str = SECRET, **changes) -> worker_pb2.DecodeLeg:
    prefill = pair.prefill.server
    said = {"room": room, "prefill_instance_id": prefill.instance_id, "decode_instance_id": pair.decode.server.instance_id}
    claims = common_pb2.TicketClaims(**(said | {"expires_at_ms": round(time.time() * 1e3) + 60_000} | changes))
    ticket = TicketKeys([secret.encode()]).sign(claims)
    return worker_pb2.DecodeLeg(bootstrap_address=prefill.bootstrap, prefill_instance_id=prefill.instance_id, ticket=ticket)


async def test_decode_shows_its_ticket_and_a_secret_is_replaced_while_both_run(fleet, leg_type, pair_type, prompts, tmp_path) -> None:
    path = tmp_path / "tickets"
    path.write_text(SECRET + "\n")
    servers = fleet.pair_of_servers("shm", ("--ticket-secret-file", str(path)), ())
    async with leg_type(servers[0]) as prefill, leg_type(servers[1]) as decode:
        pair = pair_type(prefill, decode)
        await pair.connect()

        async def one(make_leg) -> tuple[str, common_pb2.Failure]:
            """A room's end on decode; prefill's half is ended with it, as a gateway would."""
            number, prompt = pair.draw(), prompts(20)
            first = await pair.start_prefill(number, prompt, 4)
            rest = await pair.decode.start(number, prompt, 4, decode=make_leg(number))
            end = await rest.until_over()
            if end == "finished":
                assert await first.until_over() == "transferred"
            else:
                assert first.events == {}
                await pair.prefill.abort(number)
            await pair.until_free()
            return end, rest.failure

        assert (await one(lambda room: signed(pair, room)))[0] == "finished"
        end, failure = await one(
            lambda room: worker_pb2.DecodeLeg(bootstrap_address=servers[0].bootstrap, prefill_instance_id=servers[0].instance_id)
        )
        assert (end, failure.cause, failure.origin) == ("failed", "ticket_missing", common_pb2.ORIGIN_GATEWAY)
        assert "--ticket-secret-file" in failure.message
        end, failure = await one(lambda room: signed(pair, room + 1))
        assert (end, failure.cause, failure.code) == ("failed", "ticket_wrong_room", grpc.StatusCode.PERMISSION_DENIED.value[0])
        end, failure = await one(lambda room: signed(pair, room, decode_instance_id="decode-somebody-else"))
        assert failure.cause == "ticket_wrong_decode"

        path.write_text("the next secret, which nobody has signed with yet\n")
        async with asyncio.timeout(20):
            while (await one(lambda room: signed(pair, room, "the next secret, which nobody has signed with yet")))[0] == "failed":
                pass
        assert (await one(lambda room: signed(pair, room)))[1].cause == "ticket_key_unknown"
    assert SECRET not in servers[0].log + servers[1].log
    assert "the next secret" not in servers[0].log + servers[1].log
