"""What each API key has open, against its limits. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from baton.gateway.callers import Caller
from baton.gateway.errors import KeyLimitError

MINUTE_S = 60.0


@dataclass(eq=False, slots=True)
class _Account:
    #: Answers, several of which one request may ask for.
    num_open: int = 0
    tokens: int = 0
    #: When requests of the last minute began, as far as there is a limit to them.
    begun: deque[float] = field(default_factory=deque)


class Shares:
    """All keys' accounts. An anonymous caller has none, and no limit. counters: refusals by cause."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._accounts)

    def open_one(self, caller: Caller, now: float, num_answers: int) -> None:
        account = self._accounts.get(caller.key_id) or _Account()
        self._check(caller, account, now, num_answers)
        self._accounts[caller.key_id] = account
        account.num_open += num_answers
        if caller.limits.requests_per_minute is not None:
            account.begun.append(now)

    def _check(self, caller: Caller, account: _Account, now: float, num_answers: int) -> None:
        limits = caller.limits
        while account.begun and account.begun[0] <= now - MINUTE_S:
            account.begun.popleft()
        if limits.max_concurrent is not None and account.num_open + num_answers > limits.max_concurrent:
            text = f"has {account.num_open} answers open or waiting, this request would add {num_answers}, its limit is {limits.max_concurrent}: "
            text += "send it when others have ended"
            raise self._refused(caller, "key_concurrency", text)
        if limits.requests_per_minute is not None and len(account.begun) >= limits.requests_per_minute:
            wait_s = account.begun[-limits.requests_per_minute] + MINUTE_S - now
            text = f"has begun {len(account.begun)} requests in the last minute, its limit is {limits.requests_per_minute}: wait {wait_s:.1f} s"
            raise self._refused(caller, "key_rate", text, math.floor(wait_s + 1e-6) + 1)

    def _refused(self, caller: Caller, cause: str, text: str, retry_after_s: int = 1) -> KeyLimitError:
        self.counters[cause] += 1
        return KeyLimitError(cause, f"API key {caller.key_id} {text}", retry_after_s)

    def charge(self, caller: Caller, num_tokens: int) -> None:
        account, limit = self._accounts[caller.key_id], caller.limits.tokens_in_flight
        if limit is not None and account.tokens + num_tokens > limit:
            text = f"has {account.tokens} tokens open or waiting, this request would add {num_tokens} (prompt and max_tokens), its limit is {limit}: "
            text += "lower max_tokens or wait" if num_tokens <= limit else "lower max_tokens or shorten the prompt"
            raise self._refused(caller, "key_tokens", text)
        account.tokens += num_tokens

    def close_one(self, caller: Caller, num_answers: int, tokens: int) -> None:
        account = self._accounts[caller.key_id]
        account.num_open -= num_answers
        account.tokens -= tokens
        self._forget_idle(caller.key_id)

    def _forget_idle(self, key_id: str) -> None:
        account = self._accounts[key_id]
        if not account.num_open and not account.begun:
            del self._accounts[key_id]


class Share:
    """One request's part of its key's account: `begin`, `add_tokens`, `end`, which is idempotent and may come without the others."""

    def __init__(self, shares: Shares, caller: Caller) -> None:
        self._shares = shares
        self._caller = caller
        self._tokens = 0
        self._num_answers = 0  # none: not open

    def begin(self, now: float, num_answers: int = 1) -> None:
        """One more request. `now`: time.monotonic(), seconds. num_answers: all of them count until the request ends. Raises KeyLimitError."""
        if self._caller.key_id:
            self._shares.open_one(self._caller, now, num_answers)
            self._num_answers = num_answers

    def add_tokens(self, num_tokens: int) -> None:
        """Prompt and max_tokens, once they are known. Raises KeyLimitError."""
        if self._num_answers:
            self._shares.charge(self._caller, num_tokens)
            self._tokens += num_tokens

    def end(self) -> None:
        if self._num_answers:
            num_answers, self._num_answers = self._num_answers, 0
            self._shares.close_one(self._caller, num_answers, self._tokens)
