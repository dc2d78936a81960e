"""Files that change while a service runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.servicekit import SecretFileError, Watched, watch_secrets


def secrets(values: Sequence[bytes]) -> list[bytes]:
    if not values:
        raise ValueError("there is no secret in it")
    return list(values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "secrets"
    path.write_text("# made for a test\n\n  first \nsecond\n")
    return path


def watched(path: Path) -> Watched[list[bytes]]:
    return watch_secrets("--some-file", path, secrets)


def test_comments_and_blanks_are_no_secrets(path: Path) -> None:
    assert watched(path).value == [b"first", b"second"]


def test_a_change_is_taken_once_it_has_settled(path: Path) -> None:
    file = watched(path)
    assert not file.refresh()
    path.write_text("third\n")
    assert not file.refresh()  # it may still be being written
    assert file.value == [b"first", b"second"]
    assert file.refresh()
    assert file.value == [b"third"]
    assert not file.refresh()
    assert file.counters == {"reloaded": 1}


def test_a_file_that_grows_at_every_look_is_not_read_half(path: Path) -> None:
    file = watched(path)
    for number in range(5):
        with path.open("a") as out:
            out.write(f"more-{number}\n")
        assert not file.refresh()
    assert file.refresh()
    assert len(file.value) == 7


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_text("# nothing\n"), lambda path: path.unlink(), lambda path: path.write_bytes(b"\xff\xfe")]
)
def test_a_file_that_cannot_be_used_leaves_the_old_value_and_is_counted(path: Path, spoil, caplog: pytest.LogCaptureFixture) -> None:
    file = watched(path)
    spoil(path)
    for _ in range(4):
        assert not file.refresh()
    assert file.value == [b"first", b"second"]
    assert file.counters == {"reload_failed": 1}  # said once, not at every look
    assert "--some-file" in file.problem
    path.write_text("mended\n")
    file.refresh()
    assert file.refresh()
    assert (file.value, file.problem) == ([b"mended"], "")


def test_links_that_are_swapped_as_kubernetes_does_are_seen(tmp_path: Path) -> None:
    for name, text in (("one", "first\n"), ("two", "other\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "secrets").write_text(text)
    (tmp_path / "data").symlink_to("one")
    file = watched(tmp_path / "data" / "secrets")
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(tmp_path / "data")
    file.refresh()
    assert file.refresh()
    assert file.value == [b"other"]


def test_the_start_needs_a_file_that_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(SecretFileError, match=r"--some-file=.*No such file"):
        watched(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xffsecret")
    with pytest.raises(SecretFileError) as caught:
        watched(tmp_path / "binary")
    assert "secret'" not in repr(caught.value.__cause__)


async def test_the_clock_looks_by_itself(path: Path) -> None:
    file = watched(path)
    clock = asyncio.create_task(file.run(0.01))
    await asyncio.to_thread(path.write_text, "by the clock\n")
    async with asyncio.timeout(10):
        while file.value != [b"by the clock"]:  # noqa: ASYNC110 # what is waited for has no event
            await asyncio.sleep(0.01)
    clock.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await clock
