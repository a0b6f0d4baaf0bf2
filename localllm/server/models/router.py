"""Resolves model names and aliases to served models."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from localllm.engine.worker.client import Host
from localllm.errors import LocalLLMError, ModelNotFoundError, UsageError
from localllm.model_names import NameMatch, NameTable, Rule, find, without_tag
from localllm.server.models.served import InstalledModels
from localllm.server.models.served import ServedModel as ServedModel
from localllm.server.models.worker import ModelAdmission, ModelWorker
from localllm.server.proxy.upstreams import RemoteModel, Upstreams

_MAX_LISTED = 20


class ModelRouter:
    """Maps names to models, each loaded on first use.

    It is built from ServedModels or from a mapping of names to Hosts; these are the `named` models.
    An alias with `*` or `?` matches names that no model has. `installed` models are also offered,
    and `upstreams` are models of other servers.
    """

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
        # The idle time in seconds that `unload_idle` uses; 0 means never.
        self.idle_s = 0.0
        self.admission = admission
        self.upstreams = upstreams
        self._installed_models = installed
        self._starting: Sequence[ModelWorker] = ()
        self._names: NameTable[ServedModel] = NameTable()
        for model in self.named:
            model.worker.admission = admission
            for alias in (model.name, *model.aliases):
                other = self._names.add_alias(alias, model)[0]
                if other is not model:
                    raise UsageError(f"{alias!r} would name both {other.name} and {model.name}")

    def list(self) -> Sequence[ServedModel]:
        """Every model on offer: the named ones, then the installed ones."""
        return [*self.named, *self._installed()]

    def _installed(self) -> Sequence[ServedModel]:
        if self._installed_models is None:
            return ()
        return [m for m in self._installed_models.models() if m not in self.named]

    def names(self) -> Sequence[ServedModel]:
        """Every name on offer with its model, including aliases without wildcards."""
        aliased = [
            model.called(alias)
            for alias, model in self._names.items()
            if alias != model.name.lower()
        ]
        return [*self.list(), *aliased]

    def listed(self, name: str) -> ServedModel:
        """The model with that name, as `names` lists it. Raises ModelNotFoundError."""
        model = self.resolve(name)
        alias = without_tag(name.lower())
        if alias != model.name.lower() and self._names.named(name):
            return model.called(alias)
        return model

    def remote_models(self) -> Sequence[RemoteModel]:
        """The models of upstreams whose names no local model has."""
        if self.upstreams is None:
            return []
        installed = self._installed_names()
        return [
            remote
            for remote in self.upstreams.models()
            if not (self._names.named(remote.name) or installed.named(remote.name))
        ]

    def local_models_named(self, typed: str) -> Sequence[ServedModel]:
        """The local models with this name.

        It never reads the disk, because it is called for each request for an upstream's model.
        """
        return self._names.named(typed) or self._installed_names().named(typed)

    def remote_model_named(self, typed: str) -> RemoteModel | None:
        """The upstream's model with this name, or None if a local model has the name."""
        rules: dict[Rule, Callable[[str], Sequence[ServedModel | RemoteModel]]] = {
            Rule.SERVED: self.local_models_named
        }
        if self.upstreams is not None:
            rules[Rule.UPSTREAM] = self.upstreams.named
        model = find(typed, rules).first
        if isinstance(model, RemoteModel):
            return model
        return None

    def workers(self) -> Sequence[ModelWorker]:
        """Every worker once, even if several names share it."""
        return [*dict.fromkeys(model.worker for model in self.list())]

    async def find(self, name: str | None) -> ServedModel:
        """Resolve `name` and plan the model, so that its metadata is known.

        Disk reads run in a thread. Raises ModelNotFoundError and the errors of planning.
        """
        if not name or self._installed_models is None or self._names.named(name):
            model = self.resolve(name)
        else:
            model = await asyncio.to_thread(self.resolve, name)
        await model.worker.planned()
        return model

    async def full(self, model: ServedModel) -> bool:
        """True if `model` can't take another request now.

        It is loaded with all slots taken, or it does not fit in memory.
        """
        if model.loaded:
            return model.info is not None and model.worker.in_use >= model.info.n_seq_max
        return (
            self.admission is not None
            and not model.worker.loading
            and not await self.admission.fits(model.worker)
        )

    def resolve(self, name: str | None) -> ServedModel:
        """The model with that name or alias. Without a name, the first model that generates text.

        Raises ModelNotFoundError.
        """
        if not name:
            if not self.named:
                raise ModelNotFoundError(
                    "this server serves no model: `localllm pull NAME` downloads one"
                )
            generating = (m for m in self.named if not (m.facts.embeds or m.facts.ranks))
            return next(generating, self.named[0])
        match = self._match(name)
        if match.rule in (None, Rule.PATTERN) and self._found_more():
            match = self._match(name)
        model = match.first
        if model is None:
            raise self._unknown(name)
        if model not in self.named:
            model.worker.describe()
        return model

    def _match(self, name: str) -> NameMatch[ServedModel]:
        rules: dict[Rule, Callable[[str], Sequence[ServedModel]]] = {
            Rule.SERVED: self.local_models_named,
            Rule.PATTERN: self._by_pattern,
        }
        if self._installed_models is not None:
            rules |= self._installed_models.rules()
        return find(name, rules)

    def _installed_names(self) -> NameTable[ServedModel]:
        table: NameTable[ServedModel] = NameTable()
        for model in self._installed():
            table.add(model.name, model)
        for model in self._installed():
            for alias in model.aliases:
                table.add_alias(alias, model)
        return table

    def _by_pattern(self, typed: str) -> Sequence[ServedModel]:
        return self._names.by_pattern(typed) or self._installed_names().by_pattern(typed)

    def _found_more(self) -> bool:
        return self._installed_models is not None and self._installed_models.rescan()

    def _unknown(self, name: str) -> ModelNotFoundError:
        names = [m.name for m in self.list()] + [m.name for m in self.remote_models()]
        known = dict.fromkeys(alias for alias, _ in self._names.items())
        known |= dict.fromkeys(n.lower() for n in names)
        wanted = without_tag(name.lower())
        # Typing part of a name is as common as a typo, but part of a name is less similar to it.
        near = [n for n in known if wanted in n][:3]
        if not near:
            near = difflib.get_close_matches(wanted, known, n=3)
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        else:
            hint = "GET /v1/models lists all models"
        listed = ", ".join(names[:_MAX_LISTED])
        if len(names) > _MAX_LISTED:
            listed += f" and {len(names) - _MAX_LISTED} more"
        return ModelNotFoundError(
            f"this server has no model {name[:100]!r}; served: {listed}", hint=hint, param="model"
        )

    @property
    def health(self) -> tuple[Literal["ok", "loading", "error"], float]:
        """The state of the named models, with the loaded share (0 to 1).

        It is "loading" while they start, "error" if all of them failed and no model is loaded, else
        "ok".
        """
        if self._starting:
            return "loading", sum(w.progress for w in self._starting) / len(self._starting)
        failed = bool(self.named) and all(m.worker.failure for m in self.named)
        lost = failed and not any(w.loaded for w in self.workers())
        if lost:
            return ("error", 0.0)
        return ("ok", 1.0)

    async def preload(self) -> None:
        """Load the first model and those others that fit in memory with it.

        The rest are loaded on request. A model that fails does not stop the others; the first
        failure is raised at the end.
        """
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
