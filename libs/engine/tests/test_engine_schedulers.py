"""Schedulers against ports that answer late, out of order and badly: no page is lost, freed early or owned twice. No torch here."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.allocator import PageAllocator
from baton.engine.page_book import PageBook
from baton.engine.ports import Freed, Landed, LandingFailed, Published, PublishedSlots, SendDone, SendFailed, SendStarted
from baton.engine.prefix_tree import PrefixTree
from baton.engine.scheduling.decode import DecodeScheduler
from baton.engine.scheduling.prefill import PrefillScheduler
from baton.engine.scheduling.sequence import Limits, StepPlan
from baton.engine.types import Failed, Failure, Finished, Request, SamplingParams, Token, Transferred, TransferStats

FORKED = 2
FAILURE = Failure("UNAVAILABLE", "transfer", "peer_lost", "gone")
STATS = TransferStats("fake", 1, 1, 0.0, 0.0, digest=False)


def limits(num_pages: int, **changes) -> Limits:
    given = {"page_size": 2, "max_num_batched_tokens": 12, "max_running": 4, "growth_tokens": 4, "max_passes": 2, "vocab_size": 50}
    return Limits(max_model_len=2 * num_pages, **{**given, **changes})


class Importer:
    """Leases in the hands of a random peer."""

    def __init__(self, pick: random.Random) -> None:
        self.pick = pick
        self.leases: dict[int, str] = {}
        self.pages: dict[int, set[int]] = {}
        self.events: list = []

    def publish(self, request, reservation):
        self.leases[request.room] = "reserved"
        assert reservation.resident_tokens <= reservation.num_tokens
        assert reservation.resident_tokens % 2 == 0
        pages = [page for extent in reservation.pages for page in range(extent.first, extent.end)]
        self.pages[request.room] = set(pages[reservation.resident_tokens // 2 :])

    def abort(self, room, failure):
        if room in self.leases:
            self.leases[room] = "aborting"

    def quarantined_pages(self):
        return 0

    def poll(self):
        events, self.events = self.events, []
        return events

    def advance(self) -> None:
        """One random thing happens to one random lease."""
        if not self.leases:
            return
        room = self.pick.choice(sorted(self.leases))
        state = self.leases[room]
        if state == "reserved":
            self.leases[room] = "published"
            self.events.append(Published(room))
        elif state == "failed" or (state == "aborting" and self.pick.random() < 0.7):
            self.end(room, Freed(room))
        elif state == "published" and self.pick.random() < 0.2:
            self.leases[room] = "failed"
            self.events.append(LandingFailed(room, FAILURE))
        else:
            # A landing may race with an abort: the doorbell was already on its way.
            self.end(room, Landed(room, first_token=7, digest_checked=True, exposed_s=0.0))

    def end(self, room: int, event) -> None:
        del self.leases[room]
        del self.pages[room]
        self.events.append(event)


class Exporter:
    """Rooms in the hands of a random peer. `reading`: pages that writes may still read."""

    def __init__(self, pick: random.Random) -> None:
        self.pick = pick
        self.rooms: dict[int, str] = {}
        self.reading: dict[int, set[int]] = {}
        self.events: list = []

    def expect(self, request):
        self.rooms[request.room] = "expected"

    def start(self, room, pages, num_tokens):
        self.reading[room] = {page for extent in pages for page in range(extent.first, extent.end)}

    def finish(self, room, first_token):
        if self.rooms.get(room) == "published":
            self.rooms[room] = "finished"

    def abort(self, room, failure):
        if room in self.rooms:
            self.rooms[room] = "aborting"

    def poll(self):
        events, self.events = self.events, []
        return events

    def advance(self) -> None:
        if not self.rooms:
            return
        room = self.pick.choice(sorted(self.rooms))
        state = self.rooms[room]
        if state == "expected":
            self.rooms[room] = "published"
            self.events.append(PublishedSlots(room, 0))
        elif state == "finished":
            self.events.append(SendStarted(room))
            self.end(room, SendDone(room, STATS))
        elif state == "aborting" or self.pick.random() < 0.2:
            self.end(room, SendFailed(room, FAILURE))

    def end(self, room: int, event) -> None:
        del self.rooms[room]
        self.reading.pop(room, None)
        self.events.append(event)


def requests(pick: random.Random, num_rooms: int, num_pages: int):
    """Every third room computes its prompt on decode. Every fifth is, on decode, a fork of the one before it."""
    prompt: list[int] = []
    for room in range(num_rooms, 0, -1):
        stops = frozenset({3}) if pick.random() < 0.5 else frozenset()
        fork_of = room + 1 if room % 5 == FORKED else 0
        prompt = prompt if fork_of else [1] * pick.randint(1, 2 * num_pages + 2)
        deadline = pick.choice([None, None, 30.0])
        sampling = SamplingParams(max_tokens=pick.randint(1, 12), stop_token_ids=stops)
        num_forks = int((room - 1) % 5 == FORKED)
        yield Request(room, prompt, sampling, deadline=deadline, local=room % 3 == 0, fork_of=fork_of, num_forks=num_forks)


def book_of(allocator, caches: bool) -> PageBook:
    return PageBook(allocator, PrefixTree(2), caches=caches)


def check_pages(scheduler, allocator) -> None:
    stats = scheduler.stats()
    assert stats.free_pages + stats.reserved_pages + stats.published_pages + stats.quarantined_pages + stats.running_pages == stats.total_pages
    book = scheduler._book
    assert stats.free_pages == sum(count for _, count in allocator.free_runs()) + book.num_cached - book.num_shared


def complete(scheduler, plan, drawn):
    scheduler.advance(plan)
    scheduler.resolve(plan, drawn)


def written_by(plan):
    """Pages that a launched step writes into."""
    return {slot // 2 for piece in plan.slices for first, count in piece.sequence.pages.runs(piece.start, piece.count, 2)
            for slot in range(first, first + count)}  # fmt: skip


def drive(scheduler, allocator, port, pick, held, depth) -> list:
    """Random requests, aborts, clocks and port events, with up to `depth` steps unread; then everything is allowed to end."""
    pending = list(requests(pick, 14, allocator.num_pages))[::-1]
    events: list = []
    flights = deque()
    for turn in range(1500):
        if pending and pick.random() < 0.3:
            scheduler.add(pending.pop())
        if pick.random() < 0.05:
            scheduler.abort(pick.randint(1, 14), FAILURE)
        if turn > 200 and pick.random() < 0.02:
            scheduler.reap(31.0)
        if pick.random() < 0.6:
            port.advance()
        scheduler.poll()
        plan = scheduler.plan() if len(flights) <= depth else StepPlan()
        assert sum(piece.count for piece in plan.slices) <= 12
        for piece in plan.slices:
            assert piece.sequence.num_computed == piece.start
            assert piece.sequence.pages.num_pages * 2 >= piece.start + piece.count
        free = {page for first, count in allocator.free_runs() for page in range(first, first + count)}
        assert not free & set().union(*held(port).values()), "a page is free although a peer may still use it"
        cached = set(scheduler._book._tree._owned) if scheduler._book._tree is not None else set()
        assert not cached & free, "a page of the cache is free as well"
        assert not cached & written_by(plan), "a step writes into a page that others may find"
        if isinstance(scheduler, DecodeScheduler):
            assert not cached & set().union(*held(port).values()), "a peer may write into a page that others may find"
            assert not cached & set().union(*(pages for _, pages in flights)), "a launched step still writes into a page that others may find"
            assert not free & set().union(*(pages for _, pages in flights)), "a page is free although a launched step may still write into it"
        for source, target in plan.copies:
            assert source not in free, "a page is copied that may be written by others"
            assert target in written_by(plan) or target not in cached | free, "a page is copied over another's"
        if plan.slices:
            scheduler.advance(plan)
            flights.append((plan, written_by(plan)))
        if flights and (len(flights) > depth or not plan.slices or pick.random() < 0.3):
            oldest, _ = flights.popleft()
            drawn = [pick.choice([2, 3, 4, None]) if pick.random() < 0.1 else 5 for piece in oldest.slices if piece.samples]
            scheduler.resolve(oldest, drawn)
        check_pages(scheduler, allocator)
        events += scheduler.take_events()
        if not pending and scheduler.stats().rooms == 0 and not flights:
            break
    assert scheduler.stats().rooms == 0, "a room never ended"
    assert scheduler.stats().free_pages == allocator.num_pages
    scheduler._book.clear()
    assert allocator.free_runs() == [(0, allocator.num_pages)]
    return events


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(2, 16), depth=st.integers(0, 2), caches=st.booleans())
def test_decode_never_frees_a_page_that_may_be_written(seed, num_pages, depth, caches):
    pick = random.Random(seed)
    allocator = PageAllocator(num_pages)
    importer = Importer(pick)
    scheduler = DecodeScheduler(book_of(allocator, caches), limits(num_pages), importer)
    events = drive(scheduler, allocator, importer, pick, lambda port: port.pages, depth)
    ended = [event.room for event in events if isinstance(event, (Finished, Failed))]
    assert sorted(ended) == list(range(1, 15)), "every room ends exactly once"
    for room in range(1, 15):
        indexes = [event.index for event in events if isinstance(event, Token) and event.room == room]
        first = 0 if room % 3 == 0 or room % 5 == FORKED else 1  # the first token of a prompt that landed came from prefill
        assert indexes == list(range(first, first + len(indexes)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(2, 16), depth=st.integers(0, 2), caches=st.booleans())
def test_prefill_never_frees_a_page_that_may_be_read(seed, num_pages, depth, caches):
    pick = random.Random(seed)
    allocator = PageAllocator(num_pages)
    exporter = Exporter(pick)
    scheduler = PrefillScheduler(book_of(allocator, caches), limits(num_pages), exporter)
    events = drive(scheduler, allocator, exporter, pick, lambda port: port.reading, depth)
    ended = [event.room for event in events if isinstance(event, (Transferred, Failed))]
    assert sorted(ended) == list(range(1, 15)), "every room ends exactly once"
    tokens = [event.room for event in events if isinstance(event, Token)]
    assert len(tokens) == len(set(tokens))
    assert {event.room for event in events if isinstance(event, Transferred)} <= set(tokens)


@pytest.mark.parametrize("growth_tokens", [0, 8])
def test_admission_counts_growth_and_what_is_in_transfer(growth_tokens):
    allocator = PageAllocator(12)
    importer = Importer(random.Random(0))
    scheduler = DecodeScheduler(PageBook(allocator), limits(12, growth_tokens=growth_tokens), importer)
    for room in (1, 2, 3):
        scheduler.add(Request(room, [1] * 8, SamplingParams(max_tokens=8)))
    scheduler.plan()
    assert sorted(importer.leases) == ([1, 2, 3] if growth_tokens == 0 else [1]), "8 tokens of answer are 4 pages for each"


def test_a_retracted_sequence_goes_before_new_requests():
    allocator = PageAllocator(8)
    importer = Importer(random.Random(0))
    scheduler = DecodeScheduler(PageBook(allocator), limits(8, growth_tokens=0), importer)
    for room in (1, 2):
        scheduler.add(Request(room, [1] * 6, SamplingParams(max_tokens=10)))
    scheduler.plan()
    for room in (1, 2):
        importer.end(room, Landed(room, 5, digest_checked=False, exposed_s=0.0))
    scheduler.poll()
    for _ in range(40):
        plan = scheduler.plan()
        complete(scheduler, plan, [5 for piece in plan.slices if piece.samples])
        if scheduler.stats().extra["retractions"]:
            break
    assert scheduler.stats().extra["retractions"] == 1
    scheduler.add(Request(3, [1] * 2, SamplingParams(max_tokens=10)))
    finished = []
    for _ in range(80):
        plan = scheduler.plan()
        if {piece.sequence.room for piece in plan.slices} == {2}:
            break
        assert not importer.leases, "room 3 fits into what is free, but room 2 was here before"
        complete(scheduler, plan, [5 for piece in plan.slices if piece.samples])
        finished += [event.room for event in scheduler.take_events() if isinstance(event, Finished)]
    assert finished == [1]
    assert plan.slices[0].start == 0
    assert plan.slices[0].count == len(plan.slices[0].sequence.tokens)


@pytest.mark.parametrize("first_token", [50, 2**31 - 1, -1])
def test_a_first_token_that_the_model_has_not_ends_its_room_only(first_token):
    allocator = PageAllocator(16)
    importer = Importer(random.Random(0))
    scheduler = DecodeScheduler(PageBook(allocator), limits(16), importer)
    for room in (1, 2):
        scheduler.add(Request(room, [1] * 6, SamplingParams(max_tokens=10)))
    scheduler.plan()
    importer.end(1, Landed(1, first_token, digest_checked=False, exposed_s=0.0))
    importer.end(2, Landed(2, 49, digest_checked=False, exposed_s=0.0))
    scheduler.poll()
    failed = [event for event in scheduler.take_events() if isinstance(event, Failed)]
    assert [(event.room, event.failure.code, event.failure.origin, event.failure.cause) for event in failed] == [
        (1, "DATA_LOSS", "prefill", "no_such_token")
    ]
    assert str(first_token) in failed[0].failure.message
    plan = scheduler.plan()
    assert [piece.sequence.room for piece in plan.slices] == [2]
    check_pages(scheduler, allocator)


def local_request(room: int, num_prompt: int, max_tokens: int = 20) -> Request:
    return Request(room, [1] * num_prompt, SamplingParams(max_tokens=max_tokens), local=True)


def test_a_prompt_computed_on_decode_makes_the_answers_wait_for_a_bounded_time():
    """Its chunks stand behind the decode rows of their steps; alone it may have the whole step."""
    scheduler = DecodeScheduler(PageBook(PageAllocator(40)), limits(40, growth_tokens=0, mixed_prompt_tokens=3), Importer(random.Random(0)))
    scheduler.add(local_request(1, 8))
    plan = scheduler.plan()
    assert [(piece.count, piece.samples) for piece in plan.slices] == [(8, True)]
    complete(scheduler, plan, [5])
    scheduler.add(local_request(2, 10))
    chunks = []
    for _ in range(4):
        plan = scheduler.plan()
        assert plan.slices[0].sequence.room == 1
        assert plan.slices[0].count == 1
        chunks.append(plan.slices[1].count)
        assert scheduler.stats().extra["pending_prompt_tokens"] == 10 - sum(chunks[:-1]) if len(chunks) < 4 else True
        complete(scheduler, plan, [5 for piece in plan.slices if piece.samples])
    assert chunks == [3, 3, 3, 1]
    stats = scheduler.stats()
    assert stats.extra["local_prefills"] == 2
    assert stats.extra["pending_prompt_tokens"] == 0
    events = scheduler.take_events()
    assert [type(event).__name__ for event in events if event.room == 2] == ["Reserved", "PrefillStarted", "Token"]


def test_a_prompt_of_decodes_own_waits_for_pages_in_the_same_line():
    """No page is promised twice: what is in transfer counts, and so does what this prompt's answer will want."""
    allocator = PageAllocator(12)
    importer = Importer(random.Random(0))
    scheduler = DecodeScheduler(PageBook(allocator), limits(12, growth_tokens=8), importer)
    scheduler.add(Request(1, [1] * 8, SamplingParams(max_tokens=8)))
    scheduler.add(local_request(2, 8, max_tokens=8))
    assert not scheduler.plan().slices
    assert sorted(importer.leases) == [1]
    assert scheduler.stats().extra["pending_prompt_tokens"] == 8
    scheduler.abort(2, FAILURE)
    assert scheduler.stats().extra["pending_prompt_tokens"] == 0
    check_pages(scheduler, allocator)
