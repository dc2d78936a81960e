"""Identity of one run of one process: a restart on the same address is somebody else."""

from __future__ import annotations

import re
import secrets

_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def new_instance_id(service: str) -> str:
    """A fresh id such as "prefill-1f0c9a7be21d"; never reused, so that peers drop what they knew about an earlier run."""
    return f"{service}-{secrets.token_hex(6)}"


def check_instance_id(value: str) -> str:
    """`value` if it can be an instance id (1 to 63 letters, digits, dots, dashes, underscores), else ValueError."""
    if not _PATTERN.fullmatch(value):
        raise ValueError("an instance id has 1 to 63 letters, digits, '.', '-' or '_' and starts with a letter or digit")
    return value
