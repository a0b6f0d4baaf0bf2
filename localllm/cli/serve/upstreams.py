"""What config.toml says of other servers that requests are handed on to, checked.

[[upstream]]                   # a server that requests are handed on to
name = "lab"
url = "http://10.0.0.7:8000/v1"
models = ["Qwen/Qwen3-32B"]    # or {ours = "theirs"}; left out: all that it lists
key_env = "LAB_KEY"            # the variable that holds the key it wants
spill = true                   # also takes what the model of that name here has no room for
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from localllm.cli.serve.config_tables import check_keys, text_of, variable
from localllm.errors import UsageError
from localllm.settings import config_path, read_config

if TYPE_CHECKING:
    from localllm.server.proxy.upstreams import Upstream, Upstreams

_UPSTREAM = ("name", "url", "models", "key_env", "spill", "speaks", "silence_s")


def load_upstreams(allowed: Sequence[str]) -> Upstreams | None:
    """The servers of config.toml; None where it names none. `allowed`: the machines besides this
    one that requests may be handed on to. Raises UsageError that says which table is wrong, and
    how."""
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
    check_keys(table, _UPSTREAM, where)
    name = text_of(table, "name", where)
    if not name.isascii() or not name.isprintable():
        raise UsageError(
            f"name in {where} must be plain ASCII: answers say in a header where they are from"
        )
    key = variable(text_of(table, "key_env", where), where) if "key_env" in table else None
    url = checked_url(text_of(table, "url", where), allowed, where, keyed=key is not None)
    spill, silence_s = table.get("spill", False), table.get("silence_s", 600.0)
    if not isinstance(spill, bool):
        raise UsageError(f"spill in {where} must be true or false, not {spill!r}")
    if (
        isinstance(silence_s, bool)
        or not isinstance(silence_s, int | float)
        or not 1 <= silence_s <= 86400
    ):
        raise UsageError(f"silence_s in {where} must be from 1 to 86400 seconds, not {silence_s!r}")
    speaks = table.get("speaks", ["openai"])
    if (
        not isinstance(speaks, list)
        or not speaks
        or any(d not in get_args(Dialect) for d in speaks)
    ):
        raise UsageError(f"speaks in {where} must list some of {', '.join(get_args(Dialect))}")
    return Upstream(
        name,
        url,
        _models(table.get("models", []), where),
        key,
        spill,
        tuple(speaks),
        float(silence_s),
    )


def _models(value: Any, where: str) -> Mapping[str, str]:
    pairs = (
        value.items()
        if isinstance(value, dict)
        else [(m, m) for m in value]
        if isinstance(value, list)
        else [(0, 0)]
    )
    if not all(isinstance(a, str) and a and isinstance(b, str) and b for a, b in pairs):
        raise UsageError(
            f"models in {where} must be a list of names, or a table of our names to theirs"
        )
    return {a: b for a, b in pairs if isinstance(a, str) and isinstance(b, str)}


def checked_url(url: str, allowed: Sequence[str], where: str, *, keyed: bool) -> str:
    """`url` where requests may be sent: on this machine, or on one of the `allowed` ones (names,
    addresses, networks). Raises UsageError; also for a key that would cross the internet in the
    clear."""
    from localllm.server.http.settings import is_loopback

    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if (
        parts.scheme not in ("http", "https")
        or not host
        or parts.username
        or parts.query
        or parts.fragment
    ):
        raise UsageError(f"the address {url!r} in {where} must be http(s)://host:port/v1")
    if not is_loopback(host) and not any(_matches(host, one) for one in allowed):
        raise UsageError(
            f"{where} is on {host}, which is not among the machines that requests may be handed "
            "on to",
            hint=f'if prompts may be read there, allow it: allow_upstream = ["{host}"] in '
            "config.toml",
        )
    if keyed and parts.scheme == "http" and not (is_loopback(host) or _is_private(host)):
        raise UsageError(
            f"{where} would send its key to {host} unencrypted",
            hint="use https, or reach it through a tunnel",
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
