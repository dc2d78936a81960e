"""From plain options to a workload."""

from dataclasses import dataclass
from pathlib import Path

from baton.bench.errors import SettingError, require
from baton.bench.workload.base import Workload
from baton.bench.workload.chat import ChatWithDocuments
from baton.bench.workload.fixed import FixedLengths
from baton.bench.workload.mooncake import MooncakeTrace
from baton.bench.workload.sharegpt import ShareGPT
from baton.bench.workload.turns import MultiTurn

NAMES = ("chat", "fixed", "sharegpt", "mooncake", "turns")


@dataclass(frozen=True)
class WorkloadOptions:
    """What a command line says; None takes the workload's own default. An option that the workload does not have is refused."""

    name: str = "chat"
    seed: int = 0
    path: Path | None = None
    prompt_words: int | None = None
    answer_tokens: int | None = None
    document_words: int | None = None
    document_share: float | None = None
    num_sessions: int | None = None
    num_turns: int | None = None
    shared_words: int | None = None
    length_scale: float | None = None


#: Option -> field, a workload each.
FIELDS: dict[str, dict[str, str]] = {
    "chat": {option: option for option in ("answer_tokens", "document_words", "document_share")} | {"prompt_words": "chat_words"},
    "fixed": {option: option for option in ("answer_tokens", "prompt_words")},
    "turns": {option: option for option in ("answer_tokens", "num_sessions", "num_turns", "shared_words")} | {"prompt_words": "turn_words"},
    "sharegpt": {"path": "path"},
    "mooncake": {"path": "path", "length_scale": "length_scale"},
}


def build_workload(options: WorkloadOptions) -> Workload:
    """Raises SettingError for an unknown name, a value out of range or an option that is not this workload's; and what its file raises."""
    if options.name not in NAMES:
        raise SettingError(f"workload is {options.name!r}, but must be one of {', '.join(NAMES)}")
    require(options.seed >= 0, "seed", options.seed, "at least 0")
    given = {name: value for name, value in vars(options).items() if name not in ("name", "seed") and value is not None}
    fields = FIELDS[options.name]
    for option, value in given.items():
        if option not in fields:
            raise SettingError(f"{option} is {value!r}, but the workload {options.name!r} has no such option; it has {', '.join(sorted(fields))}")
    if options.name in ("sharegpt", "mooncake"):
        return _from_file(options)
    numbers = {fields[option]: value for option, value in given.items()}
    makers = {"chat": ChatWithDocuments, "fixed": FixedLengths, "turns": MultiTurn}
    workload: Workload = makers[options.name](options.seed, **numbers)
    return workload


def _from_file(options: WorkloadOptions) -> Workload:
    if options.path is None:
        raise SettingError(f"path is not given, but the workload {options.name!r} reads a file: name it with --file")
    if options.name == "sharegpt":
        return ShareGPT.load(options.path, options.seed)
    return MooncakeTrace.load(options.path, options.seed, 1.0 if options.length_scale is None else options.length_scale)
