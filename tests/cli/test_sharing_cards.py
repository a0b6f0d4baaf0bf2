"""Models that are loaded together on a machine with several cards get one card each while
possible."""

from __future__ import annotations

from pathlib import Path

from localllm.device.name_lookup import resolve
from localllm.engine.worker.client import WorkerOptions
from localllm.library.types import LocalModel
from localllm.load.fit_several_models import one_card_each
from localllm.load.load_plan import LoadPlan
from localllm.planner.plan import plan_for
from localllm.planner.starting_settings import typical
from localllm.planner.types import Workload
from localllm_backends.contract import LoadSpec
from localllm_catalog import catalog

MODELS = {m.id: m for m in catalog.load().models}


def load(machine: str, name: str) -> LoadPlan:
    plan = plan_for(
        resolve(machine),
        MODELS[name],
        typical([v for v in MODELS[name].variants if v.format == "gguf"]),
        Workload(),
    )
    spec = LoadSpec(f"{name}.gguf", placement=plan.settings.placement)
    return LoadPlan(
        name,
        LocalModel(name, Path(f"{name}.gguf"), "gguf", 1, "Q4_K_M", "path"),
        WorkerOptions(spec),
        plan,
    )


def cards(machine: str, *names: str) -> list[tuple[int, ...]]:
    placed = one_card_each([load(machine, name) for name in names], resolve(machine))
    for one in placed:
        assert one.plan is not None
        assert one.options.spec.placement == one.plan.settings.placement
    return [one.options.spec.placement.cards for one in placed]


def test_a_second_model_goes_to_the_card_that_has_room() -> None:
    assert cards("RTX 3090 + RTX 4090", "qwen3-32b", "qwen3-8b") == [(1,), (0,)]
    assert cards("3x RTX 3090", "qwen3-32b", "qwen3-32b", "qwen3-32b") == [(0,), (1,), (2,)]


def test_models_that_fit_one_card_together_share_it() -> None:
    assert cards("RTX 5090 + RTX 3060 12GB", "qwen3-8b", "qwen3-8b") == [(0,), (0,)]


def test_models_take_turns_on_the_fastest_card_if_no_other_has_room() -> None:
    assert cards("RTX 4090 + RTX 3060 12GB", "qwen3-32b", "qwen3-32b") == [(0,), (0,)]
