"""Make the served models: a name, defaults for requests, and a worker.

Names that differ only in their request defaults share one worker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from localllm.cli.engine_builds import EngineFallback
from localllm.cli.serve.presets import Preset, preset_and_model
from localllm.cli.serve.shared_adapters import Lora, can_share, numbered, together
from localllm.device.detect import detect
from localllm.device.types import Device
from localllm.engine.messages import Sampling
from localllm.engine.worker import backends
from localllm.engine.worker.client import Host, WorkerOptions
from localllm.engine.worker.pipe import prepare_ahead
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import LocalLLMError, ModelNotFoundError, UsageError
from localllm.library.digests import model_digest
from localllm.library.file_kinds import header_facts
from localllm.library.resolve import resolve
from localllm.library.types import LocalModel
from localllm.load.adapters import file_and_scale
from localllm.load.engine_title import engine_title
from localllm.load.fit_several_models import load_plans_together
from localllm.load.load_plan import LoadPlan, make_load_plan
from localllm.planner.plan import max_context
from localllm.planner.serialise import physics
from localllm.planner.types import Plan
from localllm.server.models.served import ModelDefaults, ServedModel
from localllm.server.models.worker import (
    LoadProgress,
    ModelAdmission,
    ModelMetadata,
    ModelWorker,
    PlannedModel,
    UnplannedHost,
)
from localllm.setting_table import Value
from localllm.settings import Settings

log = logging.getLogger("localllm.server")
# Load options of config.toml, sorted by name.
Loading = tuple[tuple[str, Value], ...]


class ServedModels:
    """Makes the served models, each worker once.

    `presets`: the presets of config.toml that add an id of their own.
    `admission`: decides which models may be loaded together.
    """

    def __init__(self, settings: Settings, presets: Sequence[Preset] = ()) -> None:
        self.admission: ModelAdmission | None = None
        self._settings = settings
        self._all_presets = presets
        self.presets = [p for p in presets if not p.of_itself]
        self._of_itself: dict[Path, Preset] = {}
        for preset in presets:
            if preset.of_itself and (local := on_disk(preset)) is not None:
                self._of_itself[real_path(local.path)] = preset
        self._workers: dict[tuple[Path, Loading, Lora], ModelWorker] = {}
        self._shared: dict[tuple[Path, Loading], Lora] = {}

    def load_plans(
        self, references: Sequence[str | None]
    ) -> tuple[list[LoadPlan], list[Preset | None]]:
        """Plan the models named on the command line together. Returns the plans and their presets.

        Raises the same errors as `load_plan_named`.
        """
        presets: list[Preset | None] = []
        texts: list[str | None] = []
        own: list[Settings] = []
        for reference in references:
            typed = reference or self._settings.value("model")
            preset, text = preset_and_model(self._all_presets, typed)
            presets.append(preset)
            texts.append(text)
            local = resolve(text)
            chosen = self.settings_for(local, preset)
            own.append(chosen)
            prepare_ahead(local.path, chosen.value("backend"))
        return load_plans_together(texts, self._settings, own), presets

    def settings_for(self, local: LocalModel, preset: Preset | None) -> Settings:
        """Return the settings that load `local`, as itself or through `preset`."""
        stated = self._preset_of(local, preset)
        settings = self._settings.preset(stated.loading)
        return settings.preset({"lora": self._loaded(local, stated)})

    def model(
        self, local: LocalModel, preset: Preset | None, load: LoadPlan | None = None
    ) -> ServedModel:
        """Return `local` as a served model, as itself or through `preset`.

        It is already planned as `load`, or it is planned on request.
        """
        stated = self._preset_of(local, preset)
        worker = self._worker(local, preset, load)
        adapters = None
        if self._lora(stated) != self._lora(self._preset_of(local, None)):
            adapters = numbered(self._lora(stated), self._loaded(local, stated))
        defaults = ModelDefaults(
            stated.sampling, stated.system, stated.thinking_tokens, adapters=adapters
        )
        return ServedModel(stated.name, aliases=stated.aliases, worker=worker, defaults=defaults)

    def adapter_models(self, local: LocalModel, model: ServedModel) -> Iterator[ServedModel]:
        """Yield each adapter of the `lora` setting as a name of its own, as vLLM does. `model` is
        `local` as itself."""
        stated = self._preset_of(local, None)
        lora = self._lora(stated)
        for number, scale in numbered(lora, self._loaded(local, stated)) or ():
            name = file_and_scale(lora[number])[0].name.removesuffix(".gguf")
            defaults = replace(model.defaults, adapters=((number, scale or 1.0),))
            yield ServedModel(name, worker=model.worker, defaults=defaults)

    def _lora(self, stated: Preset) -> Lora:
        """Return the adapters that requests to this name apply."""
        return tuple(self._settings.preset(stated.loading).value("lora"))

    def _loaded(self, local: LocalModel, stated: Preset) -> Lora:
        """Return the adapters that the worker of this name loads.

        Names of one model that differ only in their adapters share a worker with all of them. The
        worker's own scales are those of the model itself.
        """
        own = self._lora(stated)
        key = (real_path(local.path), _loading(stated))
        if key not in self._shared:
            itself = self._preset_of(local, None)
            alike = [self._preset_of(local, preset) for preset in self._presets_of(key[0])]
            loras = [self._lora(p) for p in alike if _loading(p) == key[1]]
            fitting = can_share(local, [lora for lora in loras if lora], self._settings)
            base = self._lora(itself) if _loading(itself) == key[1] else ()
            self._shared[key] = together(base, fitting)
        if numbered(own, self._shared[key]) is None:
            return own
        return self._shared[key]

    def _presets_of(self, path: Path) -> list[Preset]:
        """Return the presets of the model at `path`."""
        found = []
        for preset in self.presets:
            local = on_disk(preset)
            if local is not None and real_path(local.path) == path:
                found.append(preset)
        return found

    def _preset_of(self, local: LocalModel, preset: Preset | None) -> Preset:
        """Return the config of `local`, as itself or through `preset`.

        Values that a preset omits come from the table of the model itself.
        """
        itself = Preset(name=local.name, model=local.name)
        own = self._of_itself.get(real_path(local.path), itself)
        if preset is None:
            return replace(own, name=local.name)
        tokens = preset.thinking_tokens
        idle_s = preset.idle_s
        return replace(
            preset,
            loading={**own.loading, **preset.loading},
            sampling={**own.sampling, **preset.sampling},
            system=preset.system or own.system,
            thinking_tokens=own.thinking_tokens if tokens is None else tokens,
            idle_s=own.idle_s if idle_s is None else idle_s,
        )

    def _worker(
        self, local: LocalModel, preset: Preset | None, load: LoadPlan | None
    ) -> ModelWorker:
        stated = self._preset_of(local, preset)
        key = (real_path(local.path), _loading(stated), self._loaded(local, stated))
        if key not in self._workers:
            name = local.name
            if preset is not None and key[1]:
                name = preset.name
            if load is not None:
                worker = ModelWorker(name, planned(load), idle_s=stated.idle_s)
            else:
                # Names and sizes of files are known before the model is planned.
                facts = ModelMetadata(details=_details(local, ""))
                worker = ModelWorker(
                    name,
                    PlannedModel(UnplannedHost(), facts),
                    plan=self._planner(local, self.settings_for(local, preset)),
                    idle_s=stated.idle_s,
                )
            worker.admission = self.admission
            self._workers[key] = worker
        return self._workers[key]

    def _planner(self, local: LocalModel, settings: Settings) -> Callable[[int], PlannedModel]:
        def plan(spare_bytes: int) -> PlannedModel:
            return planned(make_load_plan(local, settings, "coding", of=2, spare_bytes=spare_bytes))

        return plan


def _loading(stated: Preset) -> Loading:
    """Return the load options apart from adapters."""
    return tuple(sorted((k, v) for k, v in stated.loading.items() if k != "lora"))


def planned(load: LoadPlan) -> PlannedModel:
    """Convert a LoadPlan to the server's type."""
    loading = LoadProgress()

    def smaller() -> WorkerOptions | None:
        less = load.smaller()
        if less is None:
            return None
        loading.notice = _given_up(load, less)
        log.warning("%s: %s", load.name, loading.notice)
        return less.options

    host: Host
    if load.embedding is not None:
        host = Supervisor(load.embedding)
    else:
        host = Supervisor(load.options, loading, smaller=smaller, observer=EngineFallback())
    plan = load.plan
    n_ctx = None
    architecture = ""
    figures: dict[str, object] = {}
    runs_on = _runs_on(load)
    if plan is not None:
        device = load.device or detect()
        figures = _physics(plan, device, load.options.engine.get("power", 1.0))
        runs_on += f", on {device.name}"
        n_ctx = plan.settings.n_ctx
        architecture = plan.model.architecture
    details = _details(load.local, architecture)
    details["images_off"] = load.projector.why_not
    details["audio"] = load.projector.audio
    details["runs_on"] = runs_on
    facts = ModelMetadata(
        sampling=own_sampling(plan),
        sampling_unthinking=own_sampling(plan, thinks=False),
        n_ctx=n_ctx,
        details=details,
        embeds=load.embedding is not None and not load.ranks,
        ranks=load.ranks,
        needs_bytes=load.needs_bytes,
        adapters=load.options.spec.adapters,
        physics=figures,
    )
    return PlannedModel(host, facts, loading)


