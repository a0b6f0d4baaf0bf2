"""The predicted gain of drafting agrees with published gains and counts for the purpose. The engine
loads the draft that was planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.device.name_lookup import resolve
from localllm.engine.worker import backends
from localllm.load.load_plan import load_plan_named
from localllm.planner import drafting
from localllm.planner.plan import plan_for
from localllm.planner.recommend import recommend
from localllm.planner.starting_settings import Overrides, typical
from localllm.planner.types import CompanionDrafter, Plan, Workload
from localllm.settings import Settings
from localllm_catalog import catalog
from models import tiny_gguf

MODELS = {m.id: m for m in catalog.load().models}
# Decode speed with the model's own heads ÷ without: ggml-org/llama.cpp#22673,
# github.com/sudoingX/qwen38-mtp (pull requests 31, 33, 42, 43, 62), for the RTX 4090 the makers'
# 44.8 to 104 tok/s. On a Strix Halo, 7 tok/s for a 27B are from an 8-bit file.
PUBLISHED = [
    ("RTX 4090", "qwen3.6-27b", 104 / 44.8),
    ("RTX 5090", "qwen3.8-27b", 171.7 / 76.3),
    ("RTX 3090", "qwen3.8-27b", 52.8 / 31.9),
    ("RTX 5080", "qwen3.8-27b", 101.3 / 53.4),
    ("A10G 24GB", "qwen3.6-27b", 45 / 25),
    ("Strix Halo 128GB", "qwen3.6-27b Q8_0", 16.8 / 7.0),
    ("RTX 5090", "qwen3.6-35b-a3b", 1.10),
    ("Tesla P40", "qwen3.6-35b-a3b", 1.35),
    ("M1 Max 64GB", "qwen3.6-35b-a3b", 49.0 / 40.5),
]


def planned(machine: str, model: str, purpose: str = "chat", draft: str = "") -> Plan:
    """Return the plan of the model's usual file, or of the quant after its name."""
    name, _, quant = model.partition(" ")
    files = [v for v in MODELS[name].variants if v.format == "gguf"]
    file = typical([v for v in files if not quant or v.quant == quant])
    workload = Workload(purpose)  # type: ignore[arg-type]
    return plan_for(
        resolve(machine), MODELS[name], file, workload, overrides=Overrides(draft=draft)
    )


@pytest.mark.parametrize(("machine", "model", "published"), PUBLISHED)
def test_published_gains_of_a_models_own_heads_are_in_the_range(
    machine: str, model: str, published: float
) -> None:
    gain = drafting.heads_gain(resolve(machine), planned(machine, model))
    assert gain is not None
    assert gain.low <= published <= gain.high
    assert "published" in gain.basis


def test_draft_heads_are_suggested_only_if_model_and_engine_support_them() -> None:
    device = resolve("M4 Max 128GB")
    assert drafting.heads_gain(device, planned("M4 Max 128GB", "qwen3-8b")) is None
    files = next(v for v in MODELS["qwen3.6-27b"].variants if v.format == "mlx")
    assert (
        drafting.heads_gain(device, plan_for(device, MODELS["qwen3.6-27b"], files, Workload()))
        is None
    )
    said = recommend(resolve("RTX 4090"), [MODELS["qwen3.6-27b"]], Workload(), limit=1).plans[0]
    if said.backend == "llamacpp":
        assert any(r.startswith("with --draft mtp (its MTP heads") for r in said.reasons)


@pytest.mark.parametrize("machine", ["M4 Max 128GB", "M3 Ultra 256GB"])
def test_apple_gpus_before_m5_are_predicted_to_gain_little_from_heads(machine: str) -> None:
    gain = drafting.heads_gain(resolve(machine), planned(machine, "qwen3.8-27b"))
    assert gain is not None
    assert gain.low < 1.05
    assert 1.06 <= gain.high <= 1.4
    assert gain.high < 1.3


