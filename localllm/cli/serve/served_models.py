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
from localllm.cli.serve.shared_adapters import Lora, adapter_numbers, can_share, joined_adapters
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
        self.presets = [preset for preset in presets if not preset.is_for_model]
        self._model_tables: dict[Path, Preset] = {}
        for preset in presets:
            if preset.is_for_model and (local := local_model_of(preset)) is not None:
                self._model_tables[resolved_path(local.path)] = preset
        self._workers: dict[tuple[Path, Loading, Lora], ModelWorker] = {}
        self._shared_adapters: dict[tuple[Path, Loading], Lora] = {}

    def load_plans(
        self, references: Sequence[str | None]
    ) -> tuple[list[LoadPlan], list[Preset | None]]:
        """Plan the models named on the command line together. Returns the plans and their presets.

        Raises the same errors as `load_plan_named`.
        """
        presets: list[Preset | None] = []
        model_names: list[str | None] = []
        settings_of_models: list[Settings] = []
        for reference in references:
            name = reference or self._settings.value("model")
            preset, model_name = preset_and_model(self._all_presets, name)
            presets.append(preset)
            model_names.append(model_name)
            local = resolve(model_name)
            model_settings = self.settings_for(local, preset)
            settings_of_models.append(model_settings)
            prepare_ahead(local.path, model_settings.value("backend"))
        return load_plans_together(model_names, self._settings, settings_of_models), presets

    def settings_for(self, local: LocalModel, preset: Preset | None) -> Settings:
        """Return the settings that load `local`, as itself or through `preset`."""
        merged_preset = self._preset_of(local, preset)
        settings = self._settings.preset(merged_preset.loading)
        return settings.preset({"lora": self._loaded_adapters(local, merged_preset)})

    def model(
        self, local: LocalModel, preset: Preset | None, load: LoadPlan | None = None
    ) -> ServedModel:
        """Return `local` as a served model, as itself or through `preset`.

        It is already planned as `load`, or it is planned on request.
        """
        merged_preset = self._preset_of(local, preset)
        worker = self._worker(local, preset, load)
        adapters = None
        if self._adapters_of(merged_preset) != self._adapters_of(self._preset_of(local, None)):
            adapters = adapter_numbers(
                self._adapters_of(merged_preset), self._loaded_adapters(local, merged_preset)
            )
        defaults = ModelDefaults(
            merged_preset.sampling,
            merged_preset.system,
            merged_preset.thinking_tokens,
            adapters=adapters,
        )
        return ServedModel(
            merged_preset.name, aliases=merged_preset.aliases, worker=worker, defaults=defaults
        )

    def adapter_models(self, local: LocalModel, model: ServedModel) -> Iterator[ServedModel]:
        """Yield each adapter of the `lora` setting as a name of its own, as vLLM does. `model` is
        `local` as itself."""
        merged_preset = self._preset_of(local, None)
        lora = self._adapters_of(merged_preset)
        for number, scale in (
            adapter_numbers(lora, self._loaded_adapters(local, merged_preset)) or ()
        ):
            name = file_and_scale(lora[number])[0].name.removesuffix(".gguf")
            defaults = replace(model.defaults, adapters=((number, scale or 1.0),))
            yield ServedModel(name, worker=model.worker, defaults=defaults)

    def _adapters_of(self, merged_preset: Preset) -> Lora:
        """Return the adapters that requests to this name apply."""
        return tuple(self._settings.preset(merged_preset.loading).value("lora"))

    def _loaded_adapters(self, local: LocalModel, merged_preset: Preset) -> Lora:
        """Return the adapters that the worker of this name loads.

        Names of one model that differ only in their adapters share a worker with all of them. The
        worker's own scales are those of the model itself.
        """
        own_adapters = self._adapters_of(merged_preset)
        key = (resolved_path(local.path), _load_options(merged_preset))
        if key not in self._shared_adapters:
            model_preset = self._preset_of(local, None)
            presets_of_model = [
                self._preset_of(local, preset) for preset in self._presets_of(key[0])
            ]
            loras = [
                self._adapters_of(preset)
                for preset in presets_of_model
                if _load_options(preset) == key[1]
            ]
            sharable = can_share(local, [lora for lora in loras if lora], self._settings)
            model_adapters = (
                self._adapters_of(model_preset) if _load_options(model_preset) == key[1] else ()
            )
            self._shared_adapters[key] = joined_adapters(model_adapters, sharable)
        if adapter_numbers(own_adapters, self._shared_adapters[key]) is None:
            return own_adapters
        return self._shared_adapters[key]

    def _presets_of(self, path: Path) -> list[Preset]:
        """Return the presets of the model at `path`."""
        presets = []
        for preset in self.presets:
            local = local_model_of(preset)
            if local is not None and resolved_path(local.path) == path:
                presets.append(preset)
        return presets

    def _preset_of(self, local: LocalModel, preset: Preset | None) -> Preset:
        """Return the config of `local`, as itself or through `preset`.

        Values that a preset omits come from the table of the model itself.
        """
        empty_table = Preset(name=local.name, model=local.name)
        table = self._model_tables.get(resolved_path(local.path), empty_table)
        if preset is None:
            return replace(table, name=local.name)
        thinking_tokens = preset.thinking_tokens
        idle_s = preset.idle_s
        return replace(
            preset,
            loading={**table.loading, **preset.loading},
            sampling={**table.sampling, **preset.sampling},
            system=preset.system or table.system,
            thinking_tokens=table.thinking_tokens if thinking_tokens is None else thinking_tokens,
            idle_s=table.idle_s if idle_s is None else idle_s,
        )

    def _worker(
        self, local: LocalModel, preset: Preset | None, load: LoadPlan | None
    ) -> ModelWorker:
        merged_preset = self._preset_of(local, preset)
        key = (
            resolved_path(local.path),
            _load_options(merged_preset),
            self._loaded_adapters(local, merged_preset),
        )
        if key not in self._workers:
            name = local.name
            if preset is not None and key[1]:
                name = preset.name
            if load is not None:
                worker = ModelWorker(name, planned_model(load), idle_s=merged_preset.idle_s)
            else:
                # Names and sizes of files are known before the model is planned.
                facts = ModelMetadata(details=_details(local, ""))
                worker = ModelWorker(
                    name,
                    PlannedModel(UnplannedHost(), facts),
                    plan=self._planner(local, self.settings_for(local, preset)),
                    idle_s=merged_preset.idle_s,
                )
            worker.admission = self.admission
            self._workers[key] = worker
        return self._workers[key]

    def _planner(self, local: LocalModel, settings: Settings) -> Callable[[int], PlannedModel]:
        def plan(spare_bytes: int) -> PlannedModel:
            return planned_model(
                make_load_plan(local, settings, "coding", n_models=2, spare_bytes=spare_bytes)
            )

        return plan


