"""What can go wrong in this package, as one tree.

Failures of a single request are not exceptions: they are `Failed` events, because the other requests of the step go on.
"""

from __future__ import annotations

from pathlib import Path


class EngineError(Exception):
    """Anything this package raises on purpose."""


class InvalidSettingError(EngineError, ValueError):
    """A setting of the engine is out of range, or two of them do not fit together."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} = {value!r}: {limit}")
        self.field = field


class DuplicateRoomError(EngineError, ValueError):
    """The caller's mistake: room ids are single use, and this one is still open."""

    def __init__(self, room: int) -> None:
        super().__init__(f"room {room} is already open in this engine; room ids are single use")
        self.room = room


class ModelFolderError(EngineError):
    """The model folder cannot be served; the message names the file and what was expected."""

    def __init__(self, file: Path, message: str) -> None:
        super().__init__(f"{file}: {message}")
        self.file = file


class ModelConfigError(ModelFolderError):
    """config.json is missing, unreadable, or describes a model that this engine does not run. field: where one is to blame."""

    def __init__(self, file: Path, message: str, field: str | None = None) -> None:
        super().__init__(file, message)
        self.field = field


class WeightsError(ModelFolderError):
    """A weight file is missing or unreadable, or a tensor in it is missing or misshapen."""


class BufferTooSmallError(EngineError, ValueError):
    """The memory handed in cannot hold the KV pool."""


class InsufficientMemoryError(EngineError):
    """Weights, KV pool and workspace together do not fit; the message has every number and says which setting to lower."""


class RankFailedError(EngineError):
    """One rank of a tensor-parallel engine failed (its error is the cause); the engine is lost with all its ranks."""

    def __init__(self, rank: int, size: int, error: BaseException) -> None:
        super().__init__(f"rank {rank} of {size}: {type(error).__name__}: {error}")
        self.rank = rank


class RanksDisagreeError(EngineError):
    """Two ranks drew different tokens from what must have been the same logits."""

    def __init__(self, rank: int, drawn: list[int | None], first: list[int | None]) -> None:
        super().__init__(f"rank {rank} drew {drawn[:8]} where rank 0 drew {first[:8]} (the first eight of {len(first)})")
