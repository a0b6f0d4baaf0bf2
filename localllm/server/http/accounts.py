"""API keys: the account of each request, its rate limits and its usage. No content of requests is
stored here."""

from __future__ import annotations

import hashlib
import hmac
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Generic, TypeVar

from localllm.errors import AuthError, LocalLLMError
from localllm.server.http.prometheus import labels, metric
from localllm.server.http.recent import RecentlyUsed

_MINUTE_S = 60.0
# Retry-After for a key at its limit of parallel requests. The time when one of them ends is
# unknown.
_PARALLEL_RETRY_S = 1
# Limit of the callers for which `PerCaller` and `Accounts.delegated_account` keep state.
_MAX_CALLERS = 256
_DELEGATED = re.compile(rb"([0-9a-f]{32}) ([0-9a-f]{32}|-) ([01])")
T = TypeVar("T")


class RateLimitError(
    LocalLLMError,
    code="rate_limit_exceeded",
    type="rate_limit_error",
    http_status=429,
    exit_code=7,
    default_hint="retry after the time given in Retry-After",
    default_retry_after_s=1,
):
    """A key is over one of its rate limits."""


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A key with its holder's name. Only the SHA-256 of the key is stored.

    Keys with the same `share_cache` share prefixes in the cache. An `admin` key has the rights of
    the key without a name. A `kv` key may read the KV of prompts (POST /v1/kv). A limit of None
    means no limit. The token limit counts prompt and completion tokens, without the tokens found in
    the prefix cache."""

    name: str
    digest: bytes = field(default=b"", repr=False)
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    parallel: int | None = None
    share_cache: str = ""
    admin: bool = False
    kv: bool = False


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key. Keys are long and random, so a fast hash without salt is
    enough."""
    return hashlib.sha256(key).digest()


class TokenBucket:
    """A token bucket with the allowance of one minute. It may be overdrawn; later requests then
    wait longer."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.size = per_minute
        self._clock = clock
        self._available = per_minute
        self._updated_s = clock()

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is available, or until the bucket is full if `amount`
        is larger."""
        now = self._clock()
        self._available = min(
            self.size, self._available + (now - self._updated_s) * self.size / _MINUTE_S
        )
        self._updated_s = now
        missing = min(amount, self.size) - self._available
        if missing <= 1e-9:
            return 0.0
        return missing * _MINUTE_S / self.size

    def take(self, amount: float) -> None:
        self.wait_s(0.0)
        self._available -= amount


