"""The upstream servers in the settings and the models that each of them runs: values and
look-ups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from localllm.errors import UnsupportedError
from localllm.model_names import NameTable

if TYPE_CHECKING:
    from localllm.server.proxy.relay import UpstreamClient

Dialect = Literal["openai", "responses", "anthropic", "ollama"]
# The dialect of each path, and the path below a server's base URL. The base URL ends in /v1, except
# for Ollama's.
_OPENAI = {
    "/v1/chat/completions": "/chat/completions",
    "/chat/completions": "/chat/completions",
    "/v1/completions": "/completions",
    "/v1/embeddings": "/embeddings",
    "/embeddings": "/embeddings",
}
_OTHERS: dict[str, tuple[Dialect, str]] = {
    "/v1/responses": ("responses", "/responses"),
    "/v1/messages": ("anthropic", "/messages"),
    "/v1/messages/count_tokens": ("anthropic", "/messages/count_tokens"),
    "/api/chat": ("ollama", "/api/chat"),
    "/api/generate": ("ollama", "/api/generate"),
    "/api/embed": ("ollama", "/api/embed"),
    "/api/embeddings": ("ollama", "/api/embeddings"),
    "/api/show": ("ollama", "/api/show"),
}
PATHS: Mapping[str, tuple[Dialect, str]] = {
    **{k: ("openai", v) for k, v in _OPENAI.items()},
    **_OTHERS,
}
# Paths whose bodies name a model. Those added here run only on our own engine.
NAME_A_MODEL = (
    *PATHS,
    "/v1/fim/completions", "/fim/completions", "/apply-template", "/v1/rerank", "/rerank",
    "/completion", "/completions", "/infill",
    "/v1/responses/input_tokens", "/v1/systemone", "/v1/systemone/fit",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Upstream:
    """One upstream server.

    - `base_url`: the prefix of its OpenAI paths (`…/v1`).
    - `models`: maps our names to its own. If empty, all models that it lists.
    - `key`: sent to this server only.
    - `spill`: it also takes requests for which the local model of the same name has no room.
    - `speaks`: the dialects that are passed to it unchanged.
    - `silence_s`: the read timeout in seconds.
    """

    name: str
    base_url: str
    models: Mapping[str, str] = field(default_factory=dict)
    key: str | None = field(default=None, repr=False)
    spill: bool = False
    speaks: tuple[Dialect, ...] = ("openai",)
    silence_s: float = 600.0

    def address(self, path: str) -> str:
        """The URL for a request to our `path`.

        Raises UnsupportedError if this server does not support the path.
        """
        dialect, below = PATHS.get(path, (None, ""))
        if dialect is None or dialect not in self.speaks:
            can = sorted(
                p
                for p, (d, _) in PATHS.items()
                if d in self.speaks and p.startswith(("/v1/", "/api/"))
            )
            raise UnsupportedError(
                f"this model runs on the upstream {self.name}, which does "
                f"not get requests to {path}",
                hint=(
                    f"use a path that it supports: {', '.join(can)}; if it supports more, add "
                    "them to `speaks` in [[upstream]]"
                ),
                param="model",
            )
        root = self.base_url.rstrip("/")
        if below.startswith("/api/"):
            root = root.removesuffix("/v1")
        return root + below


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model on an upstream.

    `name` is our name for it, `upstream_name` its name there, and `facts` its entry in that
    server's list.
    """

    name: str
    upstream: Upstream
    upstream_name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class Upstreams:
    """Which upstream runs which model. The first upstream with a name wins.

    Models that the settings do not name come from the servers' lists (`learn`).
    """

    def __init__(self, upstreams: Iterable[Upstream]) -> None:
        self.all = tuple(upstreams)
        self._models: dict[str, dict[str, RemoteModel]] = {}
        self._names: NameTable[RemoteModel] = NameTable()
        # The HTTP client for these servers, set by the middleware.
        self.client: UpstreamClient | None = None
        for upstream in self.all:
            self.learn(upstream, ())

    def learn(self, upstream: Upstream, entries: Iterable[Mapping[str, Any]]) -> None:
        """Store the model list of `upstream` (the `data` of its GET /v1/models)."""
        facts = {
            e["id"]: e for e in entries if isinstance(e, Mapping) and isinstance(e.get("id"), str)
        }
        names = upstream.models or {name: name for name in facts}
        self._models[upstream.name] = {
            ours.lower(): RemoteModel(ours, upstream, theirs, facts.get(theirs, {}))
            for ours, theirs in names.items()
        }
        self._names = NameTable((model.name, model) for model in self.models())

    def models(self) -> list[RemoteModel]:
        """Every model once, in the order of the settings."""
        found: dict[str, RemoteModel] = {}
        for upstream in self.all:
            for key, model in self._models.get(upstream.name, {}).items():
                found.setdefault(key, model)
        return [*found.values()]

    def named(self, typed: str) -> Sequence[RemoteModel]:
        """The model with this name, as a rule for `localllm.model_names.find`."""
        return self._names.named(typed)
