"""`baton top` without a gateway: what it makes of the feed, and what it draws in a terminal of any size."""

import asyncio
import json
import os
import pty
from typing import Any

import pytest
from rich.console import Console

from baton.cli.top import keys
from baton.cli.top.command import moved
from baton.cli.top.known import MAX_ENDED, Known
from baton.cli.top.screen import Choice, draw, sparks


def request(number: int, **more: Any) -> dict[str, Any]:
    return {
        "n": number, "name": f"{number:08x}", "at": 1000 * number, "prompt": 12, "tokens": 7, "finish": "stop", "ttft": 41.5, "itl": 3.25,
        "total": 61.0, "states": [["WAITING", 1.0, 20.0], ["SUCCESS", 21.0, 40.0]], "servers": ["prefill-1", "decode-1"], "marks": {},
    } | more  # fmt: skip


FAILURE = {"cause": "decode_lost", "origin": "decode", "stage": "TRANSFERRING", "text": "it was lost", "elapsed": 5, "allowed": 0}


def snapshot(kept: int = 2) -> bytes:
    pages = {"total": 64, "free": 16, "reserved": 4, "published": 2, "quarantined": 1}
    server = {"role": "decode", "instance": "decode-1", "state": "in use", "why": "", "rooms": 3, "waiting": 1, "running": 2, "pages": pages}
    return json.dumps(
        {
            "now": 12_000, "unix": 0, "kept": kept, "problems": [], "causes": [["decode", "TRANSFERRING", "decode_lost", 1]],
            "about": {"gateway": "gw", "model": "tiny", "processes": 1, "process": 0, "ready": True, "draining": False, "num_pairs": 1, "away": []},
            "servers": {"a": server | {"address": "10.0.0.1:8004"}},
            "pairs": {"a-b": {"prefill": "prefill-1", "decode": "decode-1", "transport": "rc_mlx5", "gb_per_s": 42.5}},
            "live": {"beef": {"state": "WAITING", "accepted": 9_000, "entered": 10_000, "prompt": 5, "tokens": 0, "servers": ["decode-1"]}},
            "counts": {"states": {"WAITING": 1}, "open": 1, "queued": 0, "max_rooms": 9, "ended": 2, "failed": 1, "refused": 0, "retried": 0},
            "series": {"0": [2, 1, 14, 41.0, 43.0, 3.0, 4.0], "1": [10, 0, 70, 40.0, 99.0, 3.0, 5.0]},
        }
    ).encode()  # fmt: skip


def known() -> Known:
    heard = Known()
    heard.take("snapshot", snapshot())
    heard.take("ended", json.dumps({"ended": [request(1), request(2, failure=FAILURE)]}).encode())
    return heard


def drawn(heard: Known, choice: Choice, width: int = 120, height: int = 40) -> str:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(draw(heard, choice, height))
    return captured.get()


def test_it_is_complete_once_everything_that_is_kept_was_heard() -> None:
    heard = Known()
    assert not heard.complete
    heard.take("snapshot", snapshot(kept=1))
    assert not heard.complete
    heard.take("ended", json.dumps({"ended": [request(1)]}).encode())
    assert heard.complete


def test_deltas_change_what_they_name_and_memory_is_bounded() -> None:
    heard = known()
    delta = {"now": 13_000, "skipped": 0, "ended": [], "live": {"set": {"cafe": {"state": "SUCCESS"}}, "gone": ["beef"]}, "problems": ["one"]}
    heard.take("delta", json.dumps(delta).encode())
    assert heard.sections["live"] == {"cafe": {"state": "SUCCESS"}}
    assert heard.sections["problems"] == ["one"]
    assert heard.sections["counts"]["ended"] == 2
    for number in range(3, 3 + 2 * MAX_ENDED):
        heard.take("delta", json.dumps({"now": 1, "ended": [request(number)], "series": {"set": {str(number): [0] * 7}, "gone": []}}).encode())
    assert len(heard.ended) == MAX_ENDED
    assert heard.newest()[0]["n"] == 2 + 2 * MAX_ENDED
    assert len(heard.sections["series"]) == 60


def test_everything_is_drawn() -> None:
    text = drawn(known(), Choice())
    for word in ("gw", "ready", "decode-1", "10.0.0.1:8004", "16 of 64 free", "1 quarantined", "rc_mlx5 42.50 GB/s", "beef", "waiting", "2.0 req/s"):
        assert word in text, word
    assert "decode_lost (decode)" in text
    assert "p50 40 ms  p99 99 ms" in text


def test_only_failed_ones_and_the_waterfall_of_one() -> None:
    text = drawn(known(), Choice(only_failed=True))
    assert "00000002" in text
    assert "00000001" not in text
    text = drawn(known(), Choice(selected=1, opened=True))
    assert "first token after 41.5 ms, total 61.0 ms" in text
    assert "####" in text
    assert "decode_lost: ended by decode in TRANSFERRING: it was lost" in drawn(known(), Choice(selected=2, opened=True))


@pytest.mark.parametrize(("width", "height"), [(20, 5), (80, 24), (200, 60), (400, 10)])
def test_it_fits_terminals_of_any_size(width: int, height: int) -> None:
    heard = known()
    for number in range(3, 100):
        heard.take("ended", json.dumps({"ended": [request(number)]}).encode())
    lines = drawn(heard, Choice(selected=50), width, height).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    if height >= 24:
        assert len(lines) <= height
        assert any(line.startswith(">") for line in lines)


def test_arrows_move_within_the_list() -> None:
    assert moved([5, 4, 3], None, 1) == 5
    assert moved([5, 4, 3], 5, 1) == 4
    assert moved([5, 4, 3], 5, -1) == 5
    assert moved([5, 4, 3], 3, 1) == 3
    assert moved([9, 8], 3, 1) == 9  # it is no longer kept


def test_sparks_have_a_gap_where_nothing_was() -> None:
    assert sparks([1.0, None, 100.0]) == "▁ █"
    assert sparks([None, None]) == "  "


async def test_keys_come_one_by_one_and_the_terminal_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    import termios

    leader, follower = pty.openpty()
    with os.fdopen(follower, "r", closefd=True) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(terminal)
        heard: asyncio.Queue[str] = asyncio.Queue()
        with keys.pressed(heard.put_nowait):
            for data, name in ((b"\x1b[A", keys.UP), (b"q", "q"), (b"\x1b", keys.ESCAPE), (b"\r", keys.ENTER), (b"\xff", "")):
                os.write(leader, data)
                assert await asyncio.wait_for(heard.get(), 10) == name
        assert termios.tcgetattr(terminal) == before
    os.close(leader)
