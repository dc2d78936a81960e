"""Keys of clients: made, kept as hashes in a file, and found again in constant time.

A line of the file:   <id> <role> sha256:<hex> [max_concurrent=N] [requests_per_minute=N] [tokens_in_flight=N] [weight=X]

SHA-256 and not a password hash: a key is 256 random bits, which nobody guesses however fast the hash is, and it is checked at every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from baton.servicekit.errors import SecretFileError
from baton.servicekit.secret_file import read_lines
from baton.servicekit.watched import Watched

_KEY = re.compile(r"baton-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_LINE = re.compile(r"([0-9a-f]{12})\s+(\w+)\s+sha256:([0-9a-f]{64})((?:\s+\w+=\S+)*)")

#: Compared with where there is no such id: an unknown id takes as long as a wrong secret.
_NOBODY = bytes(32)


class KeyRole(Enum):
    """What a key opens. They are apart on purpose: an operator's key does not run requests, a client's does not change the fleet."""

    CLIENT = "client"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may have at once and in a minute; None: what the service's settings say.

    max_concurrent: answers, of which one request may ask for several. weight: its share beside other keys' that wait.
    """

    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_in_flight: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the file. `id` names the key in logs and metrics and opens nothing."""

    id: str
    role: KeyRole
    digest: bytes = field(repr=False)
    limits: KeyLimits = KeyLimits()

    def line(self) -> str:
        limits = self.limits
        numbers = {name: getattr(limits, name) for name in ("max_concurrent", "requests_per_minute", "tokens_in_flight")}
        extra = [f"{name}={value}" for name, value in numbers.items() if value is not None]
        if limits.weight != 1.0:
            extra.append(f"weight={limits.weight:g}")
        return " ".join([self.id, self.role.value, f"sha256:{self.digest.hex()}", *extra])


def new_key(role: KeyRole, limits: KeyLimits | None = None) -> tuple[str, ApiKey]:
    """(the key, which is shown once and kept nowhere; what is kept of it)."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return f"baton-{key_id}-{secret}", ApiKey(key_id, role, _digest(secret), limits or KeyLimits())


class ApiKeys:
    """The keys of one file."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = {key.id: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys.values())

    def find(self, presented: str) -> ApiKey | None:
        """The key that this text is; None when it is none of them. Takes as long for a wrong secret as for an unknown id."""
        shape = _KEY.fullmatch(presented)
        if shape is None:
            return None
        found = self._keys.get(shape[1])
        same = hmac.compare_digest(_digest(shape[2]), _NOBODY if found is None else found.digest)
        return found if same else None


def watch_api_keys(flag: str, path: Path) -> Watched[ApiKeys]:
    """The keys of the file, read again when it changes. Raises SecretFileError."""
    return Watched(f"keys of {flag}", [path], lambda: read_api_keys(flag, path))


def read_api_keys(flag: str, path: Path) -> ApiKeys:
    """Raises SecretFileError with the number of the line that is wrong. A file without keys is right: nobody gets in."""
    keys: dict[str, ApiKey] = {}
    for number, line in read_lines(flag, path):
        try:
            key = parse_line(line)
            if key.id in keys:
                raise ValueError(f"id {key.id} is there twice")
        except ValueError as error:
            raise SecretFileError(f"{flag}={str(path)!r}, line {number}: {error}; `baton key new` writes such lines") from error
        keys[key.id] = key
    return ApiKeys(keys.values())


def parse_line(line: str) -> ApiKey:
    """Raises ValueError, which never quotes the line: somebody may have put a key itself there."""
    shape = _LINE.fullmatch(line)
    if shape is None:
        raise ValueError("it is not <id> <role> sha256:<hex> and limits such as max_concurrent=4")
    key_id, role, digest, extra = shape.groups()
    if role not in {known.value for known in KeyRole}:
        raise ValueError(f"role {role!r} is none of {', '.join(known.value for known in KeyRole)}")
    return ApiKey(key_id, KeyRole(role), bytes.fromhex(digest), _limits(dict(part.split("=", 1) for part in extra.split())))


def _limits(given: dict[str, str]) -> KeyLimits:
    numbers: dict[str, int] = {}
    for name in ("max_concurrent", "requests_per_minute", "tokens_in_flight"):
        text = given.pop(name, None)
        if text is None:
            continue
        if not (text.isascii() and text.isdecimal() and int(text) >= 1):
            raise ValueError(f"{name}={text!r} is no whole number of at least 1")
        numbers[name] = int(text)
    weight = given.pop("weight", "1")
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", weight) or not 0.001 <= float(weight) <= 1000:
        raise ValueError(f"weight={weight!r} is outside [0.001, 1000]")
    if given:
        raise ValueError(f"{', '.join(given)}: no such limit")
    return KeyLimits(**numbers, weight=float(weight))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(b"baton api key\0" + secret.encode()).digest()
