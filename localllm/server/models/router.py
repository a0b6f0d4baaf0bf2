"""Which models this server offers, by which names, and the Host behind each."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from localllm.conversation.reply import think_markers
from localllm.conversation.tools import unread
from localllm.engine.api import EngineClient, Host
from localllm.engine.messages import Sampling
from localllm.errors import BusyError, LocalLLMError, ModelNotFoundError, UsageError
from localllm.server.models.admission import ModelAdmission
from localllm_backends.contract import ModelInfo

if TYPE_CHECKING:
    from localllm.conversation.template import ChatTemplate

log = logging.getLogger("localllm.server")
# Suffixes clients add to a name without meaning another model.
_TAGS = (":latest",)


@dataclass
class ServedModel:
    """One model on offer. `sampling` is what a request that says nothing gets; `n_ctx` the planned context in tokens
    until the loaded engine's own number is known. `details` are facts for model lists (quant, bytes, licence …).
    `embeds`: it makes embeddings and no text. `needs_bytes` is what it was planned to take while loaded, and
    `admission` must agree before it is."""

    name: str
    host: Host
    aliases: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    n_ctx: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    embeds: bool = False
    needs_bytes: int = 0
    admission: ModelAdmission | None = None
    info: ModelInfo | None = None
    loaded: bool = False
    in_use: int = 0
    last_used_s: float = 0.0
    created_s: int = field(default_factory=lambda: int(time.time()))
    _templates: dict[str, ChatTemplate] = field(default_factory=dict)

    async def engine(self) -> EngineClient:
        """The loaded engine (loading it when needed); remembers its facts for the model lists.

        Raises BusyError or DoesNotFitError when there is no memory for it, and what loading ended in."""
        with self.lease():
            if self.admission is not None:
                await self.admission.admit(self)
            try:
                engine = await self.host.engine()
            except BaseException as e:
                self.loaded = self.loaded and not isinstance(e, LocalLLMError)
                if self.admission is not None and not self.loaded and self.in_use == 1:
                    self.admission.release(self)
                raise
            self.info, self.loaded = engine.info, True
            return engine

    async def snapshot(self) -> dict[str, Any]:
        """The engine's metrics; {} when it is not loaded. Looking is no use: it keeps nothing loaded."""
        if not self.loaded:
            return {}
        try:
            return await (await self.host.engine()).snapshot()
        except LocalLLMError:
            return {}  # it was being unloaded, or has crashed: the next request tells

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the model for a request: it is never unloaded while somebody does."""
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1
            self.last_used_s = asyncio.get_running_loop().time()

    async def unload(self) -> None:
        """Give the memory back; the next request loads it again. Raises BusyError while requests run.

        A request that comes while this runs waits for the Host, which loads again after it has closed."""
        if self.in_use:
            raise BusyError(f"{self.name} answers {self.in_use} requests")
        self.loaded = False
        await self.host.close()
        if self.admission is not None and not self.in_use:
            self.admission.release(self)

    def template(self, info: ModelInfo) -> ChatTemplate:
        """The model's chat template, compiled once."""
        # Templates need Jinja: it is read while the first model loads, not before.
        from localllm.conversation.template import ChatTemplate

        source = info.chat_template or ""
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, bos_text=info.bos_text, eos_text=info.eos_text)
            if unread(source):
                log.warning("%s writes tool calls in a notation that can't be read here: tools are refused", self.name)
        return self._templates[source]

    @property
    def served_n_ctx(self) -> int | None:
        """The one served-context number, in tokens, that every dialect reports."""
        return self.info.n_ctx if self.info is not None else self.n_ctx

    @property
    def capabilities(self) -> list[str]:
        """What it can do, in Ollama's words: completion, tools, thinking, insert (these two show once loaded), or
        embedding."""
        if self.embeds:
            return ["embedding"]
        found = ["completion"]
        if self.info is None or not unread(self.info.chat_template or ""):
            found.append("tools")
        if self.info is not None:
            if think_markers(self.info.chat_template or "") is not None:
                found.append("thinking")
            if {"pre", "suf", "mid"} <= set(self.info.fim_tokens):
                found.append("insert")
        return found


class ModelRouter:
    """Names to models. Built from ServedModels, or from a mapping of names to Hosts; each is loaded when first asked
    for."""

    def __init__(
        self, models: Mapping[str, Host] | Iterable[ServedModel], admission: ModelAdmission | None = None
    ) -> None:
        if isinstance(models, Mapping):
            models = [ServedModel(name, host) for name, host in models.items()]
        self._models = {m.name: m for m in models}
        self.admission = admission
        for model in self._models.values():
            model.admission = admission
        self._names: dict[str, ServedModel] = {}
        for model in self._models.values():
            for alias in (model.name, *model.aliases):
                other = self._names.setdefault(alias.lower(), model)
                if other is not model:
                    raise UsageError(f"{alias!r} would name both {other.name} and {model.name}")

    def list(self) -> list[ServedModel]:
        """Every model on offer, in the order given."""
        return list(self._models.values())

    def resolve(self, name: str | None) -> ServedModel:
        """The model of that name or alias; no name means the first one that generates text. Raises
        ModelNotFoundError with the names."""
        if not name:
            if self._models:
                first = next(iter(self._models.values()))
                return next((m for m in self._models.values() if not m.embeds), first)
            raise ModelNotFoundError("this server serves no model")
        key = name.lower()
        for tag in _TAGS:
            key = key.removesuffix(tag)
        model = self._names.get(key)
        if model is not None:
            return model
        near = difflib.get_close_matches(key, self._names, n=3)
        raise ModelNotFoundError(
            f"no model {name[:100]!r} here; served: {', '.join(self._models)}",
            hint=f"did you mean {' or '.join(near)}?" if near else "GET /v1/models lists them",
            param="model",
        )

    def host(self, name: str | None) -> Host:
        """The Host of `name`; raises ModelNotFoundError."""
        return self.resolve(name).host

    async def preload(self) -> tuple[ServedModel, ...]:
        """Load the first model, and of the others those that fit beside it; returns the ones that wait for a request.

        Raises what loading the first ended in."""
        waiting: list[ServedModel] = []
        for i, model in enumerate(self._models.values()):
            if i and self.admission is not None and not await self.admission.fits(model):
                waiting.append(model)
            else:
                await model.engine()
        return tuple(waiting)

    async def close(self) -> None:
        """Stop every model."""
        await asyncio.gather(*(m.host.close() for m in self._models.values()))
