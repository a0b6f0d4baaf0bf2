"""Build the router of a server from four sources.

They are the named models, the presets of config.toml, other installed models, and the models of
other servers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from localllm.cli.serve.installed_models import DiskModels
from localllm.cli.serve.name_checks import alias_error
from localllm.cli.serve.presets import Preset, load_presets
from localllm.cli.serve.served_models import ServedModels, local_model_of, resolved_path
from localllm.cli.serve.upstreams import load_upstreams
from localllm.errors import ModelNotFoundError, UsageError
from localllm.library.types import LocalModel
from localllm.load.fit_several_models import memory_for_models
from localllm.load.load_plan import LoadPlan
from localllm.model_names import NameTable, Rule, find
from localllm.server.models.router import ModelRouter
from localllm.server.models.served import ServedModel
from localllm.server.models.worker import ModelAdmission
from localllm.settings import Settings

log = logging.getLogger("localllm.server")


def router_of(named: Sequence[str], aliases: Sequence[str], settings: Settings) -> ModelRouter:
    """Build the router from the command line and config.toml. Without a name, serve the best model
    at hand.

    Raises the same errors as `load_plan_named`, and UsageError.
    """
    served = ServedModels(settings, load_presets())
    loads: Sequence[LoadPlan] = ()
    presets: Sequence[Preset | None] = ()
    upstreams = load_upstreams(settings.value("allow_upstream"))
    # --only without a model: serve only the models of other servers.
    if upstreams is None or named or not settings["model"].automatic or not settings.value("only"):
        try:
            loads, presets = served.load_plans(named or [None])
        except ModelNotFoundError:
            if named or upstreams is None:
                raise
    router = router_for(loads, aliases, served=served, presets=presets, only=settings.value("only"))
    router.upstreams = upstreams
    return router


def router_for(
    loads: Sequence[LoadPlan],
    aliases: Sequence[str] = (),
    *,
    served: ServedModels | None = None,
    presets: Sequence[Preset | None] = (),
    only: bool = True,
) -> ModelRouter:
    """Build the router of the models in `loads`, presets, and, unless `only`, other installed
    models.

    The machine's memory limits how many of them are loaded together.

    `presets`: the presets that named the loads, if any.
    `aliases`: further names in the format of `--alias`. Raises UsageError.
    """
    served = served or ServedModels(Settings())
    presets = presets or [None] * len(loads)
    named = [
        (x.local, served.model(x.local, preset, x))
        for x, preset in zip(loads, presets, strict=True)
    ]
    names = [model.name for _, model in named]
    if len(set(names)) < len(names):
        raise UsageError("the same model is named twice", hint=f"named: {', '.join(names)}")
    named += _further_presets(served, named, only=only)
    if not only or len(named) > 1:
        device = next((load.device for load in loads), None)
        served.admission = ModelAdmission(*memory_for_models(device))
    without_preset = [pair for preset, pair in zip(presets, named, strict=False) if preset is None]
    installed = DiskModels(served, without_preset, only=only)
    models = [model for _, model in named]
    for local, model in without_preset:
        _add_adapters(served.adapter_models(local, model), models)
    for text in aliases:
        _add_alias(text, models, installed)
    return ModelRouter(models, served.admission, installed)


def _further_presets(
    served: ServedModels, named: Sequence[tuple[LocalModel, ServedModel]], *, only: bool
) -> Iterable[tuple[LocalModel, ServedModel]]:
    """Yield the presets of config.toml that were not named. With `only`, yield those of named
    models.

    A preset without a model on this disk is skipped, with a warning in the log.
    """
    taken_names = {model.name.lower() for _, model in named}
    named_paths = {resolved_path(local.path) for local, _ in named}
    for preset in served.presets:
        if preset.name.lower() in taken_names:
            continue
        local = local_model_of(preset)
        if local is None:
            log.warning(
                "skipped the preset %s: its model %s is not installed", preset.name, preset.model
            )
        elif not only or resolved_path(local.path) in named_paths:
            yield local, served.model(local, preset)


def _add_adapters(adapters: Iterable[ServedModel], models: list[ServedModel]) -> None:
    """Add the names of adapters to `models`, unless another model has the name."""
    for adapter in adapters:
        if any(adapter.name.lower() == model.name.lower() for model in models):
            log.warning(
                "the adapter %s has the name of a model; requests can choose it with `lora`",
                adapter.name,
            )
            continue
        models.append(adapter)


def _add_alias(text: str, models: list[ServedModel], installed: DiskModels) -> None:
    """Add an alias from `text` to one of `models`: `NAME=MODEL`, or `NAME` for the first model.

    If the name means an installed model, that model is added to `models`. Raises UsageError.
    """
    alias, equals, name = text.partition("=")
    if equals:
        served = NameTable((model.name, model) for model in models)
        model = find(name, {**installed.rules(), Rule.SERVED: served.named}).first
    else:
        model = next(iter(models), None)
    if not alias or model is None:
        raise alias_error(text, [served.name for served in models])
    model.aliases = (*model.aliases, alias)
    if model not in models:
        models.append(model)
