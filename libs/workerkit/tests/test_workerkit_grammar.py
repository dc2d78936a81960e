"""Rooms that are held to a grammar: compiled beside the event loop and before the engine hears of the room, in the order of their coming."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, decoders, models

from baton.engine.grammar import MAX_GRAMMAR_BYTES, Grammars
from baton.engine.types import Role
from baton.wire.v1 import common_pb2, worker_pb2
from baton.workerkit.errors import RefusedError
from baton.workerkit.intake import Limits, take

DIGITS = "start: /[0-9]+/"


@pytest.fixture
def tokenizer(tmp_path: Path) -> None:
    """In the bench's folder."""
    made = Tokenizer(models.BPE(vocab={"<end>": 0, **{str(number): number + 1 for number in range(10)}}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))


def held(text: str, **more: Any) -> dict[str, Any]:
    return {"sampling": worker_pb2.Sampling(grammar=text, **more)}


@pytest.mark.usefixtures("tokenizer")
async def test_a_grammar_reaches_the_engine_compiled(bench: Any, gateway_type: Any) -> None:
    async with gateway_type(bench) as gateway:
        for room in (1, 2):
            await gateway.start(room, **held(DIGITS))
            assert (await gateway.read_until(room, "finished")).finished.completion_tokens == 3
        assert bench.front.describe().sampling_level >= 2


@pytest.mark.usefixtures("tokenizer")
async def test_rooms_of_one_grammar_come_in_their_order_and_others_do_not_wait(
    bench: Any, gateway_type: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a grammar is compiled the event loop goes on. A room that was ended meanwhile is told so, and never reaches the engine."""
    go_on = threading.Event()
    compile_now = Grammars.compile

    def slow(self: Grammars, text: str) -> Any:
        made = compile_now(self, text)  # from here on it is known to others
        go_on.wait()
        return made

    monkeypatch.setattr(Grammars, "compile", slow)
    bench.engine.hold = True
    try:
        async with gateway_type(bench) as gateway:
            await gateway.start(1, **held(DIGITS))
            await gateway.start(2, **held(DIGITS))
            await gateway.start(3, **held(DIGITS))
            await gateway.start(4)
            await eventually(lambda: list(bench.engine.requests) == [4])
            await gateway.send(abort=worker_pb2.Abort(room=2, failure=common_pb2.Failure(code=1, origin=common_pb2.ORIGIN_CLIENT, cause="gone")))
            await eventually(lambda: bench.engine.aborted != [])
            go_on.set()
            await eventually(lambda: list(bench.engine.requests) == [4, 1, 3])
            assert (await gateway.read_until(2, "failed")).failed.cause == "gone"
            ours = [bench.engine.requests[room].sampling.grammar for room in (1, 3)]
            assert None not in ours
            assert ours[0] is not ours[1]
    finally:
        go_on.set()


@pytest.mark.usefixtures("tokenizer")
async def test_what_cannot_be_compiled_is_refused_before_the_engine(bench: Any, gateway_type: Any) -> None:
    """It is quoted to its client, and to nobody else: neither the log nor the room's other half has a word of it."""
    with capture_logs() as lines:
        async with gateway_type(bench) as gateway:
            await gateway.start(5, **held("start: nothing"))
            failed = (await gateway.read_until(5, "failed")).failed
    assert (failed.code, failed.origin, failed.cause) == (3, common_pb2.ORIGIN_CLIENT, "grammar_invalid")
    assert "grammar cannot be compiled" in failed.message
    assert "nothing" in failed.message
    assert [(room, failure.cause) for room, failure in bench.refused] == [(5, "grammar_invalid")]
    assert [line["cause"] for line in lines if line["event"] == "room failed"] == ["grammar_invalid"]
    assert "nothing" not in f"{lines} {bench.refused}"
    assert bench.engine.turns == 0 or 5 not in bench.engine.sent


@pytest.mark.usefixtures("tokenizer")
async def test_rules_that_name_one_another_ten_thousand_times(bench: Any, gateway_type: Any) -> None:
    """The library recurses along them: on a thread's usual stack it ends the process."""
    chain = "\n".join(f'r{number}: "1" r{number + 1}' for number in range(10_000))
    async with gateway_type(bench) as gateway:
        await gateway.start(5, **held(f'start: r0\n{chain}\nr10000: "0"'))
        assert (await gateway.read_until(5, "finished")).finished.completion_tokens == 3


async def test_a_server_without_a_tokenizer_says_so(bench: Any, gateway_type: Any) -> None:
    async with gateway_type(bench) as gateway:
        await gateway.start(5, **held(DIGITS))
        failed = (await gateway.read_until(5, "failed")).failed
        assert "tokenizer.json" in failed.message
        assert failed.cause == "unsupported"
        await gateway.start(6)
        await gateway.read_until(6, "finished")


@pytest.mark.parametrize(
    ("sampling", "part"),
    [({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, f"the limit is {MAX_GRAMMAR_BYTES}"), ({"grammar": DIGITS, "min_tokens": 1}, "min_tokens=1")],
)
def test_bounds(sampling: dict[str, Any], part: str) -> None:
    start = worker_pb2.Start(room=5, prompt_token_ids=[1], sampling=worker_pb2.Sampling(top_p=1, max_tokens=4, **sampling))
    start.plain.SetInParent()
    with pytest.raises(RefusedError, match=part):
        take(start, Limits(Role.PLAIN, 10, 64, 4, 16), 0.0)
