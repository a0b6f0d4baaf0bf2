"""The models that are served: a name, what its requests get, and a worker; names that differ only
in what a request gets share one worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from localllm.cli.serve.presets import Preset, preset_and_model
from localllm.device.detect import detect
from localllm.engine.messages import Sampling
from localllm.engine.worker.client import Host, WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import LocalLLMError, ModelNotFoundError, UsageError
from localllm.library.digests import model_digest
from localllm.library.file_kinds import header_facts
from localllm.library.resolve import resolve
from localllm.library.types import LocalModel
from localllm.load.load_plan import LoadPlan, make_load_plan
from localllm.load.sharing import load_plans_together
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


class ServedModels:
    """Makes the models that are served, each worker once. `presets` are those of config.toml, of
    which those that make a model of their own are kept; `admission` decides which of them may be
    loaded together."""

    def __init__(self, settings: Settings, presets: Sequence[Preset] = ()) -> None:
        self.admission: ModelAdmission | None = None
        self._settings = settings
        self._all_presets = presets
        self.presets = [p for p in presets if not p.of_itself]
        self._of_itself: dict[Path, Preset] = {}
        for preset in presets:
            if preset.of_itself and (local := on_disk(preset)) is not None:
                self._of_itself[real_path(local.path)] = preset
        self._workers: dict[tuple[Path, tuple[tuple[str, Value], ...]], ModelWorker] = {}

    def load_plans(
        self, references: Sequence[str | None]
    ) -> tuple[list[LoadPlan], list[Preset | None]]:
        """The models named on the command line, planned together, and the presets that they were
        named by. Raises as `load_plan_named` does."""
        presets: list[Preset | None] = []
        texts: list[str | None] = []
        own: list[Settings] = []
        for reference in references:
            typed = reference or self._settings.value("model")
            preset, text = preset_and_model(self._all_presets, typed)
            presets.append(preset)
            texts.append(text)
            own.append(self.settings_for(resolve(text), preset))
        return load_plans_together(texts, self._settings, own), presets

    def settings_for(self, local: LocalModel, preset: Preset | None) -> Settings:
        """How `local` is loaded, as itself or by a `preset`."""
        return self._settings.preset(self._preset_of(local, preset).loading)

    def model(
        self, local: LocalModel, preset: Preset | None, load: LoadPlan | None = None
    ) -> ServedModel:
        """`local` as it is served, as itself or by a `preset` of it; planned already as `load`, or
        when asked for."""
        said = self._preset_of(local, preset)
        worker = self._worker(local, preset, load)
        defaults = ModelDefaults(said.sampling, said.system, said.thinking_tokens)
        return ServedModel(said.name, aliases=said.aliases, worker=worker, defaults=defaults)

    def _preset_of(self, local: LocalModel, preset: Preset | None) -> Preset:
        """All that config.toml says of `local`, served as itself or by a `preset`: where that is
        silent, what it says of the model itself."""
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
        said = self._preset_of(local, preset)
        key = (real_path(local.path), tuple(sorted(said.loading.items())))
        if key not in self._workers:
            name = local.name
            if preset is not None and preset.loading:
                name = preset.name
            if load is not None:
                worker = ModelWorker(name, planned(load), idle_s=said.idle_s)
            else:
                # Names and sizes of files on this disk are known before they are planned.
                facts = ModelMetadata(details=_details(local, ""))
                worker = ModelWorker(
                    name,
                    PlannedModel(UnplannedHost(), facts),
                    plan=self._planner(local, self.settings_for(local, preset)),
                    idle_s=said.idle_s,
                )
            worker.admission = self.admission
            self._workers[key] = worker
        return self._workers[key]

    def _planner(self, local: LocalModel, settings: Settings) -> Callable[[int], PlannedModel]:
        def plan(spare_bytes: int) -> PlannedModel:
            return planned(make_load_plan(local, settings, "coding", of=2, spare_bytes=spare_bytes))

        return plan


def planned(load: LoadPlan) -> PlannedModel:
    """A LoadPlan as the server takes it."""
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
        host = Supervisor(load.options, loading, smaller=smaller)
    plan = load.plan
    n_ctx = None
    architecture = ""
    if plan is not None:
        n_ctx = plan.settings.n_ctx
        architecture = plan.model.architecture
    details = _details(load.local, architecture)
    details["images_off"] = load.projector.why_not
    facts = ModelMetadata(
        sampling=own_sampling(plan),
        sampling_unthinking=own_sampling(plan, thinks=False),
        n_ctx=n_ctx,
        details=details,
        embeds=load.embedding is not None and not load.ranks,
        ranks=load.ranks,
        needs_bytes=load.needs_bytes,
        physics=_physics(plan, load.options.engine.get("power", 1.0)),
    )
    return PlannedModel(host, facts, loading)


def _given_up(load: LoadPlan, less: LoadPlan) -> str:
    """A sentence on what a load that ran out of memory does without."""
    asked = load.options.spec
    got = less.options.spec
    given_up = []
    if got.n_ctx < asked.n_ctx:
        given_up.append(f"{got.n_ctx:,} tokens of context instead of {asked.n_ctx:,}")
    if (got.kv_type_k, got.kv_type_v) != (asked.kv_type_k, asked.kv_type_v):
        given_up.append(f"{got.kv_type_k} instead of {asked.kv_type_k} for its KV cache")
    if got.placement != asked.placement:
        given_up.append("less of it on the GPU")
    if load.projector.file is not None and less.projector.file is None:
        given_up.append("no images")
    instead = " and ".join(given_up) or "smaller buffers"
    return f"memory ran out while it was loaded: tried once more with {instead}"


def own_sampling(plan: Plan | None, *, thinks: bool = True) -> Sampling:
    """What a request that names no sampling gets: what the model's maker recommends (where the
    request switches reasoning off, unless it `thinks`: for that), and where nobody says, ours."""
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


def _physics(plan: Plan | None, power: object) -> dict[str, object]:
    if plan is None:
        return {}
    device = detect()
    return {**physics(plan, device), "power": power, "max_context": max_context(device, plan)}


def _details(local: LocalModel, architecture: str) -> dict[str, object]:
    return {
        "format": local.format,
        "quant": local.quant,
        "bytes": local.size_bytes,
        "architecture": architecture,
        "digest": partial(model_digest, local),
        "header": cache(partial(header_facts, local.path)),
    }


def on_disk(preset: Preset) -> LocalModel | None:
    """The files that a preset is of; None where they are not here. Raises UsageError for a preset
    that can't be read."""
    try:
        return resolve(preset.model)
    except ModelNotFoundError:
        return None
    except LocalLLMError as e:
        raise UsageError(f"[models.{preset.name}] of config.toml: {e.message}", hint=e.hint) from e


def real_path(path: Path) -> Path:
    """`path` without links: one file, however it is reached."""
    return Path(os.path.realpath(path))