def _runs_on(load: LoadPlan) -> str:
    """Describe the engine with its version, the KV cache and the drafter."""
    engine = backends.for_path(str(load.local.path), load.options.backend).declaration
    parts = [engine_title(engine)]
    if load.embedding is None:
        spec = load.options.spec
        keys, values = spec.kv_type_k, spec.kv_type_v
        parts.append(f"KV {keys if keys == values else f'{keys}/{values}'}")
        drafter = load.options.draft_path
        if drafter is not None:
            parts.append(f"drafter {Path(drafter).name}")
        else:
            parts.append(f"drafting {load.options.engine.get('draft', 'auto')}")
    return ", ".join(parts)


def _given_up(load: LoadPlan, less: LoadPlan) -> str:
    """Describe the reductions after a load ran out of memory."""
    requested = load.options.spec
    got = less.options.spec
    given_up = []
    if got.n_ctx < requested.n_ctx:
        given_up.append(f"{got.n_ctx:,} tokens of context instead of {requested.n_ctx:,}")
    if (got.kv_type_k, got.kv_type_v) != (requested.kv_type_k, requested.kv_type_v):
        given_up.append(f"{got.kv_type_k} instead of {requested.kv_type_k} for its KV cache")
    if got.placement != requested.placement:
        given_up.append("fewer layers on the GPU")
    if load.projector.file is not None and less.projector.file is None:
        given_up.append("no images")
    instead = " and ".join(given_up) or "smaller buffers"
    return f"memory ran out during loading; loading it again with {instead}"


