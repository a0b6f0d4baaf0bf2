"""What config.toml says of other servers and of whoever may ask: [[upstream]] and [keys.NAME], checked.

[[upstream]]                   # a server that requests are handed on to
name = "lab"
url = "http://10.0.0.7:8000/v1"
models = ["Qwen/Qwen3-32B"]    # or {ours = "theirs"}; left out: all that it lists
key_env = "LAB_KEY"            # the variable that holds the key it wants
spill = true                   # also takes what the model of that name here has no room for

[keys.anna]                    # a key by a name: its hash, a variable or a file
sha256 = "…"
tokens_per_minute = 60000
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from localllm.errors import UsageError
from localllm.settings import config_path, read_config

if TYPE_CHECKING:
    from localllm.server.http.accounts import NamedKey
    from localllm.server.proxy.upstreams import Upstream, Upstreams

_UPSTREAM = ("name", "url", "models", "key_env", "spill", "speaks", "silence_s")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "parallel")
_KEY = ("sha256", "env", "file", *_LIMITS)
_LEAST_KEY_CHARS = 16
_HEX = frozenset("0123456789abcdef")


def load_upstreams(allowed: Sequence[str]) -> Upstreams | None:
    """The servers of config.toml; None where it names none. `allowed`: the machines besides this one that requests may be
    handed on to. Raises UsageError that says which table is wrong, and how."""
    tables = read_config().get("upstream", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise UsageError(f"{config_path()}: upstreams are written as tables of [[upstream]]")
    if not tables:
        return None
    from localllm.server.proxy.upstreams import Upstreams

    found = [_upstream(table, allowed) for table in tables]
    names = [u.name for u in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two tables of [[upstream]] in {config_path()} are named {name!r}")
    return Upstreams(found)


def _upstream(table: dict[str, Any], allowed: Sequence[str]) -> Upstream:
    from localllm.server.proxy.upstreams import Dialect, Upstream

    where = f"[[upstream]] {table.get('name', '')!r} of config.toml"
    _known(table, _UPSTREAM, where)
    name = _text(table, "name", where)
    if not name.isascii() or not name.isprintable():
        raise UsageError(f"name in {where} must be plain ASCII: answers say in a header where they are from")
    key = None
    if "key_env" in table:
        key = os.environ.get(_text(table, "key_env", where))
        if not key:
            raise UsageError(f"{where} takes its key from {table['key_env']}, which is not set", hint="export it first")
    url = checked_url(_text(table, "url", where), allowed, where, keyed=key is not None)
    spill, silence_s = table.get("spill", False), table.get("silence_s", 600.0)
    if not isinstance(spill, bool):
        raise UsageError(f"spill in {where} must be true or false, not {spill!r}")
    if isinstance(silence_s, bool) or not isinstance(silence_s, int | float) or not 1 <= silence_s <= 86400:
        raise UsageError(f"silence_s in {where} must be from 1 to 86400 seconds, not {silence_s!r}")
    speaks = table.get("speaks", ["openai"])
    if not isinstance(speaks, list) or not speaks or any(d not in get_args(Dialect) for d in speaks):
        raise UsageError(f"speaks in {where} must list some of {', '.join(get_args(Dialect))}")
    return Upstream(name, url, _models(table.get("models", []), where), key, spill, tuple(speaks), float(silence_s))


def _models(value: Any, where: str) -> Mapping[str, str]:
    pairs = (
        value.items() if isinstance(value, dict) else [(m, m) for m in value] if isinstance(value, list) else [(0, 0)]
    )
    if not all(isinstance(a, str) and a and isinstance(b, str) and b for a, b in pairs):
        raise UsageError(f"models in {where} must be a list of names, or a table of our names to theirs")
    return {a: b for a, b in pairs if isinstance(a, str) and isinstance(b, str)}


def checked_url(url: str, allowed: Sequence[str], where: str, *, keyed: bool) -> str:
    """`url` where requests may be sent: on this machine, or on one of the `allowed` ones (names, addresses, networks).
    Raises UsageError; also for a key that would cross the internet in the clear."""
    from localllm.server.http.names import is_loopback

    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
        raise UsageError(f"the address {url!r} in {where} must be http(s)://host:port/v1")
    if not is_loopback(host) and not any(_matches(host, one) for one in allowed):
        raise UsageError(
            f"{where} is on {host}, which is not among the machines that requests may be handed on to",
            hint=f'if prompts may be read there, allow it: allow_upstream = ["{host}"] in config.toml',
        )
    if keyed and parts.scheme == "http" and not (is_loopback(host) or _is_private(host)):
        raise UsageError(
            f"{where} would send its key to {host} unencrypted", hint="use https, or reach it through a tunnel"
        )
    return url.rstrip("/")


def _matches(host: str, allowed: str) -> bool:
    if host == allowed.lower():
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(allowed, strict=False)
    except ValueError:
        return False


def _is_private(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host.endswith((".local", ".lan", ".internal", ".home.arpa"))


def load_keys() -> tuple[NamedKey, ...]:
    """The named keys of config.toml. Raises UsageError that says which table is wrong, and how; never with the key."""
    tables = read_config().get("keys", {})
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UsageError(f"{config_path()}: `keys` holds one table per key: [keys.NAME]")
    if not tables:
        return ()
    keys = tuple(_key(name, table) for name, table in tables.items())
    for key in keys:
        other = next(k for k in keys if k.digest == key.digest)
        if other is not key:
            raise UsageError(f"[keys.{other.name}] and [keys.{key.name}] of config.toml are the same key")
    return keys


def _key(name: str, table: dict[str, Any]) -> NamedKey:
    from localllm.server.http.accounts import KeyLimits, NamedKey, digest_of

    where = f"[keys.{name}] of config.toml"
    _known(table, _KEY, where)
    if not name.strip():
        raise UsageError(f"{where} has no name")
    if sum(k in table for k in ("sha256", "env", "file")) != 1:
        raise UsageError(
            f"{where} must say its key in one way: sha256, env or file", hint="`localllm usage --new-key NAME`"
        )
    if "sha256" in table:
        text = _text(table, "sha256", where).lower()
        if len(text) != 64 or not set(text) <= _HEX:
            raise UsageError(f"sha256 in {where} must be 64 hexadecimal digits")
        digest = bytes.fromhex(text)
    else:
        digest = digest_of(_secret(table, where).encode())
    limits = {limit: _limit(table, limit, where) for limit in _LIMITS}
    parallel = limits.pop("parallel")
    return NamedKey(name, digest, KeyLimits(**limits, parallel=None if parallel is None else int(parallel)))


def _secret(table: dict[str, Any], where: str) -> str:
    if "env" in table:
        name = _text(table, "env", where)
        key = os.environ.get(name, "").strip()
        if not key:
            raise UsageError(f"{where} takes its key from {name}, which is not set", hint="export it first")
    else:
        path = Path(_text(table, "file", where)).expanduser()
        try:
            key = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"{where}: {path} can't be read ({type(e).__name__})", hint="put the key there") from e
    if len(key) < _LEAST_KEY_CHARS:
        raise UsageError(f"the key of {where} has fewer than {_LEAST_KEY_CHARS} characters: it could be guessed")
    return key


def _limit(table: dict[str, Any], limit: str, where: str) -> float | None:
    value = table.get(limit)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 10**12:
        raise UsageError(f"{limit} in {where} must be a number of 1 or more, not {value!r}")
    if limit == "parallel" and value != int(value):
        raise UsageError(f"parallel in {where} must be a whole number, not {value!r}")
    return float(value)


def _known(table: dict[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            raise UsageError(
                f"{where} has an unknown key: {key}",
                hint=f"did you mean {near[0]}?" if near else f"known: {', '.join(keys)}",
            )


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{key} in {where} must be a text, not {value!r}")
    return value