@dataclass(slots=True)
class KeyUsage:
    """Usage of one key since the server started."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Account:
    """Limits and usage of one key.

    `admin`: may load, unload, fetch and remove models, and see the usage of all keys. The account
    without a name is also an admin. Accounts with the same `cache_scope` share cached prefixes; ""
    is the scope of all accounts without a name."""

    def __init__(self, key: NamedKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = key.name
        self.parallel = key.parallel
        self.used = KeyUsage()
        self.active = 0
        self.admin = key.admin or not key.name
        self.kv = key.kv
        self.cache_scope = ""
        if key.share_cache:
            self.cache_scope = f"group {key.share_cache}"
        elif key.name:
            self.cache_scope = f"key {key.name}"
        self._buckets: dict[str, TokenBucket] = {}
        if key.requests_per_minute is not None:
            self._buckets["requests"] = TokenBucket(key.requests_per_minute, clock)
        if key.tokens_per_minute is not None:
            self._buckets["tokens"] = TokenBucket(key.tokens_per_minute, clock)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context of one request of this key. Raises RateLimitError on entry. The request counts as
        running until the context ends or `request_answered` is called in it."""
        self._admit()
        self.active += 1
        with ExitStack() as running:
            running.callback(self._end_request)
            _RUNNING.set(running)
            yield

    @contextmanager
    def small_request(self) -> Iterator[None]:
        """Context of a request without generation. It counts only for the requests a minute.
        Raises RateLimitError on entry."""
        self._check("requests")
        self._take("requests", 1)
        yield

    def _end_request(self) -> None:
        self.active -= 1

    def _admit(self) -> None:
        if self.parallel is not None and self.active >= self.parallel:
            self._refuse(
                f"{self.name} has {self.active} requests running, and its limit is {self.parallel}",
                _PARALLEL_RETRY_S,
            )
        for kind in self._buckets:
            self._check(kind)
        self._take("requests", 1)
        self.used.requests += 1

    def _check(self, kind: str) -> None:
        bucket = self._buckets.get(kind)
        if bucket is None:
            return
        wait_s = bucket.wait_s(1.0)
        if wait_s > 0:
            self._refuse(f"{self.name} has a limit of {bucket.size:g} {kind} per minute", wait_s)

    def _take(self, kind: str, amount: int) -> None:
        if kind in self._buckets:
            self._buckets[kind].take(amount)

    def _refuse(self, reason: str, wait_s: float) -> None:
        self.used.refused += 1
        raise RateLimitError(reason, retry_after_s=max(1, -int(-wait_s // 1)))

    def charge(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        self.used.prompt_tokens += prompt_tokens
        self.used.cached_tokens += cached_tokens
        self.used.completion_tokens += completion_tokens
        self._take("tokens", max(0, prompt_tokens - cached_tokens) + completion_tokens)


# The account of requests that need no key.
NOBODY = Account(NamedKey(""))
# The account of the request that the current task answers. The gate sets it.
CALLER: ContextVar[Account] = ContextVar("localllm-caller", default=NOBODY)
# Its end stops counting the current task's request as running.
_RUNNING: ContextVar[ExitStack | None] = ContextVar("localllm-running", default=None)


def caller() -> Account:
    """Return the account of the current request. The owner's account, and the account of requests
    that need no key, have no name."""
    return CALLER.get()


def request_answered() -> None:
    """Stop counting the current request as running.

    It is called before the last bytes of an answer are sent. A client that has read them may send
    its next request at once, and a key for one request at a time must allow that."""
    running = _RUNNING.get()
    if running is not None:
        running.close()


def admins_only(action: str) -> None:
    """Raise AuthError if the caller may not do `action`."""
    if not caller().admin:
        raise AuthError(
            f"{action} needs an admin key, because it changes the server for all keys",
            hint="use the key without a name, or one with `admin = true` in config.toml",
        )


def salt_of(cache_salt: str) -> str:
    """Return the salt for the prefix cache of the current request. It combines the caller's scope
    and the client's own salt."""
    scope = caller().cache_scope
    if scope or cache_salt:
        return f"{scope}\n{cache_salt}"
    return ""


class PerCaller(Generic[T]):
    """One object for each caller, created by `make`. If there are too many, the object of the least
    recently active caller is dropped."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._objects: RecentlyUsed[str, T] = RecentlyUsed(_MAX_CALLERS)

    def current(self) -> T:
        """Return the object of the current caller."""
        name = caller().name
        existing = self._objects.get(name)
        if existing is not None:
            return existing
        return self._objects.put(name, self._make())


class Accounts:
    """The accounts of a server: one for each named key, and one for the owner's key, which has no
    name."""

    def __init__(self, keys: Iterable[NamedKey], owner_key: str | None) -> None:
        self._keys = [(key.digest, Account(key)) for key in keys]
        if owner_key is not None:
            digest = digest_of(owner_key.encode())
            self._keys.append((digest, Account(NamedKey("", digest))))
        self._delegated: RecentlyUsed[tuple[str, bytes], Account] = RecentlyUsed(_MAX_CALLERS)

    def of(self, sent: bytes) -> Account | None:
        """Return the account of a key, or None. The key is compared with every known key in
        constant time."""
        digest = digest_of(sent)
        account_of_key: Account | None = None
        for known_digest, account in self._keys:
            if hmac.compare_digest(digest, known_digest):
                account_of_key = account
        return account_of_key

    def delegated_account(self, account: Account, sent: bytes) -> Account:
        """Return the account of the caller for whom the admin `account` forwards a request (see
        `delegation`). Raises AuthError."""
        match = _DELEGATED.fullmatch(sent)
        if match is None or not account.admin:
            raise AuthError(
                f"only an admin's key may send {DELEGATION}, in the form that a pool's front sends"
            )
        name, scope, admin = (part.decode() for part in match.groups())
        existing = self._delegated.get((account.name, sent))
        if existing is not None:
            return existing
        key = NamedKey(f"{account.name}/{name}", admin=admin == "1")
        if scope != "-":
            key = replace(key, share_cache=scope)
        return self._delegated.put((account.name, sent), Account(key))

    def visible_to(self, account: Account) -> list[Account]:
        """Return the named accounts whose usage `account` may see: all for an admin, else its
        own."""
        named = [a for _, a in self._keys if a.name]
        if account.admin:
            return named
        return [a for a in named if a is account]

    def table(self, account: Account) -> str:
        """Return the usage that `account` may see, as CSV."""
        import csv

        out = io.StringIO()
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["key", *(f.name for f in fields(KeyUsage)), "running"])
        for a in self.visible_to(account):
            rows.writerow([a.name, *astuple(a.used), a.active])
        return out.getvalue()


# A localllm server that forwards a request names its caller in this header.
DELEGATION = "x-localllm-for"


def delegation() -> dict[str, str]:
    """Return the delegation header of the current request, with pseudonyms instead of names. Empty
    for a caller without a name."""
    account = caller()
    if not account.name:
        return {}
    scope = "-"
    if account.cache_scope != f"key {account.name}":
        scope = _pseudonym(account.cache_scope)
    return {DELEGATION: f"{_pseudonym(account.name)} {scope} {int(account.admin)}"}


def _pseudonym(name: str) -> str:
    return hashlib.sha256(f"localllm {name}".encode()).hexdigest()[:32]


def usage_metrics(accounts: Iterable[Account]) -> list[str]:
    """Return the usage of `accounts` in Prometheus' text format."""
    all_accounts = list(accounts)
    lines: list[str] = []
    if not all_accounts:
        return lines
    for each in fields(KeyUsage):
        series = [(labels(key=a.name), getattr(a.used, each.name)) for a in all_accounts]
        lines += metric(f"localllm_key_{each.name}_total", "counter", series)
    return lines