def own_sampling(plan: Plan | None, *, thinks: bool = True) -> Sampling:
    """Return the sampling defaults of a model.

    They are the recommendations of the model's maker, or our own. Without `thinks` (reasoning off),
    the maker's recommendations for that mode are used.
    """
    if plan is None:
        return Sampling()
    sources = [plan.model.sampling]
    if not thinks and plan.model.sampling_non_thinking is not None:
        sources.append(plan.model.sampling_non_thinking)
    stated = {}
    for source in sources:
        for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty"):
            value = getattr(source, name)
            if value is not None:
                stated[name] = value
    return Sampling(**stated)


def _physics(plan: Plan, device: Device, power: object) -> dict[str, object]:
    return {**physics(plan, device), "power": power, "max_context": max_context(device, plan)}


def _details(local: LocalModel, architecture: str) -> dict[str, object]:
    return {
        "format": local.format,
        "file": local.path.name,
        "quant": local.quant,
        "bytes": local.size_bytes,
        "architecture": architecture,
        "digest": partial(model_digest, local),
        "header": cache(partial(header_facts, local.path)),
    }


def on_disk(preset: Preset) -> LocalModel | None:
    """Return the model of a preset, or None if it is not on this disk.

    Raises UsageError for a preset that can't be read.
    """
    try:
        return resolve(preset.model)
    except ModelNotFoundError:
        return None
    except LocalLLMError as e:
        raise UsageError(f"[models.{preset.name}] of config.toml: {e.message}", hint=e.hint) from e


def real_path(path: Path) -> Path:
    """Resolve links in `path`, so that each file has one path."""
    return Path(os.path.realpath(path))
