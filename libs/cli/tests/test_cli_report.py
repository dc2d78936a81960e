"""The report's rows: pure arithmetic on what the gateway sent."""

import io

import pytest
from rich.console import Console

from baton.cli.report import BAR_COLUMNS, bar, facts, print_report, state_rows
from baton.wire.v1 import common_pb2, inference_pb2


@pytest.fixture
def report() -> inference_pb2.RoomReport:
    states = [
        (common_pb2.ROOM_STATE_BOOTSTRAPPING, 0.0, 5.0),
        (common_pb2.ROOM_STATE_WAITING, 5.0, 15.0),
        (common_pb2.ROOM_STATE_TRANSFERRING, 20.0, 20.0),
        (common_pb2.ROOM_STATE_SUCCESS, 40.0, 160.0),
    ]
    return inference_pb2.RoomReport(
        room=77,
        prefill_instance="prefill-1",
        decode_instance="decode-1",
        states=[inference_pb2.StateSpan(state=state, start_ms=start, duration_ms=duration) for state, start, duration in states],
        transfer=inference_pb2.TransferReport(
            transport="shm", bytes=8_000_000, puts=60, duration_ms=40.0, busy_ms=4.0, exposed_ms=0.5, digest_checked=True
        ),
        ttft_ms=21.0,
        prefill_started_ms=5.5,
        mean_itl_ms=9.5,
        total_ms=200.0,
        usage=inference_pb2.Usage(prompt_tokens=31, completion_tokens=9),
    )


def test_every_state_has_its_time_and_its_place_on_the_line(report: inference_pb2.RoomReport) -> None:
    rows = state_rows(report)
    assert [(row.name, row.start_ms, row.duration_ms) for row in rows] == [
        ("BOOTSTRAPPING", 0, 5),
        ("WAITING", 5, 15),
        ("TRANSFERRING", 20, 20),
        ("SUCCESS", 40, 160),
    ]
    assert [(len(row.bar) - len(row.bar.lstrip()), row.bar.count("#")) for row in rows] == [(0, 1), (1, 3), (4, 4), (8, 32)]


@pytest.mark.parametrize(("start_ms", "duration_ms", "total_ms"), [(0, 0, 0), (0, 0, 1), (1, 0, 1), (5, 9, 1), (0.5, 1e9, 1)])
def test_a_bar_stays_on_its_line(start_ms: float, duration_ms: float, total_ms: float) -> None:
    assert len(bar(start_ms, duration_ms, total_ms)) <= BAR_COLUMNS


def test_facts_carry_units_and_the_rate(report: inference_pb2.RoomReport) -> None:
    named = dict(facts(report))
    assert named["KV bytes moved"] == "8,000,000 (7.63 MiB)"
    assert named["writing"] == "4.00 ms, 2.00 GB/s"
    assert named["first put to flush"] == "40.00 ms (the prefill runs meanwhile)"
    assert (named["puts"], named["transport"], named["TTFT"], named["mean ITL"]) == ("60", "shm", "21.0 ms", "9.50 ms")
    assert named["digest"] == "equal on both sides"
    assert named["prefill began after"] == "5.5 ms"
    report.ClearField("prefill_started_ms")
    assert "prefill began after" not in dict(facts(report))


def test_what_was_not_measured_is_said(report: inference_pb2.RoomReport) -> None:
    report.transfer.busy_ms = 0
    report.transfer.digest_checked = False
    report.usage.completion_tokens = 1
    named = dict(facts(report))
    assert named["writing"].startswith("0.00 ms, - (no time was measured)")
    assert (named["digest"], named["mean ITL"]) == ("not checked", "- (one token)")
    report.ClearField("transfer")
    assert dict(facts(report))["KV moved"].startswith("none")


def test_without_a_terminal_it_is_plain_text(report: inference_pb2.RoomReport) -> None:
    out = io.StringIO()
    print_report(Console(file=out), report)
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert all(line == line.rstrip() for line in lines)
    assert any(line.split()[:3] == ["TRANSFERRING", "20.0", "20.0"] for line in lines)
    assert any(line.split() == ["KV", "bytes", "moved", "8,000,000", "(7.63", "MiB)"] for line in lines)


def test_failed_attempts_and_what_they_cost_are_told(report: inference_pb2.RoomReport) -> None:
    assert not any("attempt" in name or "recomputed" in name for name in dict(facts(report)))
    failure = common_pb2.Failure(cause="decode_lost", origin=common_pb2.ORIGIN_DECODE, stage=common_pb2.ROOM_STATE_SUCCESS, elapsed_ms=812)
    report.failed_attempts.add(room=76, prefill_instance="prefill-1", decode_instance="decode-2", failure=failure, tokens_sent=12)
    report.recomputed_tokens = 43
    report.prefilled_on_decode = True
    report.ClearField("transfer")
    named = dict(facts(report))
    assert named["failed attempt 1"] == "decode_lost (decode in SUCCESS) on prefill-1 and decode-2 after 12 tokens, 812 ms"
    assert named["tokens recomputed"] == "43"
    assert named["KV moved"] == "none (the decode server computed the prompt itself)"
