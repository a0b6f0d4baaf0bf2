"""Which models `localllm serve` offers: those named, the presets of config.toml, and whatever else is installed; names
that differ only in what a request gets share one worker."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from localllm.errors import LocalLLMError, ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from localllm.cli.compose.load_plan import Launch
    from localllm.cli.compose.presets import Preset
    from localllm.library.types import LocalModel
    from localllm.planner.types import Plan
    from localllm.server.models.served import ServedModel
    from localllm.server.models.worker import ModelAdmission, ModelMetadata, ModelWorker, PlannedModel
    from localllm.settings import Settings, Value

log = logging.getLogger("localllm.server")
# The disk is looked at again when a list is asked for this long after the last look, and for a name nobody has sooner.
_FRESH_S = 10.0
_LOOK_AGAIN_S = 1.0


class Offers:
    """Makes the models on offer, each worker once. `presets` are those of config.toml; `admission` decides which of
    them may be loaded together."""

    def __init__(self, settings: Settings, presets: Sequence[Preset] = ()) -> None:
        self.admission: ModelAdmission | None = None
        self._settings = settings
        self._presets = {p.name.lower(): p for p in presets}
        self._of_itself: dict[Path, Preset] = {}
        for preset in presets:
            if preset.of_itself and (local := _on_disk(preset)) is not None:
                self._of_itself[_real(local.path)] = preset
        self._workers: dict[tuple[Path, tuple[tuple[str, Value], ...]], ModelWorker] = {}

    def prepare(self, references: Sequence[str | None]) -> list[Launch]:
        """The models and presets named on the command line, planned together. Raises as `launch.prepare` does."""
        from dataclasses import replace

        from localllm.cli.compose.load_plan import prepare_all
        from localllm.library.resolve import resolve

        presets = [self.preset(reference) for reference in references]
        texts = [p.model if p is not None else r for r, p in zip(references, presets, strict=True)]
        own = [
            self.settings_for(resolve(text or self._settings.value("model")), preset)
            for text, preset in zip(texts, presets, strict=True)
        ]
        launches = prepare_all(texts, self._settings, own)
        return [replace(launch, preset=preset) for launch, preset in zip(launches, presets, strict=True)]

    def preset(self, name: str | None) -> Preset | None:
        """The preset of that name that makes a model of its own; None where there is none."""
        found = self._presets.get((name or "").lower())
        return None if found is None or found.of_itself else found

    def further(self) -> list[Preset]:
        """Every preset that makes a model of its own."""
        return [p for p in self._presets.values() if not p.of_itself]

    def settings_for(self, local: LocalModel, preset: Preset | None) -> Settings:
        """How `local` is loaded, as itself or by a `preset`."""
        return self._settings.preset(self._loading(local, preset))

    def served(self, local: LocalModel, preset: Preset | None, launch: Launch | None = None) -> ServedModel:
        """`local` on offer, as itself or by a `preset` of it; planned already as `launch`, or when asked for."""
        from localllm.server.models.served import ModelDefaults, ServedModel

        own = self._of_itself.get(_real(local.path))
        chosen = [p for p in (own, preset) if p is not None]
        budgets = [p.thinking_tokens for p in chosen if p.thinking_tokens is not None]
        defaults = ModelDefaults(
            {k: v for p in chosen for k, v in p.sampling.items()},
            next((p.system for p in reversed(chosen) if p.system), ""),
            budgets[-1] if budgets else None,
        )
        return ServedModel(
            preset.name if preset is not None else local.name,
            aliases=next((p.aliases for p in (preset, own) if p is not None), ()),
            worker=self._worker(local, preset, launch),
            defaults=defaults,
        )

    def _loading(self, local: LocalModel, preset: Preset | None) -> dict[str, Value]:
        own = self._of_itself.get(_real(local.path))
        return {**(own.loading if own is not None else {}), **(preset.loading if preset is not None else {})}

    def _worker(self, local: LocalModel, preset: Preset | None, launch: Launch | None) -> ModelWorker:
        from localllm.server.models.worker import ModelWorker, UnplannedHost

        key = (_real(local.path), tuple(sorted(self._loading(local, preset).items())))
        if key not in self._workers:
            name = preset.name if preset is not None and preset.loading else local.name
            idle = [p.idle_s for p in (preset, self._of_itself.get(key[0])) if p is not None and p.idle_s is not None]
            idle_s = idle[0] if idle else None
            if launch is not None:
                ready = planned(launch)
                worker = ModelWorker(name, ready.host, ready.facts, loading=ready.loading, idle_s=idle_s)
            else:
                plan = self._planner(local, self.settings_for(local, preset))
                worker = ModelWorker(name, UnplannedHost(), facts_before(local), plan=plan, idle_s=idle_s)
            worker.admission = self.admission
            self._workers[key] = worker
        return self._workers[key]

    def describe(self, local: LocalModel, model: ServedModel) -> None:
        """Say of a model that nobody has asked for yet what it would be if it were loaded now: its context, and whether
        it makes text, vectors or scores. What can't be planned keeps what its name says."""
        if model.state == "available":
            try:
                model.worker.facts = self._planner(local, self.settings_for(local, None))(0).facts
            except LocalLLMError as e:
                log.info("%s can't be planned: %s", model.name, e.message)

    def _planner(self, local: LocalModel, settings: Settings) -> Callable[[int], PlannedModel]:
        def plan(spare_bytes: int) -> PlannedModel:
            from localllm.cli.compose.load_plan import prepare_local

            return planned(prepare_local(local, settings, "coding", of=2, spare_bytes=spare_bytes))

        return plan


