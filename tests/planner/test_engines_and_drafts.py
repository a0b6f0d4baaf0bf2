"""MLX compared with llama.cpp on Macs, and drafts in the search. Only what the machine can run is
offered, with memory by the rules of its engine."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import get_args

import pytest

from localllm.device.name_lookup import resolve
from localllm.planner import drafting, explain, kv_sizes, memory, recommend, selection
from localllm.planner.plan import plan_for
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import DraftChoice, Plan, Recommendation, RunSettings, Workload
from localllm_backends import registry
from localllm_backends.contract import KvType
from localllm_catalog import catalog
from localllm_catalog.layers.full import Full
from localllm_catalog.types import Layer, Model, Purpose

CATALOG = catalog.load()
PURPOSES: tuple[Purpose, ...] = ("chat", "long")
MACS = ("M2 16GB", "M4 Pro 48GB", "M4 Max 128GB", "M5 Max 128GB", "M3 Ultra 512GB")


def plan(machine: str, model_id: str, quant: str, *, fmt: str, **fixed: str) -> Plan:
    model = CATALOG.by_id[model_id]
    variant = next(v for v in model.variants if v.quant == quant and v.format == fmt)
    draft = fixed.get("draft", "")
    overrides = Overrides(
        kv_type=fixed.get("kv_type", ""), draft=draft, draft_model=CATALOG.by_id.get(draft)
    )
    return plan_for(resolve(machine), model, variant, Workload(), overrides=overrides)


@cache
def all_that_fits(machine: str, purpose: Purpose) -> Recommendation:
    return recommend.recommend(resolve(machine), CATALOG.models, Workload(purpose), limit=0)


# --- memory by MLX's rules ------------------------------------------------------------------------


def test_mlx_memory_of_qwen3_8b_by_hand() -> None:
    """36 layers × 8 heads × (128 + 128) × 2 bytes = 147,456 bytes per token. The file's bytes count
    once, without a mask and without host memory."""
    found = plan("M4 Max 128GB", "qwen3-8b", "4bit", fmt="mlx")
    need = found.memory
    assert need.weights_bytes == found.variant.file_bytes
    assert need.kv_bytes == 147_456 * 16_384
    assert (need.host_bytes, need.recurrent_bytes) == (0, 0)
    longer = memory.need(
        found.model, found.variant, RunSettings(n_ctx=131_072), resolve("M4 Max 128GB")
    )
    shorter = memory.need(
        found.model, found.variant, RunSettings(n_ctx=1024), resolve("M4 Max 128GB")
    )
    assert longer.compute_bytes == shorter.compute_bytes


@pytest.mark.parametrize(
    ("model_id", "kv_type", "bytes_per_element"),
    [
        ("qwen3-8b", "f16", Fraction(2)),
        # 64 values of 8 bits, a 16-bit scale and a 16-bit bias
        ("qwen3-8b", "q8_0", Fraction(68, 64)),
        ("qwen3-8b", "q4_0", Fraction(36, 64)),
    ],
)
def test_mlx_kv_elements(model_id: str, kv_type: str, bytes_per_element: Fraction) -> None:
    model = CATALOG.by_id[model_id]
    assert kv_sizes.mlx_element_bytes(model, kv_type) == bytes_per_element
    assert (
        kv_sizes.mlx_kv_bytes(model, RunSettings(4096).with_kv_type(kv_type))
        == 36 * 8 * 256 * 4096 * bytes_per_element
    )


def with_heads_of(model: Model, width: int) -> Model:
    layer = Layer(Full(n_kv_heads=8, head_dim_k=width, head_dim_v=width))
    return replace(model, layers=(layer,) * len(model.layers))


def test_head_sizes_not_divisible_by_64_are_stored_in_groups_of_32() -> None:
    model = CATALOG.by_id["qwen3-8b"]
    narrow = with_heads_of(model, 96)
    assert kv_sizes.mlx_element_bytes(narrow, "q8_0") == Fraction(36, 32)
    odd = with_heads_of(model, 80)
    assert not kv_sizes.kv_type_allowed(odd, "q8_0", registry.declared("mlx"))


def test_a_sliding_window_cache_is_never_quantised_on_mlx() -> None:
    assert not kv_sizes.kv_type_allowed(
        CATALOG.by_id["gemma-3-27b-it"], "q8_0", registry.declared("mlx")
    )
    assert kv_sizes.kv_type_allowed(CATALOG.by_id["gemma-3-27b-it"], "q8_0")
    assert plan("M2 16GB", "gemma-3-27b-it", "4bit", fmt="mlx").settings.kv_type == "f16"


def test_a_plan_uses_the_kv_type_names_of_the_backends() -> None:
    words = set(get_args(KvType))
    for machine in MACS:
        for purpose in PURPOSES:
            plans = all_that_fits(machine, purpose).plans
            assert {p.settings.kv_type for p in plans} <= words


# --- which engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACS)
def test_a_mac_is_offered_both_engines_with_the_faster_one_and_the_reason(machine: str) -> None:
    answer = all_that_fits(machine, "chat")
    assert {p.variant.format for p in answer.plans} == {"gguf", "mlx"}
    said = [r for p in answer.plans for r in p.reasons if "of the bandwidth" in r]
    assert said
    for p in answer.plans:
        for reason in p.reasons:
            if "of the bandwidth" not in reason:
                continue
            other = "mlx" if p.backend == "llamacpp" else "llamacpp"
            assert reason.startswith(f"{registry.declared(other).label} (")


def test_the_engine_comparison_follows_the_predicted_speeds() -> None:
    device = resolve("M4 Max 128GB")
    gguf = plan("M4 Max 128GB", "qwen3-8b", "Q4_K_M", fmt="gguf")
    mlx = plan("M4 Max 128GB", "qwen3-8b", "4bit", fmt="mlx")
    faster = mlx.decode_tok_s.value > gguf.decode_tok_s.value
    assert selection.compare(device, gguf, mlx).startswith(
        f"MLX (4bit) is predicted {'faster' if faster else 'slower'}: {mlx.decode_tok_s.value:.3g}"
    )
    assert "predicted as fast as" in selection.compare(
        device, gguf, mlx._replace(decode_tok_s=gguf.decode_tok_s)
    )


@pytest.mark.parametrize("machine", ["RTX 5090", "DGX Spark", "Strix Halo 128GB"])
def test_machines_other_than_macs_get_no_mlx_plan_or_mention(machine: str) -> None:
    answer = recommend.recommend(
        resolve(machine),
        CATALOG.models,
        Workload(),
        overrides=Overrides(backends=("llamacpp", "mlx")),
        limit=0,
    )
    assert answer.plans
    assert all(
        p.variant.format == "gguf" and not any("MLX" in r for r in p.reasons) for p in answer.plans
    )


def test_files_of_another_size_are_not_compared() -> None:
    big = plan("M4 Max 128GB", "qwen3-8b", "Q8_0", fmt="gguf")
    small = [v for v in big.model.variants if v.quant == "4bit"]
    assert selection.nearest_of_other(big, small) is None


# --- drafts ---------------------------------------------------------------------------------------


def test_a_named_draft_is_in_the_plans_memory_and_gain() -> None:
    plain = plan("RTX 4090", "qwen3-32b", "Q4_K_M", fmt="gguf", draft="off")
    drafted = plan("RTX 4090", "qwen3-32b", "Q4_K_M", fmt="gguf", draft="qwen3-0.6b")
    small = next(v for v in CATALOG.by_id["qwen3-0.6b"].variants if v.quant == "Q4_K_M")
    assert plain.memory.draft_bytes == 0
    assert drafted.memory.draft_bytes > 0.9 * small.file_bytes
    assert drafted.draft_gain > 1 == plain.draft_gain


def test_a_draft_model_is_offered_with_its_gain_its_bytes_and_what_was_assumed() -> None:
    models = [CATALOG.by_id[name] for name in ("qwen3-32b", "qwen3-0.6b")]
    answer = recommend.recommend(resolve("RTX PRO 6000"), models, Workload(), limit=0)
    said = [r for p in answer.plans for r in p.reasons if r.startswith("with --draft ")]
    assert said
    assert all(
        f"{drafting.ASSUMED_ACCEPTANCE:.0%} of its tokens accepted, assumed" in r and "GB more" in r
        for r in said
    )


def test_only_a_radeon_gets_a_comparison_with_the_other_build() -> None:
    models = [CATALOG.by_id["llama-3.1-8b-instruct"]]
    said = {
        machine: [
            r
            for r in recommend.recommend(resolve(machine), models, Workload()).plans[0].reasons
            if " build instead" in r
        ]
        for machine in ("Strix Halo 128GB", "RTX 4090", "M4 Max 128GB")
    }
    (line,) = said.pop("Strix Halo 128GB")
    assert "Vulkan build instead of ROCm" in line
    assert "predicted" in line
    assert not any(said.values())


def test_edits_gain_from_drafts_only_if_tokens_can_be_removed() -> None:
    device = resolve("M4 Max 128GB")
    dense = plan("M4 Max 128GB", "llama-3.3-70b-instruct", "Q4_K_M", fmt="gguf")
    gain = drafting.edit_gain(device, dense)
    assert gain is not None
    assert 1.1 <= gain <= (1 - drafting.EDIT_ACCEPTANCE**17) / (1 - drafting.EDIT_ACCEPTANCE)
    assert (
        drafting.edit_gain(
            device, dense._replace(settings=replace(dense.settings, drafter=DraftChoice("off")))
        )
        is None
    )
    hybrid = plan("M4 Max 128GB", "qwen3.8-27b", "Q4_K_M", fmt="gguf")
    assert drafting.edit_gain(device, hybrid) is None


@pytest.mark.parametrize("machine", ["M4 Max 128GB", "RTX 5090", "Jetson Orin Nano 8GB"])
def test_explain_fits_80_columns_and_carries_every_reason(machine: str) -> None:
    device = resolve(machine)
    for found in recommend.recommend(device, CATALOG.models, Workload()).plans:
        lines = explain.explain(found, device)
        assert max(map(len, lines)) <= 80
        said = " ".join(" ".join(lines).split())
        assert all(reason in said for reason in found.reasons)


def test_a_reason_that_applies_to_every_pick_is_printed_once() -> None:
    device = resolve("Jetson Orin Nano 8GB")
    dense = [CATALOG.by_id[name] for name in ("qwen3-8b", "llama-3.1-8b-instruct", "qwen3.5-9b")]
    slow = recommend.recommend(device, dense, Workload()).plans
    said = [p.why for p in slow if "for comfortable reading" in p.why]
    assert len(slow) > 1
    assert all(p.decode_tok_s.value < 20 for p in slow)
    assert len(said) == 1
    assert "all of these are slower than the 20 tok/s" in slow[0].why
