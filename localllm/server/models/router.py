"""Resolves model names and aliases to served models."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from localllm.engine.worker.client import Host
from localllm.errors import LocalLLMError, ModelNotFoundError, UsageError
from localllm.server.models.served import InstalledModels
from localllm.server.models.served import ServedModel as ServedModel
from localllm.server.models.worker import ModelAdmission, ModelWorker
from localllm.server.proxy.upstreams import RemoteModel, Upstreams

# A suffix that clients add without meaning another model.
_TAG = ":latest"
_MAX_LISTED = 20


class ModelRouter:
    """Names to models, each loaded on first use. Built from ServedModels, or from a mapping of
    names to Hosts: those `named` at the start. An alias with `*` or `?` matches names that no model
    has.
    `installed` models are offered as well;
    `upstreams` are models of other servers."""

    def __init__(
        self,
        models: Mapping[str, Host] | Iterable[ServedModel],
        admission: ModelAdmission | None = None,
        installed: InstalledModels | None = None,
        upstreams: Upstreams | None = None,
    ) -> None:
        if isinstance(models, Mapping):
            models = [ServedModel(name, host) for name, host in models.items()]
        self.named = [*models]
        # The idle time that `unload_idle` runs with; 0 is never.
        self.idle_s = 0.0
        self.admission = admission
        self.upstreams = upstreams
        self._installed_models = installed
        self._starting: Sequence[ModelWorker] = ()
        self._names: dict[str, ServedModel] = {}
        self._patterns: dict[str, ServedModel] = {}
        for model in self.named:
            model.worker.admission = admission
            for alias in (model.name, *model.aliases):
                if "*" in alias or "?" in alias:
                    names = self._patterns
                else:
                    names = self._names
                other = names.setdefault(alias.lower(), model)
                if other is not model:
                    raise UsageError(f"{alias!r} would name both {other.name} and {model.name}")

    def list(self) -> Sequence[ServedModel]:
        """Every model on offer: those named at the start, then those installed."""
        return [*self.named, *self._installed()]

    def _installed(self) -> Sequence[ServedModel]:
        if self._installed_models is not None:
            return self._installed_models.models()
        return ()

    def names(self) -> Sequence[ServedModel]:
        """Every name on offer, aliases without wildcards among them, each with its model."""
        aliases = {a: m for a, m in self._names.items() if a != m.name.lower()}
        return [*self.list(), *(model.called(alias) for alias, model in aliases.items())]

    def listed(self, name: str) -> ServedModel:
        """The model of that name as `names` has it. Raises ModelNotFoundError."""
        model = self.resolve(name)
        aliased = _key(name) in self._names and _key(name) != model.name.lower()
        if aliased:
            return model.called(_key(name))
        return model

    def elsewhere(self) -> Sequence[RemoteModel]:
        """The models of upstreams whose names no model here has."""
        here = {model.name.lower() for model in self.list()}
        if self.upstreams is not None:
            remote = self.upstreams.models()
        else:
            remote = []
        return [model for model in remote if model.name.lower() not in here]

    def workers(self) -> Sequence[ModelWorker]:
        """Every worker once, however many names share it."""
        return [*dict.fromkeys(model.worker for model in self.list())]

    async def find(self, name: str | None) -> ServedModel:
        """`resolve`, in a thread where it has to read the disk; then plans the model, so that its
        metadata is known. Raises ModelNotFoundError and what planning ends in."""
        known = (
            not name or self._installed_models is None or self._names.get(_key(name)) is not None
        )
        if known:
            model = self.resolve(name)
        else:
            model = await asyncio.to_thread(self.resolve, name)
        await model.worker.planned()
        return model

    def offered(self, name: str) -> ServedModel | None:
        """This server's model of that name; None where it has none. Never reads the disk, as it is
        asked with each request for an upstream's model; patterns do not count."""
        return self._names.get(_key(name)) or next(
            (m for m in self._installed() if m.name.lower() == _key(name)), None
        )

    async def full(self, model: ServedModel) -> bool:
        """Whether `model` can't take another request now: loaded with all slots taken, or not
        fitting in memory."""
        if model.loaded:
            return model.info is not None and model.worker.in_use >= model.info.n_seq_max
        return (
            self.admission is not None
            and not model.worker.loading
            and not await self.admission.fits(model.worker)
        )

    def resolve(self, name: str | None) -> ServedModel:
        """The model of that name or alias; without a name the first that generates text. Raises
        ModelNotFoundError."""
        if not name:
            if not self.named:
                raise ModelNotFoundError("this server serves no model")
            generating = (m for m in self.named if not (m.facts.embeds or m.facts.ranks))
            return next(generating, self.named[0])
        model = self._names.get(_key(name))
        if model is None and self._installed_models is not None:
            model = self._installed_models.find(_key(name))
        model = model or self._by_pattern(name)
        if model is None:
            raise self._unknown(name)
        return model

    def _by_pattern(self, name: str) -> ServedModel | None:
        """The model of the most specific pattern that matches."""
        matching = [p for p in self._patterns if fnmatchcase(_key(name), p)]
        matching.sort(key=lambda pattern: pattern.count("*") + pattern.count("?") - len(pattern))
        if matching:
            return self._patterns[matching[0]]
        return None

    def _unknown(self, name: str) -> ModelNotFoundError:
        names = [m.name for m in self.list()]
        known = {**self._names, **{n.lower(): n for n in names}}
        # Part of a name is as common a slip as a typo, but less similar to the whole.
        near = [n for n in known if _key(name) in n][:3] or difflib.get_close_matches(
            _key(name), known, n=3
        )
        listed = ", ".join(names[:_MAX_LISTED]) + (
            f" and {len(names) - _MAX_LISTED} more" * (len(names) > _MAX_LISTED)
        )
        return ModelNotFoundError(
            f"no model {name[:100]!r} here; served: {listed}",
            hint=f"did you mean {' or '.join(near)}?" if near else "GET /v1/models lists them",
            param="model",
        )

    @property
    def health(self) -> tuple[Literal["ok", "loading", "error"], float]:
        """How the models named at the start are doing: "error" if all of them failed, "loading"
        with the share that is loaded."""
        if self._starting:
            return "loading", sum(w.progress for w in self._starting) / len(self._starting)
        failed = bool(self.named) and all(m.worker.failure for m in self.named)
        lost = failed and not any(w.loaded for w in self.workers())
        if lost:
            return ("error", 0.0)
        return ("ok", 1.0)

    async def preload(self) -> None:
        """Load the first model and those of the others that fit beside it; the rest wait for a
        request.

        A model that fails does not stop the others; the first failure is raised at the end."""
        failures: list[LocalLLMError] = []
        workers = [*dict.fromkeys(model.worker for model in self.named)]
        try:
            self._starting = workers
            for i, worker in enumerate(workers):
                if i and self.admission is not None and not await self.admission.fits(worker):
                    self._starting = [w for w in self._starting if w is not worker]
                    continue
                try:
                    await worker.engine()
                except LocalLLMError as e:
                    failures.append(e)
        finally:
            self._starting = ()
        if failures:
            raise failures[0]

    async def close(self) -> None:
        """Stop every model, and close the connections to upstreams."""
        if self.upstreams is not None and self.upstreams.client is not None:
            await self.upstreams.client.close()
        await asyncio.gather(*(worker.close() for worker in self.workers()))


def _key(name: str) -> str:
    return name.lower().removesuffix(_TAG)
