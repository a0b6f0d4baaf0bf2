"""Who asks, what they may, and what they have used: one account for each key with a name. Nothing of what was asked."""

from __future__ import annotations

import csv
import hashlib
import hmac
import io
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields

from localllm.errors import LocalLLMError

_MINUTE_S = 60.0
# Whoever has as many requests running as allowed is told to try again after so long: when one ends is not known.
_PARALLEL_RETRY_S = 1


class RateLimitError(LocalLLMError):
    """A key has used up what it may now. `retry_after_s` says when it may go on."""

    code = "rate_limit_exceeded"
    type = "rate_limit_error"
    http_status = 429
    exit_code = 7
    default_hint = "retry after the time given in Retry-After"

    def __init__(
        self, message: str, *, retry_after_s: int = 1, hint: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, param=param)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may at most (None: no limit): requests and tokens (read and written, without those that came from the
    cache) in a minute, and requests at once."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    parallel: int | None = None


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A key by the name of who has it: only the SHA-256 of its text is kept."""

    name: str
    digest: bytes = field(repr=False)
    limits: KeyLimits = field(default_factory=KeyLimits)


def digest_of(key: bytes) -> bytes:
    """What is kept of a key. Keys are long and made up, so a fast hash without salt gives nothing away."""
    return hashlib.sha256(key).digest()


class TokenBucket:
    """What may be used in a minute, filled evenly. What is used beyond it is owed, and waited for."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._size, self._clock = per_minute, clock
        self._left, self._seen_s = per_minute, clock()

    def wait_s(self, amount: float) -> float:
        """How long until `amount` is there (at most the whole of it is waited for), in seconds."""
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._seen_s) * self._size / _MINUTE_S)
        self._seen_s = now
        missing = min(amount, self._size) - self._left
        return 0.0 if missing <= 1e-9 else missing * _MINUTE_S / self._size

    def take(self, amount: float) -> None:
        self.wait_s(0.0)
        self._left -= amount


@dataclass(slots=True)
class KeyUsage:
    """What a key has used since the server started; tokens of its prompts, of those from the cache, and written ones."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Account:
    """One key's limits and usage. `owner`: may see what everybody has used."""

    def __init__(
        self,
        name: str,
        limits: KeyLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        owner: bool = False,
    ) -> None:
        self.name, self.owner, self.used, self.active = name, owner, KeyUsage(), 0
        self.limits = limits or KeyLimits()
        per_minute, tokens = self.limits.requests_per_minute, self.limits.tokens_per_minute
        self._requests = TokenBucket(per_minute, clock) if per_minute is not None else None
        self._tokens = TokenBucket(tokens, clock) if tokens is not None else None

    @contextmanager
    def request(self) -> Iterator[None]:
        """A block in which one request of this key runs. Raises RateLimitError."""
        self._admit()
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def _admit(self) -> None:
        most = self.limits.parallel
        if most is not None and self.active >= most:
            self._refuse(f"{self.name} has {self.active} requests running, and may have {most}", _PARALLEL_RETRY_S)
        if self._requests is not None and (wait_s := self._requests.wait_s(1.0)) > 0:
            self._refuse(f"{self.name} may send {self.limits.requests_per_minute:g} requests a minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0)) > 0:
            self._refuse(f"{self.name} may use {self.limits.tokens_per_minute:g} tokens a minute", wait_s)
        if self._requests is not None:
            self._requests.take(1.0)
        self.used.requests += 1

    def _refuse(self, why: str, wait_s: float) -> None:
        self.used.refused += 1
        raise RateLimitError(why, retry_after_s=max(1, -int(-wait_s // 1)))

    def charge(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        self.used.prompt_tokens += prompt_tokens
        self.used.cached_tokens += cached_tokens
        self.used.completion_tokens += completion_tokens
        if self._tokens is not None:
            self._tokens.take(max(0, prompt_tokens - cached_tokens) + completion_tokens)


_NOBODY = Account("")
# Whose request this task answers; set by the gate.
_CALLER: ContextVar[Account] = ContextVar("localllm-caller", default=_NOBODY)


def caller() -> Account:
    """Whose request this is; an account without a name where keys have none."""
    return _CALLER.get()


@contextmanager
def called_by(account: Account) -> Iterator[None]:
    """A block, and the tasks begun in it, that answer a request of `account`."""
    before = _CALLER.set(account)
    try:
        yield
    finally:
        _CALLER.reset(before)


class Accounts:
    """The accounts of a server: of each named key, and of the one key without a name (its owner's)."""

    def __init__(
        self, keys: Iterable[NamedKey] = (), owner_key: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = [(key.digest, Account(key.name, key.limits, clock)) for key in keys]
        if owner_key is not None:
            self._keys.append((digest_of(owner_key.encode()), Account("", clock=clock, owner=True)))

    def __bool__(self) -> bool:
        """True where a key must be shown."""
        return bool(self._keys)

    def of(self, sent: bytes) -> Account | None:
        """Whose key was sent; None for nobody's. Every key is compared, whichever it is."""
        digest = digest_of(sent)
        found: Account | None = None
        for known, account in self._keys:
            if hmac.compare_digest(digest, known):
                found = account
        return found

    def seen_by(self, account: Account) -> list[Account]:
        """The named accounts whose usage `account` may see: its own, or all of them where it has no name."""
        named = [a for _, a in self._keys if a.name]
        return [a for a in named if a is account] if account.name else named

    def table(self, account: Account) -> str:
        """What they have used, as CSV."""
        out = io.StringIO()
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(("key", "requests", "refused", "prompt_tokens", "cached_tokens", "completion_tokens", "running"))
        for a in self.seen_by(account):
            u = a.used
            rows.writerow(
                (a.name, u.requests, u.refused, u.prompt_tokens, u.cached_tokens, u.completion_tokens, a.active)
            )
        return out.getvalue()


def used_lines(accounts: Iterable[Account]) -> list[str]:
    """What each of `accounts` has used, in Prometheus' text format."""
    found = list(accounts)
    lines: list[str] = []
    for each in fields(KeyUsage):
        metric = f"localllm_key_{each.name}_total"
        lines += [f"# TYPE {metric} counter"] if found else []
        lines += [f'{metric}{{key="{label(a.name)}"}} {getattr(a.used, each.name)}' for a in found]
    return lines


def label(text: str) -> str:
    """`text` as the value of a label in that format."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
