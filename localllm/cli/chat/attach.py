"""Which running server a chat asks: the one at an address that was named, else one on this machine that has the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.errors import ModelNotFoundError, ServerUnreachableError, UsageError

if TYPE_CHECKING:
    from localllm.cli.serve.running import Running

# What runs on this machine answers within milliseconds; what is elsewhere may be asleep.
_HERE_S, _ELSEWHERE_S = 1.0, 10.0
# Names beside its own by which a server is asked for.
_TAGS = (":latest",)


@dataclass(frozen=True, slots=True)
class Attached:
    """A server that answers, and the name of the model there. `unix_socket`: the path it listens on, "" for a port."""

    base_url: str
    model: str
    api_key: str | None = None
    unix_socket: str = ""

    @property
    def where(self) -> str:
        """Its address, as people say it."""
        return self.unix_socket or self.base_url.partition("://")[2].removesuffix("/v1")


def at(url: str, model: str | None, api_key: str | None) -> Attached:
    """The server at `url`. Raises ServerUnreachableError, UsageError or ModelNotFoundError."""
    if "://" not in url:
        url = f"http://{url}"
    base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
    key = api_key or os.environ.get("LOCALLLM_API_KEY") or _kept_for(base_url)
    listed = _ask(base_url, key, "", _ELSEWHERE_S)
    names = [str(entry["id"]) for entry in listed if _makes_text(entry)]
    found = _named(listed, model) if model else _at_hand(listed)
    if found is None:
        said = f"{base_url} has no model {model!r}" if model else f"{base_url} has no model that makes text"
        raise ModelNotFoundError(said, hint=f"it has {', '.join(names[:20])}" if names else None)
    return Attached(base_url, found, key)


def here(model: str | None, api_key: str | None, installed: Callable[[], str | None] = lambda: None) -> Attached | None:
    """A server of this user on this machine that has `model` or may load it; None where there is none. Without a name, one
    that has some model in memory. `installed` finds out what `model` is called on this disk."""
    from localllm.cli.serve.running import running

    for server in running():
        try:
            key = _key_of(server, api_key)
            listed = _ask(server.base_url, key, server.unix_socket, _HERE_S)
        except (ServerUnreachableError, UsageError):
            continue
        found = _in_memory(listed) if model is None else _named(listed, model)
        if found is None and model is not None and (name := installed()):
            found = _named(listed, name)
        if found is not None:
            return Attached(server.base_url, found, key, server.unix_socket)
    return None


def _key_of(server: Running, api_key: str | None) -> str | None:
    from localllm.cli.compose.api_keys import existing_key
    from localllm.settings import Settings

    if server.key == "none":
        return None
    return existing_key() if server.key == "kept" else Settings({"api_key": api_key}).value("api_key")


def _kept_for(base_url: str) -> str | None:
    """The key that this machine's own servers made up and keep: shown to no other."""
    from urllib.parse import urlsplit

    from localllm.cli.compose.api_keys import existing_key
    from localllm.cli.serve.running import running
    from localllm.server.http.names import is_loopback

    asked = urlsplit(base_url)
    ours = any(s.key == "kept" and urlsplit(s.base_url).port == asked.port for s in running())
    return existing_key() if ours and is_loopback(asked.hostname or "") else None


def _ask(base_url: str, key: str | None, unix_socket: str, timeout_s: float) -> list[dict[str, Any]]:
    """The server's list of models. Raises ServerUnreachableError or UsageError."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = httpx.HTTPTransport(uds=unix_socket) if unix_socket else None
    try:
        with httpx.Client(headers=headers, timeout=timeout_s, trust_env=False, transport=transport) as client:
            reply = client.get(f"{base_url}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise ServerUnreachableError(f"no server answers at {base_url}: {e or type(e).__name__}") from e
    if reply.status_code in (401, 403):
        raise UsageError(
            f"the server at {base_url} asks for a key" if key is None else f"the server at {base_url} refuses the key",
            hint="give it: --api-key KEY, or LOCALLLM_API_KEY",
        )
    try:
        return [entry for entry in reply.raise_for_status().json()["data"] if isinstance(entry.get("id"), str)]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ServerUnreachableError(
            f"{base_url} does not speak the OpenAI API (it answers {reply.status_code})"
        ) from e


def _named(listed: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """The id of the model that is asked for as `name`."""
    wanted = name.lower()
    for tag in _TAGS:
        wanted = wanted.removesuffix(tag)
    for entry in listed:
        if wanted in (str(entry["id"]).lower(), *(str(a).lower() for a in entry.get("aliases") or ())):
            return str(entry["id"])
    return None


def _in_memory(listed: Sequence[Mapping[str, Any]]) -> str | None:
    """The first model that makes text and is loaded, or is being loaded."""
    states = {str(e["id"]): (e.get("status") or {}).get("value") for e in listed if _makes_text(e)}
    return next((name for state in ("loaded", "loading") for name, s in states.items() if s == state), None)


def _at_hand(listed: Sequence[Mapping[str, Any]]) -> str | None:
    """A model in memory, else the first that makes text."""
    return _in_memory(listed) or next((str(e["id"]) for e in listed if _makes_text(e)), None)


def _makes_text(entry: Mapping[str, Any]) -> bool:
    return not {"embedding", "rerank"} & set(entry.get("capabilities") or ())
