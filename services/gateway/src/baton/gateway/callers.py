"""Who asks: clients by their API keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.errors import ForbiddenError, UnauthenticatedError
from baton.servicekit import ApiKeys, KeyLimits, KeyRole, Watched, get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """key_id: names the key in logs; empty where no keys are asked for. limits: with every default filled in; None: no limit."""

    key_id: str
    limits: KeyLimits


ANONYMOUS = Caller("", KeyLimits())


class Doorkeeper:
    """Knows callers by the `authorization` of their requests. Without keys everybody is the same anonymous caller.

    defaults: the limits of keys that have none of their own. counters: "accepted" and the causes of refusals, each of which is logged.
    """

    def __init__(self, keys: Watched[ApiKeys] | None, defaults: KeyLimits = KeyLimits()) -> None:  # noqa: B008 # frozen
        self._keys = keys
        self._defaults = defaults
        self.counters: Counter[str] = Counter()

    def client(self, authorization: Sequence[str]) -> Caller:
        """Who runs a request. authorization: the values of that header. Raises UnauthenticatedError, ForbiddenError."""
        return self._counted(authorization, KeyRole.CLIENT)

    def require_admin(self, authorization: Sequence[str]) -> Caller:
        """Who changes the fleet. Raises UnauthenticatedError, ForbiddenError; without a file of keys nobody is an operator."""
        return self._counted(authorization, KeyRole.ADMIN)

    def operator(self, authorization: Sequence[str]) -> Caller:
        """Who reads the fleet: operators, and everybody where no keys are asked for. Raises UnauthenticatedError, ForbiddenError."""
        return self._counted(authorization, KeyRole.CLIENT if self._keys is None else KeyRole.ADMIN)

    @property
    def asks_for_keys(self) -> bool:
        return self._keys is not None

    def knows(self, authorization: Sequence[str]) -> bool:
        """Whether `client` would let this caller in. Not counted: probes have no key, and do nothing wrong."""
        try:
            self._caller(authorization, KeyRole.CLIENT)
        except (UnauthenticatedError, ForbiddenError):
            return False
        return True

    def watches_as_operator(self, authorization: Sequence[str]) -> bool:
        """Whether a caller who may watch is told what operators are: all are where no keys are asked for. Raises UnauthenticatedError."""
        if self._keys is None:
            return True
        try:
            self._caller(authorization, KeyRole.ADMIN)
        except ForbiddenError:  # a key of this gateway's, of the other role
            return False
        except UnauthenticatedError as error:
            self._note_refused(error)
            raise
        return True

    def _counted(self, authorization: Sequence[str], role: KeyRole) -> Caller:
        try:
            caller = self._caller(authorization, role)
        except (UnauthenticatedError, ForbiddenError) as error:
            self._note_refused(error)
            raise
        if caller.key_id:
            self.counters["accepted"] += 1
        return caller

    def _note_refused(self, error: UnauthenticatedError | ForbiddenError) -> None:
        self.counters[error.cause] += 1
        log.info("caller refused", code=error.code.name, cause=error.cause, reason=str(error))

    def _caller(self, authorization: Sequence[str], role: KeyRole) -> Caller:
        if self._keys is None and role is KeyRole.ADMIN:
            raise ForbiddenError(
                "this gateway has no keys, so nobody may change its fleet: `baton key new --role admin --file KEYS` makes an operator's, "
                "then start the gateway with --api-key-file KEYS (clients need keys then, too)"
            )
        if self._keys is None:
            return ANONYMOUS
        key = self._keys.value.find(_token(authorization))
        if key is None:
            raise UnauthenticatedError("the API key is none of this gateway's: it is wrong, or was withdrawn")
        if key.role is not role:
            raise ForbiddenError(f"API key {key.id} is of role {key.role.value}, this needs one of role {role.value}")
        own, defaults = key.limits, self._defaults
        limits = KeyLimits(
            own.max_concurrent or defaults.max_concurrent,
            own.requests_per_minute or defaults.requests_per_minute,
            own.tokens_in_flight or defaults.tokens_in_flight,
            own.weight,
        )
        return Caller(key.id, limits)


def _token(authorization: Sequence[str]) -> str:
    """Never part of a message: it may be somebody's key for another house. Raises UnauthenticatedError."""
    if not authorization:
        raise UnauthenticatedError("this gateway asks for an API key: send the header `Authorization: Bearer <key>`", "key_missing")
    scheme, _, token = authorization[0].strip().partition(" ")
    if len(authorization) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError("the authorization header is not one `Bearer <key>`", "key_malformed")
    return token.strip()
