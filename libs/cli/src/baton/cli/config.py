"""The command's settings that come from the environment. Nothing else in this package reads it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class CliConfig:
    """`cache_dir`: where fetched models, downloads in progress and run folders live (BATON_CACHE_DIR).

    api_key: what a gateway that asks for keys is shown (BATON_API_KEY); a flag would stand in the list of processes.
    """

    cache_dir: Path
    api_key: str = field(default="", repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "CliConfig":
        cache_dir = environment.get("BATON_CACHE_DIR") or "~/.cache/baton"
        return cls(cache_dir=Path(cache_dir).expanduser().absolute(), api_key=environment.get("BATON_API_KEY", ""))


def environment_of_services() -> Mapping[str, str]:
    """What the services that this command starts will find: they inherit it."""
    return os.environ