def planned(launch: Launch, told: Callable[[float], None] | None = None) -> PlannedModel:
    """A launch as the server takes it. `told` hears too how much of it is loaded, from 0 to 1."""
    from localllm.cli.compose.load_plan import own_sampling
    from localllm.engine.worker.supervisor import Supervisor
    from localllm.server.models.worker import LoadProgress, ModelMetadata, PlannedModel

    loading = LoadProgress()

    def hear(share: float) -> None:
        loading(share)
        if told is not None:
            told(share)

    host = Supervisor(launch.embedding) if launch.embedding is not None else Supervisor(launch.options, hear)
    plan = launch.plan
    facts = ModelMetadata(
        sampling=own_sampling(plan),
        sampling_unthinking=own_sampling(plan, thinks=False),
        n_ctx=plan.settings.n_ctx if plan is not None else None,
        details={
            **_details(launch.local, plan.model.architecture if plan is not None else ""),
            "images_off": launch.eyes.why_not,
        },
        embeds=launch.embedding is not None and not launch.ranks,
        ranks=launch.ranks,
        needs_bytes=launch.needs_bytes,
        physics=_physics(plan),
    )
    return PlannedModel(host, facts, loading)


def _physics(plan: Plan | None) -> dict[str, object]:
    from localllm.device.detect import detect
    from localllm.planner.serialise import physics

    return physics(plan, detect()) if plan is not None else {}


def facts_before(local: LocalModel) -> ModelMetadata:
    """What is known of files on this disk by their names and sizes."""
    from localllm.server.models.worker import ModelMetadata

    return ModelMetadata(details=_details(local, ""))


def _details(local: LocalModel, architecture: str) -> dict[str, object]:
    from localllm.library.digests import ModelDigest

    return {
        "format": local.format, "quant": local.quant, "bytes": local.size_bytes, "architecture": architecture,
        "digest": ModelDigest(local),
    }  # fmt: skip


