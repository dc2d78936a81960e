"""Why a room's transfer ends badly here: made in one place, and what of a publication is not acceptable as a table of reasons."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.types import Failure
from baton.prefill.link import DecodeLink
from baton.prefill.publication import Publication
from baton.prefill.room_send import RoomSend


def failure(code: str, cause: str, message: str, *, origin: str = "prefill") -> Failure:
    return Failure(code, origin, cause, message)


def decode_lost(link: DecodeLink, reason: str = "") -> Failure:
    text = f"decode server {link.instance_id} is gone"
    return failure("UNAVAILABLE", "decode_lost", f"{text}: {reason}" if reason else text, origin="decode")


def way_lost(link: DecodeLink, reason: str) -> Failure:
    """Both servers may be well."""
    return failure("UNAVAILABLE", "way_lost", f"the way to decode server {link.instance_id} broke: {reason}", origin="transfer")


@dataclass(frozen=True, slots=True)
class Objection:
    """ends_room: the room cannot be served; else only this publication is wrong, and the right one may still come."""

    failure: Failure
    ends_room: bool


def objection(send: RoomSend, publication: Publication, page_hash: str) -> Objection | None:
    """What speaks against `publication` as that of the room `send`. page_hash: name of the digest that is computed here. Pure."""
    room, link = send.room, publication.link
    if link.instance_id != send.decode_instance_id:
        text = f"room {room} belongs to decode server {send.decode_instance_id}, it was published by {link.instance_id}"
        return Objection(failure("PERMISSION_DENIED", "wrong_decode", text), ends_room=False)
    if send.publication is not None or send.ending is not None:
        twice = failure("ALREADY_EXISTS", "published_twice", f"room {room} was published before")
        return Objection(send.ending or twice, ends_room=False)
    if publication.num_tokens != send.num_tokens:
        text = f"room {room}: decode published {publication.num_tokens} tokens, the gateway sent a prompt of {send.num_tokens}"
        return Objection(failure("INTERNAL", "length_mismatch", text), ends_room=True)
    if publication.digest and link.page_hash != page_hash:
        text = f"room {room}: decode compares digests of kind {link.page_hash!r}, this server computes {page_hash!r} (its pages "
        text += "lie in another kind of memory): start decode with --digest=off"
        return Objection(failure("FAILED_PRECONDITION", "page_hash", text), ends_room=True)
    return None
