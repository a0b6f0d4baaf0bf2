"""Choose the engine of a chat: a named server, a running server on this machine, or its own
engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlsplit

from localllm import foreign_json
from localllm.cli.serve.api_keys import existing_key
from localllm.cli.serve.running import Running, running
from localllm.errors import LocalLLMError, ModelNotFoundError, ServerUnreachableError, UsageError
from localllm.foreign_json import MalformedError
from localllm.model_names import NameTable, Rule, find
from localllm.setting_table import LOADING
from localllm.settings import Settings
from localllm_tui.control.interfaces import ChatEngine, EngineProgress

# A server on this machine answers within milliseconds. A remote machine may have to wake up.
_LOCAL_TIMEOUT_S = 1.0
_REMOTE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The engine that the command line requests. `own`: the chat starts its own engine."""

    model: str | None = None
    settings: Settings = field(default_factory=Settings)
    url: str | None = None
    api_key: str | None = None
    own: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError if options contradict each other."""
        if self.url is not None and self.own:
            raise UsageError("--url and --own can't be combined", hint="omit one of them")
        if self.url is not None and self.loading_flags:
            raise UsageError(
                "the server at --url already chose how to load its models",
                hint=f"omit {', '.join(self.loading_flags)}",
            )

    @property
    def loading_flags(self) -> list[str]:
        """The given flags that decide how a model is loaded. They can't apply to a running
        server."""
        return [row.flag for row in self.settings.flags_among(LOADING)]


@dataclass(frozen=True, slots=True)
class Attached:
    """A running server and the name of a model there. Implements the chat's ChatEngine.

    `unix_socket`: the path it listens on, or "" for a port. `ours`: it is the user's own
    `localllm serve` on this machine.
    """

    base_url: str
    model: str
    api_key: str | None = None
    unix_socket: str = ""
    ours: bool = False

    @property
    def where(self) -> str:
        """Its address in short form, for display."""
        return self.unix_socket or self.base_url.partition("://")[2].removesuffix("/v1")

    def start(self) -> None:
        """No action: the server is running."""

    def progress(self) -> EngineProgress:
        """Report that loading is complete. The server itself loads other models on request."""
        return EngineProgress()


def engine_for(stack: ExitStack, wanted: Wanted, last: str | None, *, at_once: bool) -> ChatEngine:
    """Return the engine that answers while `stack` is open. Raises LocalLLMError for known
    problems.

    `last` is the model of the continued conversation. If the chat needs its own engine, it is
    loaded here. With `at_once` it is not: the screen that shows its progress then has to start it.
    """
    model = wanted.model or last
    if wanted.url is not None:
        try:
            return at(wanted.url, model, wanted.api_key)
        except ModelNotFoundError:
            if wanted.model is not None or last is None:
                raise
            return at(wanted.url, None, wanted.api_key)
    if not wanted.own and not wanted.loading_flags:
        attached = local_server(
            model or wanted.settings.value("model"), wanted.api_key, lambda: _installed(model)
        )
        if attached is not None:
            return attached
    return _own_engine(
        stack, replace(wanted, model=model), at_hand=wanted.model is None, at_once=at_once
    )


def own_engine(stack: ExitStack, wanted: Wanted, model: str) -> ChatEngine:
    """Make the chat's own engine for `model`, or for the best installed model if `model` is not
    installed. It is not started, and ends with `stack`."""
    return _own_engine(stack, replace(wanted, model=model, url=None), at_hand=True, at_once=True)


def _own_engine(stack: ExitStack, wanted: Wanted, *, at_hand: bool, at_once: bool) -> ChatEngine:
    """Make the chat's own engine. With `at_hand`, the best installed model replaces a missing
    one."""
    from localllm.cli.chat.own_server import OwnEngine, loaded

    try:
        engine = OwnEngine(wanted.model, wanted.settings)
    except ModelNotFoundError:
        # It was deleted after the conversation, or was a path.
        if wanted.model is None or not at_hand:
            raise
        engine = OwnEngine(None, wanted.settings)
    if at_once:
        stack.callback(engine.stop)
        return engine
    return stack.enter_context(loaded(engine))


def _installed(model: str | None) -> str | None:
    """Return the name of `model` on this disk."""
    from localllm.library.resolve import resolve

    if not model:
        return None
    try:
        return resolve(model).name
    except LocalLLMError:
        return None


def only_the_starter(model: str) -> bool:
    """True if `model` is the bundled starter and no other model is installed."""
    from localllm.library import starter, store

    return model == starter.NAME and all(local.origin == "starter" for local in store.scan())


def at(url: str, model: str | None, api_key: str | None) -> Attached:
    """Return the server at `url`. Raises ServerUnreachableError, UsageError or
    ModelNotFoundError."""
    base_url, key = address_and_key(url, api_key)
    listed = listed_models(base_url, key)
    names = [str(entry["id"]) for entry in listed if _makes_text(entry)]
    if model:
        found = _named(_ModelServer(base_url, key), listed, model)
    else:
        found = _in_memory(listed) or next(iter(names), None)
    if found is None:
        message = f"{base_url} has no model {repr(model) if model else 'that generates text'}"
        raise ModelNotFoundError(message, hint=f"it has {', '.join(names[:20])}" if names else None)
    return Attached(base_url, found, key)


def address_and_key(url: str, api_key: str | None) -> tuple[str, str | None]:
    """Return `url` in the form for clients, ending in /v1, and the API key for it.

    The key is `api_key`, or else LOCALLLM_API_KEY. If both are missing and `url` is this user's own
    server, its stored key is used. That key is sent to no other server.
    """

    from localllm.addresses import is_loopback

    if "://" not in url:
        url = f"http://{url}"
    base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
    key = api_key or os.environ.get("LOCALLLM_API_KEY")
    base = urlsplit(base_url)
    if key or not is_loopback(base.hostname or ""):
        return base_url, key
    same_port = [server for server in running() if urlsplit(server.base_url).port == base.port]
    return base_url, _key_of(same_port[0], None) if same_port else None


def own_address() -> str:
    """Return the address of this user's running server: the one on the configured port, or the
    newest one. Without a server it is the address on the configured port."""
    address = f"127.0.0.1:{Settings().value('port')}"
    found = [server.base_url for server in running() if not server.unix_socket]
    port = urlsplit(f"//{address}").port
    return next((url for url in found if urlsplit(url).port == port), [*found, address][0])


def local_server(
    model: str | None, api_key: str | None, installed: Callable[[], str | None] = lambda: None
) -> Attached | None:
    """Return a server of this user on this machine that has `model` or can load it, or None.

    If `model` is None, a server that has any model in memory is returned. `installed` returns the
    name of `model` on this disk.
    """

    for server in running():
        try:
            key = _key_of(server, api_key)
            listed = listed_models(server.base_url, key, server.unix_socket, _LOCAL_TIMEOUT_S)
        except (ServerUnreachableError, UsageError):
            continue
        if model is None:
            found = _in_memory(listed)
        else:
            base = _ModelServer(server.base_url, key, server.unix_socket, _LOCAL_TIMEOUT_S)
            found = _named(base, listed, model)
        if found is None and model is not None and (name := installed()):
            found = _named(base, listed, name)
        if found is not None:
            return Attached(server.base_url, found, key, server.unix_socket, ours=True)
    return None


def _key_of(server: Running, api_key: str | None) -> str | None:
    if server.key == "none":
        return None
    if server.key == "kept":
        return existing_key()
    key: str | None = Settings({"api_key": api_key}).value("api_key")
    return key


@dataclass(frozen=True, slots=True)
class _ModelServer:
    """A server that can be queried about its models."""

    base_url: str
    key: str | None
    unix_socket: str = ""
    timeout_s: float = _REMOTE_TIMEOUT_S

    def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request. Returns the status and the body. Raises ServerUnreachableError."""
        import httpx

        headers = {"Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        transport = None
        if self.unix_socket:
            transport = httpx.HTTPTransport(uds=self.unix_socket)
        try:
            with (
                httpx.Client(
                    headers=headers, timeout=self.timeout_s, trust_env=False, transport=transport
                ) as client,
                client.stream("GET", f"{self.base_url}/{path}") as reply,
            ):
                foreign_json.check_uncompressed(reply.headers.get("content-encoding"))
                return reply.status_code, foreign_json.read(reply.iter_bytes())
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise ServerUnreachableError(
                f"no server answers at {self.base_url}: {e or type(e).__name__}"
            ) from e
        except MalformedError as e:
            raise ServerUnreachableError(
                f"the answer of {self.base_url} can't be used: {e.message}"
            ) from e

    def named(self, name: str) -> list[str]:
        """Return the id of the model that the server uses for this name, even if it is not
        listed."""
        try:
            status, body = self.get(f"models/{quote(name, safe='')}")
            found = ""
            if status == 200:
                found = foreign_json.parse(body).get("id").text()
        except (ServerUnreachableError, MalformedError):
            return []
        return [found] if found else []


def listed_models(
    base_url: str, key: str | None, unix_socket: str = "", timeout_s: float = _REMOTE_TIMEOUT_S
) -> list[dict[str, Any]]:
    """Return the server's list of models. Raises ServerUnreachableError or UsageError."""
    status, body = _ModelServer(base_url, key, unix_socket, timeout_s).get("models")
    if status in (401, 403):
        raise UsageError(
            f"the server at {base_url} requires a key"
            if key is None
            else f"the server at {base_url} rejects the key",
            hint="set it: --api-key KEY, or LOCALLLM_API_KEY",
        )
    if status != 200:
        raise ServerUnreachableError(f"{base_url} does not speak the OpenAI API (status {status})")
    try:
        data = foreign_json.parse(body).get("data")
        if data.value is None:
            raise data.wrong("a list")
        entries = [_entry(part) for part in data.items()]
    except MalformedError as e:
        raise ServerUnreachableError(
            f"{base_url} does not speak the OpenAI API: {e.message}"
        ) from e
    return [entry for entry in entries if entry["id"]]


def _entry(part: foreign_json.JsonPart) -> dict[str, Any]:
    """The fields of a listed model that are used, each of its type. `id` is "" if it is missing.

    Raises MalformedError if it is no object.
    """
    entry: dict[str, Any] = {}
    name = part.get("id").cleaned()
    entry["id"] = name if isinstance(name, str) else ""
    for member in ("aliases", "capabilities"):
        values = part.get(member).cleaned()
        entry[member] = []
        if isinstance(values, list):
            entry[member] = [value for value in values if isinstance(value, str)]
    entry["status"] = part.get("status").members()
    entry["context_length"] = part.get("context_length").count() or 0
    physics = foreign_json.JsonPart(part.get("physics").members())
    entry["physics"] = {"max_context": physics.get("max_context").count() or 0}
    return entry


def _named(server: _ModelServer, listed: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """Return the id of the server's model called `name`: from its list, or resolved by the
    server."""
    table: NameTable[str] = NameTable()
    for entry in listed:
        table.add(str(entry["id"]), str(entry["id"]))
    for entry in listed:
        for alias in entry["aliases"]:
            table.add(str(alias), str(entry["id"]))
    return find(name, {Rule.SERVED: table.named, Rule.INSTALLED: server.named}).first


def _in_memory(listed: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first text model that is loaded, or else one that is being loaded."""
    states = {str(e["id"]): e["status"].get("value") for e in listed if _makes_text(e)}
    return next(
        (name for state in ("loaded", "loading") for name, s in states.items() if s == state), None
    )


def _makes_text(entry: Mapping[str, Any]) -> bool:
    return not {"embedding", "rerank"} & set(entry["capabilities"])