class Installed:
    """The models on this disk (implements localllm.server.models.installed.Shelf). Their names are known from the start; what
    each would be is found out in a thread, or when it is asked for. `named` were named at the start, with
    their files; with `only` no others are offered, and those answer to all their names."""

    def __init__(self, offers: Offers, named: Sequence[tuple[LocalModel, ServedModel]], *, only: bool) -> None:
        self._offers, self._only = offers, only
        self._named = {_real(local.path): model for local, model in reversed(named)}
        self._named_locals = [local for local, _ in named]
        self._locals: list[LocalModel] = list(self._named_locals)
        self._listed: dict[Path, ServedModel] = {}
        self._undescribed: dict[Path, LocalModel] = {}
        self._lock = threading.Lock()
        self._looked_s = -_FRESH_S
        self._looking: threading.Thread | None = None
        self.look()

    def models(self) -> Sequence[ServedModel]:
        """See Shelf. A look at the disk that is due goes on in a thread meanwhile."""
        if (self._stale or self._undescribed) and (self._looking is None or not self._looking.is_alive()):
            self._looking = threading.Thread(target=self._look_closely, name="library", daemon=True)
            self._looking.start()
        return [*self._listed.values()]

    @property
    def _stale(self) -> bool:
        return time.monotonic() - self._looked_s > _FRESH_S

    def _look_closely(self) -> None:
        if self._stale:
            self.look()
        for path in [*self._undescribed]:
            self._describe(path)

    def _describe(self, path: Path) -> None:
        local, model = self._undescribed.pop(path, None), self._listed.get(path)
        if local is not None and model is not None:
            self._offers.describe(local, model)

    def find(self, name: str) -> ServedModel | None:
        """See Shelf."""
        found = self._find(name)
        if found is None and time.monotonic() - self._looked_s > _LOOK_AGAIN_S:
            self.look()
            found = self._find(name)
        return found

    def look(self) -> None:
        """Look at the disk. Models that are there no more are no longer listed; one that is loaded stays until it is
        unloaded."""
        from localllm.library import store

        if self._only:
            self._looked_s = time.monotonic()
            return
        with self._lock:
            found = {_real(local.path): local for local in reversed(store.scan())}
            taken = {model.name.lower() for model in self._named.values()}
            listed: dict[Path, ServedModel] = {}
            for path, local in reversed(found.items()):
                if path in self._named:
                    continue
                model = self._listed.get(path) or self._offer(local, taken)
                if model is not None:
                    taken.add(model.name.lower())
                    listed[path] = model
                    if path not in self._listed:
                        self._undescribed[path] = local
            for path, model in self._listed.items():
                if model.loaded:
                    listed.setdefault(path, model)
            self._locals = [*self._named_locals, *(found[path] for path in listed if path in found)]
            self._listed = listed
            self._looked_s = time.monotonic()

    def _offer(self, local: LocalModel, taken: set[str]) -> ServedModel | None:
        """A model for the list, under a name nobody has; None where there is none left."""
        from dataclasses import replace

        for name in (local.name, f"{local.name}:{local.quant}"):
            if name.lower() not in taken:
                return self._offers.served(replace(local, name=name), None)
        return None

    def _find(self, name: str) -> ServedModel | None:
        from localllm.library.resolve import best_of, matching

        locals_ = self._locals
        candidates = matching(name, locals_)
        if not candidates:
            return None
        models = [model for local in candidates if (model := self._of(local)) is not None]
        # One that is in memory answers first: what is free now must not decide between two quants of a model.
        in_memory = [m for m in models if m.state != "available"]
        named = [m for m in models if m in self._named.values()]
        if in_memory or named:
            return (in_memory or named)[0]
        return self._of(best_of(candidates))

    def _of(self, local: LocalModel) -> ServedModel | None:
        path = _real(local.path)
        self._describe(path)
        return self._named.get(path) or self._listed.get(path)


def check_names(names: Sequence[str]) -> None:
    """Raises UsageError when one is there twice."""
    if len(set(names)) < len(names):
        raise UsageError("the same model is named twice", hint=f"named: {', '.join(names)}")


def further_presets(
    offers: Offers, named: Sequence[tuple[LocalModel, ServedModel]], *, only: bool
) -> Iterable[tuple[LocalModel, ServedModel]]:
    """The presets of config.toml that were not named; with `only` those of named models. One whose model is not on
    this disk is left out, and the log says so."""
    taken = {model.name.lower() for _, model in named}
    paths = {_real(local.path) for local, _ in named}
    for preset in offers.further():
        if preset.name.lower() in taken:
            continue
        local = _on_disk(preset)
        if local is None:
            log.warning("the preset %s is left out: no model %s on this disk", preset.name, preset.model)
        elif not only or _real(local.path) in paths:
            yield local, offers.served(local, preset)


def with_aliases(
    sent: Sequence[str], models: Sequence[ServedModel], find: Callable[[str], ServedModel | None]
) -> Mapping[str, ServedModel]:
    """`NAME=MODEL` texts, or `NAME` for the first model: each further name with its model, one of `models` or one that
    `find` knows. Raises UsageError."""
    by_name = {model.name.lower(): model for model in models}
    found: dict[str, ServedModel] = {}
    for text in sent:
        alias, equals, name = text.partition("=")
        model = (by_name.get(name.lower()) or find(name)) if equals else next(iter(models), None)
        if not alias or model is None:
            raise UsageError(
                f"--alias {text!r} must be NAME=MODEL with a model that is served",
                hint=f"served: {', '.join(m.name for m in models)}",
            )
        found[alias] = model
    return found


def _on_disk(preset: Preset) -> LocalModel | None:
    from localllm.library.resolve import resolve

    try:
        return resolve(preset.model)
    except ModelNotFoundError:
        return None
    except LocalLLMError as e:
        raise UsageError(f"[models.{preset.name}] of config.toml: {e.message}", hint=e.hint) from e


def _real(path: Path) -> Path:
    from pathlib import Path as ThePath

    return ThePath(os.path.realpath(path))
