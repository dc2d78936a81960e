"""decide.json: what is written is read back, and what is not of its form is refused with its place."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from decide_records import ONE, copies, idle, record, split, swept

from baton.bench import BenchFileError
from baton.bench.decide import judge, load, save
from baton.bench.decide.record import FILE_NAME, DecideRecord, Server


def full() -> DecideRecord:
    points = (idle("one", 100, 100.0), idle("split-1-1", 100, 120.0, bootstrap_ms=3.0, exposed_ms=1.5, kv_bytes=1e6, transport="sysv"))
    servers = (Server("plain-0", "plain", "cpu:0", ("python", "-m", "x")),)
    found = record((ONE, copies(), split()), swept({"one": 1.0, "copies": 2.0, "split-1-1": 3.0}), idle=points, servers=servers)
    return replace(found, verdict=judge(found), notes=("a note",))


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    found = full()
    path = save(found, tmp_path)
    assert path == tmp_path / FILE_NAME
    assert load(tmp_path) == found
    assert load(path) == found
    assert save(replace(found, cells=()), tmp_path) == path
    assert load(path).cells == ()
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: body | {"version": 99}, "has version 99"),
        (lambda body: body | {"colour": "red"}, "unknown field 'colour'"),
        (lambda body: {name: value for name, value in body.items() if name != "model"}, "lacks the field 'model'"),
        (lambda body: body | {"model": 3}, "decide.json.model is 3"),
        (lambda body: body | {"targets": body["targets"] | {"ttft_ms": "fast"}}, r"decide.json.targets.ttft_ms is 'fast', but must be a number"),
        (lambda body: body | {"topologies": [body["topologies"][0] | {"kind": "ring"}]}, r"topologies\[0\].kind is 'ring', but must be one of one"),
        (lambda body: body | {"cells": {}}, "decide.json.cells is {}, but must be a list"),
        (lambda body: body | {"machine": None}, "decide.json.machine is None, but must be an object"),
    ],
)
def test_what_is_not_a_record_is_refused_with_its_place(tmp_path: Path, change, said: str) -> None:  # type: ignore[no-untyped-def]
    path = save(full(), tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(BenchFileError, match=said):
        load(tmp_path)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(BenchFileError, match="is not JSON"):
        load(tmp_path)