def test_loaded_draft_heads_count_in_the_rank_and_are_explained() -> None:
    plain, drafted = (
        planned("RTX 4090", "qwen3.6-27b"),
        planned("RTX 4090", "qwen3.6-27b", draft="mtp"),
    )
    assert plain.drafting is None
    assert drafted.drafting is not None
    assert drafted.drafting.value > 1.5
    assert drafted.score > plain.score


def test_edits_count_for_an_agent_and_not_for_a_chat() -> None:
    for purpose, counts in (("coding", True), ("chat", False)):
        plan = planned("M4 Max 128GB", "llama-3.3-70b-instruct", purpose)
        assert (plan.drafting is not None) is counts
    coding = planned("M4 Max 128GB", "llama-3.3-70b-instruct", "coding")
    off = planned("M4 Max 128GB", "llama-3.3-70b-instruct", "coding", draft="off")
    assert coding.drafting is not None
    assert coding.drafting.low == 1.0 < coding.drafting.value < coding.drafting.high
    assert "assumed" in coding.drafting.basis
    assert off.drafting is None
    assert coding.score > off.score


def test_explicitly_requested_lookups_are_planned_and_loaded_for_a_recurrent_model(
    tmp_path: Path,
) -> None:
    path = tiny_gguf.write_hybrid(tmp_path / "model.gguf")
    plans = {
        draft: load_plan_named(str(path), Settings({"draft": draft, "context": 512}))
        for draft in ("auto", "ngram")
    }
    auto, named = plans["auto"].plan, plans["ngram"].plan
    assert auto is not None
    assert named is not None
    assert (auto.settings.n_rewind, named.settings.n_rewind) == (0, 3)
    assert named.memory.recurrent_bytes == 4 * auto.memory.recurrent_bytes
    assert plans["ngram"].options.spec.n_rewind == 3
    backend = backends.for_path(str(path)).load(plans["ngram"].options.spec)
    try:
        assert backend.capabilities.rewind_tokens == 3
    finally:
        backend.close()


def test_an_edit_of_a_recurrent_model_is_predicted_with_the_snapshots_it_needs() -> None:
    device, auto = resolve("M4 Max 128GB"), planned("M4 Max 128GB", "qwen3.8-27b")
    assert drafting.edit_gain(device, auto) is None
    sentence = drafting.edit_sentence(device, auto)
    assert sentence is not None
    assert sentence.startswith("with --draft ngram (one stream, with snapshots")
    named = planned("M4 Max 128GB", "qwen3.8-27b", draft="ngram")
    gain = drafting.edit_gain(device, named)
    assert gain is not None
    assert 1.1 < gain <= 4
    off = auto._replace(
        settings=replace(auto.settings, drafter=replace(auto.settings.drafter, name="off"))
    )
    assert drafting.edit_sentence(device, off) is None


def test_a_drafter_for_mlx_is_counted_and_no_turns_are_recomputed() -> None:
    """For this hybrid model, llama.cpp with a drafter would store only full snapshots."""
    model = MODELS["qwen3.6-27b"]
    files = typical([v for v in model.variants if v.format == "mlx"])
    drafter = CompanionDrafter(
        "dflash", "d", 3 * 10**9, kv_elements=10_240, width=5120, block=16, is_folder=True
    )
    device, workload = resolve("M4 Max 128GB"), Workload("coding")
    plain = plan_for(device, model, files, workload)
    drafted = plan_for(device, model, files, workload, overrides=Overrides(companion=drafter))
    assert drafted.memory.draft_bytes > drafter.file_bytes + 2 * 10_240 * drafted.settings.n_ctx
    assert drafted.memory.kv_bytes == plain.memory.kv_bytes
    assert drafted.drafting is not None
    assert 1 <= drafted.drafting.low < drafted.drafting.high
    assert drafted.score >= plain.score
    sentence = drafting.companions_sentence(plain)
    assert sentence == "drafters published for it: dflash (z-lab/Qwen3.6-27B-DFlash)"
