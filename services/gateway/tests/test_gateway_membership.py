"""Who is in the fleet: the union of sources, leases, and what a gateway makes of etcd. Pure."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.discovery.bearer import BearerKeys
from baton.gateway.discovery.etcd_view import EtcdView
from baton.gateway.discovery.leases import Leases
from baton.gateway.discovery.membership import Membership, Offer, Source
from baton.gateway.worker import Leg
from baton.wire.member import MemberError, check_member, member_from_json, member_key, member_to_json, members_prefix
from baton.wire.v1 import common_pb2, fleet_pb2


def member(name: str, address: str = "10.0.0.1:1", model: str = "tiny", role: common_pb2.Role.ValueType = common_pb2.ROLE_PLAIN) -> fleet_pb2.Member:
    return fleet_pb2.Member(instance_id=name, role=role, address=address, model=model, version="1")


def offer(source: Source, key: str, address: str, leg: Leg = Leg.PLAIN) -> Offer:
    return Offer(source, key, leg, address)


# --- membership

offers = st.builds(Offer, st.sampled_from(Source), st.sampled_from("abcd"), st.sampled_from(Leg), st.sampled_from(["w:1", "x:2", "y:3"]))


@given(st.lists(st.tuples(st.booleans(), offers), max_size=30))
def test_a_place_is_there_as_long_as_anything_names_it(steps: list[tuple[bool, Offer]]) -> None:
    membership, model = Membership(), {}
    for put, one in steps:
        key = (one.source, one.key)
        if put:
            assert membership.put(one)
            model.pop(key, None)
            model[key] = one
        else:
            assert membership.drop(one.source, one.key, "over") == (model.pop(key, None) is not None)
    assert membership.places() == {one.address: one.leg for one in model.values()}  # of two words on one address the younger counts
    for address in membership.places():
        assert membership.sources(address) == sorted({one.source.value for one in model.values() if one.address == address})


def test_a_successor_keeps_the_place_when_the_lease_of_the_dead_one_ends() -> None:
    membership = Membership()
    membership.put(offer(Source.REGISTERED, "old", "w:1"))
    membership.put(offer(Source.REGISTERED, "new", "w:1"))
    membership.drop(Source.REGISTERED, "old", "its lease has expired")
    assert list(membership.places()) == ["w:1"]


def test_what_an_operator_removed_stays_away_and_another_process_there_may_come() -> None:
    membership = Membership()
    membership.put(offer(Source.ETCD, "one", "w:1"))
    membership.put(offer(Source.NAMED, "w:1", "w:1"))
    membership.remove("w:1", "an operator removed it")
    assert membership.places() == {}
    assert membership.why_gone(["w:1"]) == {"w:1": "an operator removed it"}
    assert not membership.put(offer(Source.ETCD, "one", "w:1"))
    assert membership.put(offer(Source.ETCD, "two", "w:1"))
    assert membership.put(offer(Source.ADDED, "w:1", "w:1"))


# --- leases


@given(st.lists(st.tuples(st.sampled_from(["grant", "renew", "end"]), st.sampled_from("abc"), st.floats(0, 5)), max_size=40))
def test_a_lease_lasts_from_its_last_renewal_and_no_longer(steps: list[tuple[str, str, float]]) -> None:
    leases, until, now = Leases(), {}, 0.0
    for what, name, passed in steps:
        now += passed
        over = {name for name, end in until.items() if end <= now}
        assert {name for name, _ in leases.expired(now)} == over
        until = {name: end for name, end in until.items() if name not in over}
        if what == "grant":
            leases.grant(member(name), 3.0, now)
            until[name] = now + 3.0
        elif what == "renew":
            assert leases.renew(name, now) == (name in until)
            if name in until:
                until[name] = now + 3.0
        else:
            assert leases.end(name) == (until.pop(name, None) is not None)
        assert len(leases) == len(until)


def test_time_in_which_the_gateway_stood_still_counts_against_nobody() -> None:
    leases = Leases()
    leases.grant(member("a"), 3.0, 0.0)
    leases.extend(10.0)
    assert leases.expired(12.9) == []
    assert leases.expired(13.0) == [("a", 3.0)]


# --- etcd, as a gateway sees it

A, B = member_key("/baton", "a"), member_key("/baton", "b")


def view(*names: str) -> EtcdView:
    one = EtcdView("tiny", grace_s=30.0)
    one.replace({member_key("/baton", name): member_to_json(member(name)) for name in names}, 0.0)
    return one


def test_a_deleted_key_is_the_truth_at_once() -> None:
    one = view("a", "b")
    one.delete(A)
    assert list(one.members) == ["b"]


def test_what_an_etcd_that_came_back_has_lost_is_kept_for_the_grace() -> None:
    one = view("a", "b")
    one.replace({}, 100.0)
    assert set(one.members) == {"a", "b"}
    assert any("a is not in etcd any more" in text for text in one.problems(100.0))
    one.put(A, member_to_json(member("a")))
    assert one.next_due() == 130.0
    assert one.expire(129.0) == []
    assert one.expire(130.0) == ["b"]
    assert list(one.members) == ["a"]
    assert one.problems(130.0) == []


def test_a_member_of_another_model_is_none_of_ours_and_is_told_when_there_are_no_others() -> None:
    one = view()
    one.put(A, member_to_json(member("a", model="big")))
    assert one.members == {}
    assert "1 servers of other models (big)" in one.problems(0.0)[0]
    one.put(B, member_to_json(member("b")))
    assert one.problems(0.0) == []


def test_what_cannot_be_read_is_told_and_the_rest_is_used() -> None:
    one = view("b")
    one.put(A, b"{")
    assert list(one.members) == ["b"]
    assert "/baton/members/a" in one.problems(0.0)[0]
    one.put(A, member_to_json(member("a")))
    assert one.problems(0.0) == []


@given(st.lists(st.tuples(st.sampled_from(["put", "delete", "replace", "tick"]), st.sets(st.sampled_from("abc")), st.floats(0, 20)), max_size=30))
def test_the_view_never_loses_what_etcd_has_and_never_keeps_for_longer_than_the_grace(steps: list[tuple[str, set[str], float]]) -> None:
    one, there, lost_at, now = EtcdView("tiny", grace_s=30.0), set[str](), dict[str, float](), 0.0
    for what, names, passed in steps:
        now += passed
        if what == "replace":
            lost_at |= dict.fromkeys((there | set(lost_at)) - names, now)
            lost_at = {name: at for name, at in lost_at.items() if name not in names}
            there = set(names)
            one.replace({member_key("/baton", name): member_to_json(member(name)) for name in names}, now)
        elif what == "put":
            for name in names:
                one.put(member_key("/baton", name), member_to_json(member(name)))
            there |= names
            lost_at = {name: at for name, at in lost_at.items() if name not in names}
        elif what == "delete":
            for name in names:
                one.delete(member_key("/baton", name))
            there -= names
            lost_at = {name: at for name, at in lost_at.items() if name not in names}
        else:
            one.expire(now)
            lost_at = {name: at for name, at in lost_at.items() if at + 30.0 > now}
        assert set(one.members) == there | set(lost_at)


# --- how members are written


def test_a_member_survives_etcd_and_fields_that_are_newer_than_us() -> None:
    one = member("decode-1", "10.0.0.2:8004", role=common_pb2.ROLE_DECODE)
    assert member_from_json(member_to_json(one)) == one
    newer = member_to_json(one).rstrip(b"}") + b', "colour": "red"}'
    assert member_from_json(newer) == one
    assert member_key("/baton/", "x") == b"/baton/members/x"
    assert member_key("/baton", "x").startswith(members_prefix("/baton"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"instance_id": ""}, "instance_id"),
        ({"role": 0}, "role=0"),
        ({"role": 99}, "role=99"),
        ({"address": "nowhere"}, "'nowhere'"),
        ({"address": ":1"}, "':1'"),
        ({"address": "h:0"}, "'h:0'"),
        ({"address": "h:٣"}, "'h:٣'"),
        ({"model": ""}, "model"),
    ],
)
def test_half_a_member_is_refused_by_field_and_value(change: dict[str, object], words: str) -> None:
    one = member("a")
    for name, value in change.items():
        setattr(one, name, value)
    with pytest.raises(MemberError, match=words):
        check_member(one)


@given(st.binary(max_size=60))
def test_any_value_of_a_key_is_a_member_or_refused(value: bytes) -> None:
    with contextlib.suppress(MemberError):
        check_member(member_from_json(value))


# --- keys


def test_any_key_of_the_file_opens_and_nothing_else_does() -> None:
    keys = BearerKeys([b"a" * 16, "schlüssel-der-zweite".encode()])
    assert keys.accept("a" * 16)
    assert keys.accept("schlüssel-der-zweite")
    assert not any(keys.accept(wrong) for wrong in ("", "a" * 15, "a" * 17, "\udcff" * 16))


@pytest.mark.parametrize(("keys", "words"), [([], "no key"), ([b"x" * 16, b"short"], "key number 2 has 5 bytes")])
def test_keys_that_could_be_guessed_are_refused(keys: list[bytes], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BearerKeys(keys)
