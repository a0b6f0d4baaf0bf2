"""Read and check the servers in config.toml that requests are forwarded to.

[[upstream]]                   # a server that requests are forwarded to
name = "lab"
url = "http://10.0.0.7:8000/v1"
models = ["Qwen/Qwen3-32B"]    # or {ours = "theirs"}; default: all that it lists
key_env = "LAB_KEY"            # environment variable with the server's key
spill = true                   # also takes requests that the local model has no room for
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from localllm.addresses import is_loopback
from localllm.cli.serve.config_tables import read_table, variable
from localllm.errors import UsageError
from localllm.server.proxy.upstreams import Dialect, Upstream, Upstreams
from localllm.settings import Settings, config_path, read_config


def load_upstreams(allowed: Sequence[str]) -> Upstreams | None:
    """Return the servers of config.toml, or None if it has no such tables.

    `allowed`: hosts that requests may be forwarded to, in addition to this machine. Raises
    UsageError that names the invalid table and the problem.
    """
    tables = read_config().get("upstream", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise UsageError(f"{config_path()}: write each upstream as a table [[upstream]]")
    if not tables:
        return None
    upstreams = [_upstream(table, allowed) for table in tables]
    names = [upstream.name for upstream in upstreams]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two tables of [[upstream]] in {config_path()} are named {name!r}")
    return Upstreams(upstreams)


def _upstream(table: dict[str, Any], allowed: Sequence[str]) -> Upstream:
    from pydantic import Field

    where = f"[[upstream]] {table.get('name', '')!r} of config.toml"
    non_empty = Field(min_length=1)
    text = Annotated[str, non_empty]
    seconds = Annotated[float, Field(ge=1, le=86400)]
    values = read_table(
        table,
        where,
        name=(text, ...),
        url=(text, ...),
        models=(list[text] | dict[text, text], []),
        key_env=(text | None, None),
        spill=(bool, False),
        speaks=(Annotated[list[Dialect], non_empty], ["openai"]),
        silence_s=(seconds, 600.0),
    )
    name = values["name"]
    models = values["models"]
    if isinstance(models, list):
        models = {model: model for model in models}
    if not name.isascii() or not name.isprintable():
        raise UsageError(
            f"name in {where} must be plain ASCII, because it is sent in a response header"
        )
    key = None
    if values["key_env"] is not None:
        key = variable(values["key_env"], where)
    return Upstream(
        name,
        checked_url(values["url"], allowed, where, keyed=key is not None),
        models,
        key,
        values["spill"],
        tuple(values["speaks"]),
        values["silence_s"],
    )


def checked_url(url: str, allowed: Sequence[str], where: str, *, keyed: bool) -> str:
    """Return `url` if requests may be sent there.

    It must be on this machine or on an `allowed` host (names, addresses, networks). Raises
    UsageError, also if a key would be sent unencrypted over the internet.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    is_http = parts.scheme in ("http", "https")
    if not is_http or not host or any((parts.username, parts.query, parts.fragment)):
        raise UsageError(f"the address {url!r} in {where} must be http(s)://host:port/v1")
    if is_loopback(host):
        return url.rstrip("/")
    if not any(_matches(host, allowed_host) for allowed_host in allowed):
        raise UsageError(
            f"{where} is on {host}, which allow_upstream does not list",
            hint="if that machine may read your prompts, set "
            f'allow_upstream = ["{host}"] in config.toml',
        )
    if keyed and parts.scheme == "http" and not _is_private(host):
        raise UsageError(
            f"{where} would send its key to {host} unencrypted",
            hint="use https, or reach it through a tunnel",
        )
    return url.rstrip("/")


def check_prefill_servers(settings: Settings) -> None:
    """Raise UsageError if a server of --prefill-from or --kv-from can't be asked for KV."""
    for text in settings.value("prefill_from"):
        _check_kv_server(text, "--prefill-from", settings)
    for text in settings.value("kv_from"):
        _check_kv_server(text, "--kv-from", settings)


def _check_kv_server(text: str, option: str, settings: Settings) -> None:
    # A host on the command line or in a setting is allowed.
    host = (urlsplit(text).hostname or "").lower()
    checked_url(text, [host], option, keyed=settings.value("prefill_key") is not None)
    if not (is_loopback(host) or text.startswith("https:") or settings.value("allow_plain")):
        raise UsageError(
            f"{option} {text} would send prompts and KV unencrypted",
            hint="use https or a tunnel, or allow it with --allow-plain",
        )


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
