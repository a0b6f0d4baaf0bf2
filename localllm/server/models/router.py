"""Which models this server offers, by which names."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from localllm.engine.worker.api import Host
from localllm.errors import LocalLLMError, ModelNotFoundError, UsageError
from localllm.server.models.installed import InstalledModels
from localllm.server.models.served import ServedModel as ServedModel
from localllm.server.models.worker import ModelAdmission, ModelWorker
from localllm.server.proxy.upstreams import Upstreams

log = logging.getLogger("localllm.server")
# Suffixes clients add to a name without meaning another model.
_TAGS = (":latest",)
_MOST_LISTED = 20


# `list` is a method below.
Models: TypeAlias = list[ServedModel]
Workers: TypeAlias = list[ModelWorker]


@dataclass(frozen=True, slots=True)
class Health:
    """`loading` while the models named at the start are: `progress` from 0 to 1. `error` when none of them could be."""

    status: Literal["ok", "loading", "error"]
    progress: float = 1.0


class ModelRouter:
    """Names to models. Built from ServedModels, or from a mapping of names to Hosts; each is loaded when first asked
    for. An alias with `*` or `?` stands for the names it matches and nobody has. With a `shelf`, installed models are
    offered as well; `upstreams` are those that run in other servers."""

    def __init__(
        self,
        models: Mapping[str, Host] | Iterable[ServedModel],
        admission: ModelAdmission | None = None,
        shelf: InstalledModels | None = None,
        upstreams: Upstreams | None = None,
    ) -> None:
        if isinstance(models, Mapping):
            models = [ServedModel(name, host) for name, host in models.items()]
        self._models = {m.name: m for m in models}
        # Seconds without a request after which models are unloaded, where somebody looks; 0 is never.
        self.idle_s = 0.0
        self.admission = admission
        self.upstreams = upstreams
        self._shelf = shelf
        self._starting: tuple[ModelWorker, ...] = ()
        self._begun = False
        self._names: dict[str, ServedModel] = {}
        self._patterns: dict[str, ServedModel] = {}
        for model in self._models.values():
            model.worker.admission = admission
            for alias in (model.name, *model.aliases):
                names = self._patterns if is_pattern(alias) else self._names
                other = names.setdefault(alias.lower(), model)
                if other is not model:
                    raise UsageError(f"{alias!r} would name both {other.name} and {model.name}")

    def list(self) -> Models:
        """Every model on offer: those named at the start, in the order given, then those installed."""
        return [*self._models.values(), *(self._shelf.models() if self._shelf is not None else ())]

    def named(self) -> Models:
        """Those named at the start."""
        return [*self._models.values()]

    def workers(self) -> Workers:
        """Every worker once, also where several names share it."""
        return [*dict.fromkeys(model.worker for model in self.list())]

    async def find(self, name: str | None) -> ServedModel:
        """`resolve`, off the event loop where it has to look at the disk; and what a request must know of the model
        (its sampling, what it makes) is known then. Raises ModelNotFoundError and what planning ends in."""
        known = not name or self._shelf is None or self._known(name) is not None
        model = self.resolve(name) if known else await asyncio.to_thread(self.resolve, name)
        await model.worker.planned()
        return model

    async def has(self, name: str) -> bool:
        """Is a model of that name here: named at the start, or in the list of what is installed? (A pattern that matches is
        no name. Nothing looks at the disk for it: this is asked with every request for a model of another server.)"""
        return self._listed(name) is not None

    async def full(self, name: str) -> bool:
        """Has the model of that name no room for one more request now? Loaded: every place is taken; else: it does not
        fit beside what is in use."""
        model = self._listed(name)
        if model is None:
            return False
        if model.loaded:
            return model.info is not None and model.in_use >= model.info.n_seq_max
        return self.admission is not None and not model.worker.loading and not await self.admission.fits(model.worker)

    def _listed(self, name: str) -> ServedModel | None:
        installed = self._shelf.models() if self._shelf is not None else ()
        return self._known(name) or next((m for m in installed if m.name.lower() == _key(name)), None)

    def resolve(self, name: str | None) -> ServedModel:
        """The model of that name or alias; no name means the first one that generates text. Raises
        ModelNotFoundError with the names."""
        if not name:
            if self._models:
                first = next(iter(self._models.values()))
                return next((m for m in self._models.values() if not (m.embeds or m.ranks)), first)
            raise ModelNotFoundError("this server serves no model")
        model = self._known(name) or self._installed(name) or self._by_pattern(name)
        if model is None:
            raise self._unknown(name)
        return model

    def _known(self, name: str) -> ServedModel | None:
        return self._names.get(_key(name))

    def _installed(self, name: str) -> ServedModel | None:
        model = self._shelf.find(_key(name)) if self._shelf is not None else None
        if model is not None and model.worker.admission is None:
            model.worker.admission = self.admission
        return model

    def _by_pattern(self, name: str) -> ServedModel | None:
        """The model of the pattern that says most of the name."""
        matching = [p for p in self._patterns if fnmatchcase(_key(name), p)]
        return self._patterns[max(matching, key=_said)] if matching else None

    def _unknown(self, name: str) -> ModelNotFoundError:
        names = [m.name for m in self.list()]
        known = {**self._names, **{n.lower(): n for n in names}}
        # Half a name is a slip as common as a wrong letter, and further from the whole one than those are.
        near = [n for n in known if _key(name) in n][:3] or difflib.get_close_matches(_key(name), known, n=3)
        listed = ", ".join(names[:_MOST_LISTED]) + (
            f" and {len(names) - _MOST_LISTED} more" * (len(names) > _MOST_LISTED)
        )
        return ModelNotFoundError(
            f"no model {name[:100]!r} here; served: {listed}",
            hint=f"did you mean {' or '.join(near)}?" if near else "GET /v1/models lists them",
            param="model",
        )

    def host(self, name: str | None) -> Host:
        """The Host of `name`; raises ModelNotFoundError."""
        return self.resolve(name).host

    @property
    def health(self) -> Health:
        """How the models named at the start are doing."""
        if self._starting:
            return Health("loading", sum(w.progress for w in self._starting) / len(self._starting))
        named = [m.worker for m in self._models.values()]
        failed = self._begun and bool(named) and all(w.failure for w in named)
        return Health("error", 0.0) if failed and not any(w.loaded for w in self.workers()) else Health("ok")

    async def preload(self) -> tuple[ServedModel, ...]:
        """Load the first model, and of the others those that fit beside it; returns the ones that wait for a request.

        One that can't be loaded keeps no other from it; raises what the first of those ended in, at the end."""
        self._begun = True
        waiting: list[ServedModel] = []
        failures: list[LocalLLMError] = []
        first: dict[ModelWorker, ServedModel] = {}
        for model in self._models.values():
            first.setdefault(model.worker, model)
        try:
            self._starting = tuple(first)
            for i, (worker, model) in enumerate(first.items()):
                if i and self.admission is not None and not await self.admission.fits(worker):
                    waiting.append(model)
                    self._starting = tuple(w for w in self._starting if w is not worker)
                    continue
                try:
                    await worker.engine()
                except LocalLLMError as e:
                    failures.append(e)
        finally:
            self._starting = ()
        if failures:
            raise failures[0]
        return tuple(waiting)

    async def close(self) -> None:
        """Stop every model, and leave the servers that others run in."""
        if self.upstreams is not None:
            await self.upstreams.close()
        await asyncio.gather(*(worker.close() for worker in self.workers()))


def is_pattern(alias: str) -> bool:
    """True for an alias that stands for many names."""
    return "*" in alias or "?" in alias


def _said(pattern: str) -> int:
    return sum(c not in "*?" for c in pattern)


def _key(name: str) -> str:
    key = name.lower()
    for tag in _TAGS:
        key = key.removesuffix(tag)
    return key
