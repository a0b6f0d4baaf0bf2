"""Which models `localllm serve` offers: those named, the presets of config.toml, and what else is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.cli.compose.load_plan import Launch
    from localllm.cli.compose.served_models import Offers
    from localllm.server.models.router import ModelRouter
    from localllm.settings import Settings


def router_of(named: Sequence[str], aliases: Sequence[str], settings: Settings) -> ModelRouter:
    """What the command line and config.toml say is served; without a name the best model at hand. Raises as
    `launch.prepare` does, and UsageError."""
    from localllm.cli.compose.presets import load_presets
    from localllm.cli.compose.served_models import Offers
    from localllm.cli.compose.upstreams import load_upstreams
    from localllm.errors import ModelNotFoundError

    offers = Offers(settings, load_presets())
    upstreams = load_upstreams(settings.value("allow_upstream"))
    if upstreams is not None and not named and settings["model"].automatic and settings.value("only"):
        # --only without a model: those of other servers alone.
        launches = []
    else:
        try:
            launches = offers.prepare(named or [None])
        except ModelNotFoundError:
            if named or upstreams is None:
                raise
            launches = []
    router = router_for(launches, aliases, offers=offers, only=settings.value("only"))
    router.upstreams = upstreams
    return router


def router_for(
    launches: Sequence[Launch], aliases: Sequence[str] = (), *, offers: Offers | None = None, only: bool = True
) -> ModelRouter:
    """The models of `launches`, the presets of config.toml and, unless `only`, what else is installed, behind one door,
    with the memory of this machine as their limit. `aliases`: further names, as `--alias` takes them. Raises
    UsageError."""
    from localllm.cli.compose.load_plan import memory_for_models
    from localllm.cli.compose.served_models import Installed, Offers, check_names, further_presets, with_aliases
    from localllm.server.models.router import ModelRouter
    from localllm.server.models.worker import ModelAdmission
    from localllm.settings import Settings

    offers = offers or Offers(Settings())
    named = [(launch.local, offers.served(launch.local, launch.preset, launch)) for launch in launches]
    check_names([model.name for _, model in named])
    named += further_presets(offers, named, only=only)
    if not only or len(named) > 1:
        offers.admission = ModelAdmission(*memory_for_models())
    themselves = [(x.local, model) for x, (_, model) in zip(launches, named, strict=False) if x.preset is None]
    installed = Installed(offers, themselves, only=only)
    models = [model for _, model in named]
    for alias, model in with_aliases(aliases, models, installed.find).items():
        model.aliases = (*model.aliases, alias)
        if model not in models:
            models.append(model)
    return ModelRouter(models, offers.admission, installed)
