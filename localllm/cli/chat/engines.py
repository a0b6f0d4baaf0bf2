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
from localllm.cli.serve.running import RunningServer, running_servers
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
class EngineRequest:
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
        return [option.flag for option in self.settings.flags_among(LOADING)]


@dataclass(frozen=True, slots=True)
class ServerEngine:
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


def engine_for(
    stack: ExitStack, request: EngineRequest, last_model: str | None, *, at_once: bool
) -> ChatEngine:
    """Return the engine that answers while `stack` is open. Raises LocalLLMError for known
    problems.

    `last_model` is the model of the continued conversation. If the chat needs its own engine, it is
    loaded here. With `at_once` it is not: the screen that shows its progress then has to start it.
    """
    model = request.model or last_model
    if request.url is not None:
        try:
            return engine_at(request.url, model, request.api_key)
        except ModelNotFoundError:
            if request.model is not None or last_model is None:
                raise
            return engine_at(request.url, None, request.api_key)
    if not request.own and not request.loading_flags:
        engine = local_server(
            model or request.settings.value("model"), request.api_key, lambda: _installed(model)
        )
        if engine is not None:
            return engine
    return _make_own_engine(
        stack, replace(request, model=model), may_replace=request.model is None, at_once=at_once
    )


def own_engine(stack: ExitStack, request: EngineRequest, model: str) -> ChatEngine:
    """Make the chat's own engine for `model`, or for the best installed model if `model` is not
    installed. It is not started, and ends with `stack`."""
    return _make_own_engine(
        stack, replace(request, model=model, url=None), may_replace=True, at_once=True
    )


def _make_own_engine(
    stack: ExitStack, request: EngineRequest, *, may_replace: bool, at_once: bool
) -> ChatEngine:
    """Make the chat's own engine. With `may_replace`, the best installed model replaces a missing
    one."""
    from localllm.cli.chat.own_server import OwnEngine, loaded

    try:
        engine = OwnEngine(request.model, request.settings)
    except ModelNotFoundError:
        # It was deleted after the conversation, or was a path.
        if request.model is None or not may_replace:
            raise
        engine = OwnEngine(None, request.settings)
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


def engine_at(url: str, model: str | None, api_key: str | None) -> ServerEngine:
    """Return the server at `url`. Raises ServerUnreachableError, UsageError or
    ModelNotFoundError."""
    base_url, key = address_and_key(url, api_key)
    entries = listed_models(base_url, key)
    names = [str(entry["id"]) for entry in entries if _generates_text(entry)]
    if model:
        model_id = _model_called(_ModelServer(base_url, key), entries, model)
    else:
        model_id = _first_in_memory(entries) or next(iter(names), None)
    if model_id is None:
        message = f"{base_url} has no model {repr(model) if model else 'that generates text'}"
        raise ModelNotFoundError(message, hint=f"it has {', '.join(names[:20])}" if names else None)
    return ServerEngine(base_url, model_id, key)


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
    parts = urlsplit(base_url)
    if key or not is_loopback(parts.hostname or ""):
        return base_url, key
    own_servers = [
        server for server in running_servers() if urlsplit(server.base_url).port == parts.port
    ]
    return base_url, _key_for(own_servers[0], None) if own_servers else None


def own_address() -> str:
    """Return the address of this user's running server: the one on the configured port, or the
    newest one. Without a server it is the address on the configured port."""
    address = f"127.0.0.1:{Settings().value('port')}"
    addresses = [server.base_url for server in running_servers() if not server.unix_socket]
    port = urlsplit(f"//{address}").port
    return next((url for url in addresses if urlsplit(url).port == port), [*addresses, address][0])


def local_server(
    model: str | None, api_key: str | None, installed_name: Callable[[], str | None] = lambda: None
) -> ServerEngine | None:
    """Return a server of this user on this machine that has `model` or can load it, or None.

    If `model` is None, a server that has any model in memory is returned. `installed_name` returns
    the name of `model` on this disk.
    """

    for server in running_servers():
        try:
            key = _key_for(server, api_key)
            entries = listed_models(server.base_url, key, server.unix_socket, _LOCAL_TIMEOUT_S)
        except (ServerUnreachableError, UsageError):
            continue
        if model is None:
            model_id = _first_in_memory(entries)
        else:
            client = _ModelServer(server.base_url, key, server.unix_socket, _LOCAL_TIMEOUT_S)
            model_id = _model_called(client, entries, model)
        if model_id is None and model is not None and (name := installed_name()):
            model_id = _model_called(client, entries, name)
        if model_id is not None:
            return ServerEngine(server.base_url, model_id, key, server.unix_socket, ours=True)
    return None


def _key_for(server: RunningServer, api_key: str | None) -> str | None:
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
            model_id = ""
            if status == 200:
                model_id = foreign_json.parse(body).get("id").text()
        except (ServerUnreachableError, MalformedError):
            return []
        return [model_id] if model_id else []


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


def _entry(item: foreign_json.JsonPart) -> dict[str, Any]:
    """The fields of a listed model that are used, each of its type. `id` is "" if it is missing.

    Raises MalformedError if it is no object.
    """
    fields: dict[str, Any] = {}
    name = item.get("id").cleaned()
    fields["id"] = name if isinstance(name, str) else ""
    for list_name in ("aliases", "capabilities"):
        values = item.get(list_name).cleaned()
        fields[list_name] = []
        if isinstance(values, list):
            fields[list_name] = [value for value in values if isinstance(value, str)]
    fields["status"] = item.get("status").members()
    fields["context_length"] = item.get("context_length").count() or 0
    physics = foreign_json.JsonPart(item.get("physics").members())
    fields["physics"] = {"max_context": physics.get("max_context").count() or 0}
    return fields


def _model_called(
    server: _ModelServer, entries: Sequence[Mapping[str, Any]], name: str
) -> str | None:
    """Return the id of the server's model called `name`: from its list, or resolved by the
    server."""
    names: NameTable[str] = NameTable()
    for entry in entries:
        names.add(str(entry["id"]), str(entry["id"]))
    for entry in entries:
        for alias in entry["aliases"]:
            names.add(str(alias), str(entry["id"]))
    return find(name, {Rule.SERVED: names.named, Rule.INSTALLED: server.named}).first


def _first_in_memory(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first text model that is loaded, or else one that is being loaded."""
    states = {
        str(entry["id"]): entry["status"].get("value")
        for entry in entries
        if _generates_text(entry)
    }
    return next(
        (
            name
            for state in ("loaded", "loading")
            for name, status in states.items()
            if status == state
        ),
        None,
    )


def _generates_text(entry: Mapping[str, Any]) -> bool:
    return not {"embedding", "rerank"} & set(entry["capabilities"])