def _load_options(merged_preset: Preset) -> Loading:
    """Return the load options apart from adapters."""
    return tuple(
        sorted((name, value) for name, value in merged_preset.loading.items() if name != "lora")
    )


def planned_model(load: LoadPlan) -> PlannedModel:
    """Convert a LoadPlan to the server's type."""
    progress = LoadProgress()

    def smaller() -> WorkerOptions | None:
        smaller_load = load.smaller()
        if smaller_load is None:
            return None
        progress.notice = _reductions_text(load, smaller_load)
        log.warning("%s: %s", load.name, progress.notice)
        return smaller_load.options

    host: Host
    if load.embedding is not None:
        host = Supervisor(load.embedding)
    else:
        host = Supervisor(load.options, progress, smaller=smaller, observer=EngineFallback())
    plan = load.plan
    n_ctx = None
    architecture = ""
    figures: dict[str, object] = {}
    runs_on = _engine_text(load)
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
    return PlannedModel(host, facts, progress)


def _engine_text(load: LoadPlan) -> str:
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


def _reductions_text(load: LoadPlan, smaller_load: LoadPlan) -> str:
    """Describe the reductions after a load ran out of memory."""
    requested = load.options.spec
    smaller_spec = smaller_load.options.spec
    reductions = []
    if smaller_spec.n_ctx < requested.n_ctx:
        reductions.append(
            f"{smaller_spec.n_ctx:,} tokens of context instead of {requested.n_ctx:,}"
        )
    if (smaller_spec.kv_type_k, smaller_spec.kv_type_v) != (
        requested.kv_type_k,
        requested.kv_type_v,
    ):
        reductions.append(
            f"{smaller_spec.kv_type_k} instead of {requested.kv_type_k} for its KV cache"
        )
    if smaller_spec.placement != requested.placement:
        reductions.append("fewer layers on the GPU")
    if load.projector.file is not None and smaller_load.projector.file is None:
        reductions.append("no images")
    reductions_text = " and ".join(reductions) or "smaller buffers"
    return f"memory ran out during loading; loading it again with {reductions_text}"


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
    recommended = {}
    for source in sources:
        for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty"):
            value = getattr(source, name)
            if value is not None:
                recommended[name] = value
    return Sampling(**recommended)


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


def local_model_of(preset: Preset) -> LocalModel | None:
    """Return the model of a preset, or None if it is not on this disk.

    Raises UsageError for a preset that can't be read.
    """
    try:
        return resolve(preset.model)
    except ModelNotFoundError:
        return None
    except LocalLLMError as e:
        raise UsageError(f"[models.{preset.name}] of config.toml: {e.message}", hint=e.hint) from e


def resolved_path(path: Path) -> Path:
    """Resolve links in `path`, so that each file has one path."""
    return Path(os.path.realpath(path))
