"""A served model: its name, its defaults for requests, and its worker."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from localllm.engine.messages import Generation, Sampling
from localllm.engine.worker.client import EngineClient, Host
from localllm.model_names import Rules
from localllm.server.models.worker import ModelMetadata, ModelWorker, PlannedModel
from localllm_backends.contract import ModelInfo

if TYPE_CHECKING:
    from localllm.conversation.template import ChatTemplate

log = logging.getLogger("localllm.server")
State = Literal["loaded", "loading", "available"]


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """A preset's defaults for requests.

    - `sampling`: overrides of the model's sampling.
    - `system`: a system prompt for conversations without one.
    - `thinking_tokens`: the reasoning budget in tokens (None: no limit).
    - `adapters`: the LoRA adapters, as (number, scale) (None: the worker's own).
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    thinking_tokens: int | None = None
    adapters: tuple[tuple[int, float], ...] | None = None


class ServedModel:
    """A name on offer.

    It is made from a Host and the `facts` of its model (fields of ModelMetadata), or from a
    `worker` that it shares with other names.
    """

    def __init__(
        self,
        name: str,
        host: Host | None = None,
        *,
        aliases: tuple[str, ...] = (),
        info: ModelInfo | None = None,
        worker: ModelWorker | None = None,
        defaults: ModelDefaults | None = None,
        **facts: Any,
    ) -> None:
        if worker is None:
            assert host is not None
            worker = ModelWorker(name, PlannedModel(host, ModelMetadata(**facts)))
            worker.info = info
        self.name = name
        self.aliases = aliases
        self.worker = worker
        self.defaults = defaults or ModelDefaults()
        self.created_s = int(time.time())
        self._templates: dict[str, ChatTemplate] = {}

    @property
    def sampling(self) -> Sampling:
        """The sampling defaults of a request."""
        return replace(self.facts.sampling, **self.defaults.sampling)

    def sampling_for(self, effort: str | None) -> Sampling:
        """The sampling defaults of a request with this reasoning `effort`."""
        unthinking = self.facts.sampling_unthinking
        if effort != "none" or unthinking is None:
            return self.sampling
        return replace(unthinking, **self.defaults.sampling)

    def adapters_for(self, generation: Generation) -> Generation:
        """`generation` with the LoRA adapters of this name, unless it has its own."""
        for adapters in (generation.adapters, self.defaults.adapters, self.worker.adapters):
            if adapters is not None:
                return replace(generation, adapters=adapters)
        return generation

    @property
    def facts(self) -> ModelMetadata:
        """The model's metadata, known before it is loaded."""
        return self.worker.facts

    @property
    def info(self) -> ModelInfo | None:
        return self.worker.info

    @property
    def served_n_ctx(self) -> int | None:
        """The context in tokens that every dialect reports."""
        if self.info is not None:
            return self.info.n_ctx
        return self.facts.n_ctx

    @property
    def room_hint(self) -> str:
        """Advice for a prompt that is longer than the served context."""
        max_context = self.facts.physics.get("max_context") or 0
        served = self.served_n_ctx or 0
        if max_context > served:
            return (
                "shorten it, or serve with a larger --context: "
                f"up to {max_context} fits on this machine"
            )
        if max_context:
            return "shorten it: no larger --context fits on this machine"
        return ""

    @property
    def supports_audio(self) -> bool:
        """Whether the model reads sounds, as far as that is known."""
        if self.info is not None:
            return self.info.audio_rate_hz > 0
        return bool(self.facts.details.get("audio"))

    @property
    def capabilities(self) -> list[str]:
        """Ollama's capabilities: completion, tools, vision, audio, thinking, insert; or embedding; or
        rerank.

        vision, audio, thinking and insert are known only after the model is loaded.
        """
        if self.facts.embeds:
            return ["embedding"]
        if self.facts.ranks:
            return ["rerank"]
        # Imported late, as below: planning does not need it.
        from localllm.conversation.tools import has_unknown_format, reasoning_markers

        found = ["completion"]
        if self.info is None or not has_unknown_format(self.info.chat_template or ""):
            found.append("tools")
        if self.info is not None:
            if self.info.vision:
                found.append("vision")
            if self.supports_audio:
                found.append("audio")
            if reasoning_markers(self.info.chat_template or "") is not None:
                found.append("thinking")
            if {"pre", "suf", "mid"} <= set(self.info.fim_tokens):
                found.append("insert")
        return found

    def template(self, info: ModelInfo) -> ChatTemplate:
        """The model's chat template, compiled once."""
        # Imported late: Jinja loads while the first model loads.
        from localllm.conversation.template import ChatTemplate
        from localllm.conversation.tools import has_unknown_format

        source = info.chat_template or ""
        if source not in self._templates:
            self._templates[source] = ChatTemplate(
                source, bos_text=info.bos_text, eos_text=info.eos_text
            )
            if has_unknown_format(source):
                log.warning(
                    "%s uses a tool-call format that this server does not support: "
                    "requests with tools are refused",
                    self.name,
                )
        return self._templates[source]

    @property
    def loaded(self) -> bool:
        return self.worker.loaded

    @property
    def state(self) -> State:
        if self.worker.loaded:
            return "loaded"
        if self.worker.loading:
            return "loading"
        return "available"

    async def engine(self) -> EngineClient:
        return await self.worker.engine()

    def called(self, alias: str) -> ServedModel:
        """A copy of this model under another of its names, for lists."""
        other = copy.copy(self)
        other.name = alias
        return other

    def lease(self) -> AbstractContextManager[None]:
        return self.worker.lease()


class InstalledModels(Protocol):
    """The models on disk."""

    def models(self) -> Sequence[ServedModel]:
        """The models of the last scan except the named ones. Never blocks."""

    def rules(self) -> Rules[ServedModel]:
        """The rules for names of installed models: INSTALLED, PART and CATALOG. They read the
        disk."""

    def rescan(self) -> bool:
        """Scan the disk for new models. Returns False if the last scan was just now."""


@dataclass(frozen=True, slots=True)
class StoreProgress:
    """The progress of a download.

    `state` is listing, checking, downloading, waiting, verifying or done. Bytes count all files.
    `digest` is the SHA-256 of the current file, or "".
    """

    state: str
    done_bytes: int = 0
    total_bytes: int = 0
    digest: str = ""


class ModelStore(Protocol):
    """Downloads and removes models. Both methods block and raise the LocalLLMError for the
    client."""

    def pull(self, ref: str, on_progress: Callable[[StoreProgress], None]) -> None:
        """Download `ref`. An exception in `on_progress` stops it; the downloaded part is kept."""

    def remove(self, ref: str) -> None:
        """Remove the files of the model that `ref` names."""
