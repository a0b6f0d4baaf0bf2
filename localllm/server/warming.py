"""Prefills the instructions of clients (system prompt and tools) in idle time, before the first
question.

Agents send instructions of 6,000 to 19,000 tokens with each question. `serve --warm last` keeps those
that each client sent last in a private file. After a start, they are prefilled while no request runs.
A request stops the prefill at once; what was computed stays in the prefix cache, and the next idle
time continues from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias

from localllm import json_store, paths
from localllm.engine.messages import Generation
from localllm.engine.worker.client import EngineClient
from localllm.errors import LocalLLMError
from localllm.server.generation.chat import ChatRequest, instructions_of
from localllm.server.generation.generate import run
from localllm.server.generation.job import GenerationJob, PrefillProgress, ReplyWriter
from localllm.server.generation.prompt import wants_bos
from localllm.server.http.accounts import caller, salt_of
from localllm.server.http.client_signs import SIGNS
from localllm.server.models.router import ModelRouter, ServedModel

log = logging.getLogger("localllm.server")
_MAX_KEPT = 16
_MAX_BYTES = 2**22
# Shorter instructions cost too little to keep them.
_MIN_CHARS = 2_000
# Time without a request before a prefill begins or continues.
_IDLE_S = 0.5


# Makes the request of a file for a model.
RequestFor: TypeAlias = Callable[[ServedModel], ChatRequest]


class Activity(Protocol):
    """The server, as far as warming knows it. `idle` is set while no request runs, and `active` is the
    number of those that run."""

    idle: asyncio.Event
    active: int
    models: ModelRouter


@dataclass(frozen=True, slots=True)
class Instructions:
    """The beginning of a client's prompts for a model, up to its first question. `tenant` and `salt`:
    whose cached prefixes it becomes."""

    model: str
    program: str
    tenant: str
    salt: str
    text: str


class Warming:
    """The instructions to prefill, and the task that prefills them.

    `request` makes the request whose instructions are prefilled. Without it, those that each client
    sent last are prefilled and kept. Only the event loop may use it."""

    def __init__(self, server: Activity, request: RequestFor | None = None) -> None:
        self._server = server
        self._request = request
        self._instructions: dict[tuple[str, str, str], Instructions] = {}
        self._seen: dict[tuple[str, str, str], bytes] = {}
        self._prefill: asyncio.Task[None] | None = None
        self.done = asyncio.Event()
        if request is None:
            found = json_store.entries(kept_path(), "instructions")
            entries = [json_store.record(Instructions, entry) for entry in found[-_MAX_KEPT:]]
            self._instructions = {_key(entry): entry for entry in entries if entry is not None}

    async def note(self, chat: ChatRequest, model: ServedModel, engine: EngineClient) -> None:
        """Keep the instructions of a request, if they are new and long enough."""
        if self._request is not None:
            return
        key = (model.name, SIGNS.get().program, caller().name)
        digest = _digest(chat)
        if self._seen.get(key) == digest:
            return
        self._seen[key] = digest
        text = ""
        with suppress(LocalLLMError):
            text = await instructions_of(chat, model, engine)
        if not _MIN_CHARS <= len(text) <= _MAX_BYTES:
            return
        entry = Instructions(*key, salt_of(chat.generation.salt), text)
        self._instructions.pop(key, None)
        self._instructions[key] = entry
        while len(self._instructions) > _MAX_KEPT:
            self._instructions.pop(next(iter(self._instructions)))
        entries = [asdict(kept_entry) for kept_entry in self._instructions.values()]
        await asyncio.to_thread(json_store.keep, kept_path(), {"instructions": entries})

    def stop(self) -> None:
        """Stop the prefill, because a request has arrived."""
        if self._prefill is not None:
            self._prefill.cancel()

    async def run(self) -> None:
        """Prefill everything, the newest instructions first. Returns when it is done."""
        for entry in await self._entries():
            await self._until_warm(entry)
        self.done.set()

    async def _entries(self) -> Sequence[Instructions]:
        if self._request is None:
            return [*reversed(self._instructions.values())]
        found = []
        for model in self._server.models.named:
            if model.loaded and not (model.facts.embeds or model.facts.ranks):
                engine = await model.engine()
                text = await instructions_of(self._request(model), model, engine)
                found.append(Instructions(model.name, "", "", "", text))
        return found

    async def _until_warm(self, entry: Instructions) -> None:
        model = next((m for m in self._server.models.named if m.name == entry.model), None)
        while model is not None and model.loaded:
            await self._server.idle.wait()
            await asyncio.sleep(_IDLE_S)
            if self._server.active:
                continue
            self._prefill = asyncio.create_task(self._read(entry, model))
            await asyncio.wait({self._prefill})
            prefill, self._prefill = self._prefill, None
            if prefill.cancelled():
                continue
            if prefill.exception() is not None:
                log.info("instructions were not prefilled: %s", prefill.exception())
            return

    async def _read(self, entry: Instructions, model: ServedModel) -> None:
        with model.lease():
            engine = await model.engine()
            generation = Generation(max_tokens=0, priority=-1)
            generation = replace(generation, tenant=entry.tenant, salt=entry.salt)
            add_bos = wants_bos(engine.info, entry.text)
            job = GenerationJob(entry.text, generation, add_bos=add_bos)
            with suppress(LocalLLMError):
                reply = await run(engine, job, ReplyWriter(), PrefillProgress())
                log.info("prefilled instructions of %s tokens", reply.usage.prompt_tokens)


def kept_path() -> Path:
    """The file of the instructions that clients sent last."""
    return paths.cache_dir() / "instructions.json"


def _key(entry: Instructions) -> tuple[str, str, str]:
    return entry.model, entry.program, entry.tenant


def _digest(chat: ChatRequest) -> bytes:
    options = chat.options
    head = [message for message in chat.messages if message["role"] == "system"]
    parts = [head, [*options.tools], options.effort, dict(options.template_kwargs or {})]
    return hashlib.sha256(json.dumps(parts, default=str).encode(errors="replace")).digest()
