"""The offers and rejections of `recommend`: golden verdicts, named requirements, and properties for
every machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.device.name_lookup import resolve
from localllm.device.parts_table import rows
from localllm.device.types import Device, Figure, Memory
from localllm.planner import (
    explain,
    kv_sizes,
    memory,
    quality,
    recommend,
    roofline,
    scoring,
    serialise,
    verify,
)
from localllm.planner.plan import max_context, plan_for
from localllm.planner.speed import Measured
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import Plan, RunSettings, Workload
from localllm_catalog import catalog
from localllm_catalog.layers.with_state import WithState
from planner import golden

MODELS = catalog.load().models
BY_ID = catalog.load().by_id
BIG = ("DGX Spark", "Strix Halo 128GB", "M4 Max 128GB", "M5 Max 128GB")
SCHEMA = json.loads((Path(recommend.__file__).parent / "recommend.schema.json").read_text())


def test_golden_verdicts() -> None:
    """12 machines × 20 models, reviewed in every diff. `python tests/planner/golden.py` prints a
    new table."""
    assert golden.table() == golden.FILE.read_text(encoding="utf-8")


# --- named promises -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "machine", ["DGX Spark", "Strix Halo 128GB", "M4 Max 128GB", "M3 Ultra 512GB"]
)
def test_a_70b_fits_the_big_machines(machine: str) -> None:
    assert golden.plan(machine, "llama-3.3-70b-instruct").fits == "yes"


def test_a_70b_does_not_fit_an_rtx_5090_and_the_reason_has_numbers() -> None:
    assert golden.plan("RTX 5090", "llama-3.3-70b-instruct").fits == "no"
    answer = recommend.recommend(resolve("RTX 5090"), MODELS, Workload())
    reason = next(r for r in answer.rejected if r.model.id == "llama-3.3-70b-instruct").reason
    assert reason.startswith("Q4_K_M needs 4")
    assert "this GPU has 32.7 GB usable" in reason


@pytest.mark.parametrize("machine", BIG)
def test_gpt_oss_120b_fits_and_30b_a3b_outranks_a_dense_70b_for_chat(machine: str) -> None:
    assert golden.plan(machine, "gpt-oss-120b").fits == "yes"
    mixture, dense = (golden.plan(machine, m) for m in ("qwen3-30b-a3b", "llama-3.3-70b-instruct"))
    assert mixture.decode_tok_s.value > 5 * dense.decode_tok_s.value
    assert mixture.score > dense.score


@pytest.mark.parametrize("machine", ["Jetson Orin Nano 8GB", "M2 16GB"])
def test_small_machines_get_something_sensible(machine: str) -> None:
    device = resolve(machine)
    picks = recommend.recommend(device, MODELS, Workload()).plans
    assert len(picks) == recommend.MAX_PICKS
    assert all(
        p.decode_tok_s.value >= 5 and p.memory.total_bytes <= device.usable_bytes for p in picks
    )
    assert max(p.model.params_total for p in picks) >= 4e9


def test_the_kv_type_changes_the_verdict_at_128k() -> None:
    long = Workload(context=131072)
    full = golden.plan("RTX 3060 12GB", "llama-3.1-8b-instruct", long, kv_type="f16")
    small = golden.plan("RTX 3060 12GB", "llama-3.1-8b-instruct", long, kv_type="q4_0")
    assert (full.fits, small.fits) == ("no", "yes")
    chosen = golden.plan("RTX 3060 12GB", "llama-3.1-8b-instruct", long)
    assert chosen.settings.kv_type == "q4_0"
    assert chosen.quality < full.quality


def test_a_crawling_plan_is_refused_with_its_speed() -> None:
    slow = Device(
        "old office PC", "system", "cpu", "desktop",
        Memory(128 << 30, 126 << 30, 120 << 30, "given"),
        Figure(20.0, "given"), n_cpu_cores=4,
    )  # fmt: skip
    answer = recommend.recommend(slow, MODELS, Workload())
    assert all(p.decode_tok_s.value >= scoring.NEEDS["chat"].least_tok_s for p in answer.plans)
    reason = next(r for r in answer.rejected if r.model.id == "llama-3.3-70b-instruct")
    assert reason.kind == "speed"
    assert "too slow for chat" in reason.reason


def test_formats_the_machine_cannot_run_never_appear() -> None:
    for name in ("RTX 5090", "DGX Spark", "Strix Halo 128GB"):
        everything = recommend.recommend(resolve(name), MODELS, Workload(), limit=0)
        assert {p.variant.format for p in everything.plans} == {"gguf"}
    both = recommend.recommend(resolve("M4 Max 128GB"), MODELS, Workload(), limit=0)
    assert {p.variant.format for p in both.plans} == {"gguf", "mlx"}
    only = Overrides(backends=("llamacpp",))
    assert {
        p.backend
        for p in recommend.recommend(
            resolve("M4 Max 128GB"), MODELS, Workload(), overrides=only
        ).plans
    } == {"llamacpp"}


def test_purposes_ask_for_different_models() -> None:
    device = resolve("RTX 4090")
    first = {
        p: recommend.recommend(device, MODELS, Workload(purpose=p)).plans
        for p in ("chat", "autocomplete", "coding", "long")
    }
    assert all(m.model.fim or "autocomplete" in m.model.purposes for m in first["autocomplete"])
    assert all(m.decode_tok_s.value >= 30 for m in first["autocomplete"])
    assert all(
        m.settings.n_ctx >= 65536 or m.settings.n_ctx == kv_sizes.pad(m.model.native_context)
        for m in first["coding"]
    )
    assert first["chat"][0].settings.n_ctx == 16384
    assert all(
        p.ttft_cached_s is not None and p.ttft_cached_s.value < p.ttft_s.value
        for p in first["coding"]
    )


def test_only_plans_with_the_requested_speed_are_listed() -> None:
    fast = recommend.recommend(resolve("DGX Spark"), MODELS, Workload(min_decode_tok_s=60))
    assert fast.plans
    assert all(p.stream_tok_s >= 60 for p in fast.plans)


def test_parallel_requests_each_get_the_context() -> None:
    one, four = (golden.plan("RTX 5090", "qwen3-8b", Workload(parallel=n)) for n in (1, 4))
    assert four.settings.n_ctx == 4 * one.settings.n_ctx
    assert four.memory.kv_bytes == 4 * one.memory.kv_bytes


def test_a_card_with_host_memory_is_offered_a_split_marked_as_split() -> None:
    card = resolve("RTX 4090")
    host = Memory(128 << 30, 120 << 30, 110 << 30, "given")
    device = replace(card, host=host, host_bandwidth_gbps=Figure(80.0, "given"))
    model = BY_ID["gpt-oss-120b"]
    variant = next(v for v in model.variants if v.format == "gguf")
    plan = plan_for(device, model, variant, Workload())
    assert plan.fits == "split"
    # Every layer is on the card, except the experts of as few layers as possible.
    assert plan.settings.placement.gpu_layers == -1
    kept = plan.settings.placement.experts_on_host
    assert 0 < kept < len(model.layers)
    assert plan.memory.total_bytes <= card.usable_bytes
    one_more = plan.settings.placed(experts_on_host=kept - 1)
    assert memory.need(model, variant, one_more, device).total_bytes > card.usable_bytes
    assert plan.memory.weights_bytes + plan.memory.host_bytes >= 0.99 * variant.file_bytes
    assert plan_for(card, model, variant, Workload()).fits == "no"


def test_a_plan_beyond_free_memory_is_tight_and_not_refused() -> None:
    device = resolve("M4 Max 128GB")
    busy = replace(device, memory=replace(device.memory, available_bytes=10 << 30))
    plan = plan_for(busy, BY_ID["qwen3-32b"], golden.plan("H100", "qwen3-32b").variant, Workload())
    assert plan.fits == "tight"


def test_a_recurrent_state_in_addition_to_full_attention_is_counted() -> None:
    """Falcon-H1's layers have both: attention to all tokens, and a recurrent state per sequence."""
    plain = BY_ID["qwen3-8b"]
    both = replace(
        plain, layers=tuple(replace(x, mixer=WithState(x.mixer, 1000)) for x in plain.layers)
    )
    settings = RunSettings(4096, slots=3)
    with_state, without = (memory.need(m, plain.variants[0], settings) for m in (both, plain))
    assert with_state.recurrent_bytes == 4 * 1000 * len(plain.layers) * 3
    assert with_state.kv_bytes == without.kv_bytes


def drafted_by(model_id: str) -> Overrides:
    return Overrides(draft=model_id, draft_model=BY_ID[model_id])


def test_a_draft_model_is_counted_and_its_gain_shown() -> None:
    device, model = resolve("RTX 5090"), BY_ID["qwen3-32b"]
    variant = next(v for v in model.variants if v.quant == "Q4_K_M")
    plan = plan_for(device, model, variant, Workload(), overrides=drafted_by("qwen3-0.6b"))
    alone = plan_for(device, model, variant, Workload())
    assert plan.memory.draft_bytes > 4e8
    assert plan.memory.total_bytes == alone.memory.total_bytes + plan.memory.draft_bytes
    assert plan.draft_gain > 1.2


def test_the_drafter_memory_is_the_same_in_lists_and_single_plans() -> None:
    device, model = resolve("RTX 5090"), BY_ID["qwen3-32b"]
    drafted = drafted_by("qwen3-0.6b")
    for listed in recommend.variants_of(device, model, Workload(), overrides=drafted):
        alone = plan_for(device, model, listed.variant, Workload(), overrides=drafted)
        assert listed.memory.draft_bytes == alone.memory.draft_bytes > 4e8


def test_the_longest_context_leaves_room_for_the_drafter() -> None:
    device, model = resolve("RTX 4090"), BY_ID["qwen3-32b"]
    variant = next(v for v in model.variants if v.quant == "Q4_K_M")
    plain = plan_for(device, model, variant, Workload(context=4096))
    drafted = plan_for(
        device, model, variant, Workload(context=4096), overrides=drafted_by("qwen3-0.6b")
    )
    longest = max_context(device, drafted)
    assert 0 < longest < max_context(device, plain)
    at_longest = replace(drafted.settings, n_ctx=longest)
    assert memory.need(model, variant, at_longest, device).total_bytes <= device.usable_bytes


@pytest.mark.parametrize("name", ["llama-3.2-3b-instruct", "llama-3.2-1b-instruct"])
def test_with_host_memory_a_drafter_moves_layers_off_the_card(name: str) -> None:
    host = Memory(128 << 30, 120 << 30, 110 << 30, "given")
    device = replace(resolve("RTX 4090"), host=host, host_bandwidth_gbps=Figure(80.0, "given"))
    model = BY_ID["llama-3.3-70b-instruct"]
    variant = next(v for v in model.variants if v.quant == "Q4_K_M")
    plain = plan_for(device, model, variant, Workload())
    drafted = plan_for(device, model, variant, Workload(), overrides=drafted_by(name))
    assert (plain.fits, drafted.fits) == ("split", "split")
    assert 0 < drafted.settings.placement.gpu_layers < plain.settings.placement.gpu_layers
    assert drafted.memory.total_bytes <= device.usable_bytes


# --- properties -----------------------------------------------------------------------------------


def test_every_known_machine_gets_an_answer_with_consistent_plans() -> None:
    names = sorted({row.name for row in rows() if row.memory_gb and row.bandwidth_gbps})[::6]
    for name in names:
        device = resolve(name)
        answer = recommend.recommend(device, MODELS, Workload())
        assert len(answer.plans) <= recommend.MAX_PICKS
        offered = {p.model.id for p in answer.plans}
        assert not offered & {r.model.id for r in answer.rejected}
        assert len(offered) + len(answer.rejected) >= 0.9 * len(MODELS)
        for plan in answer.plans:
            assert plan.memory.total_bytes <= device.usable_bytes
            assert plan.decode_tok_s.low <= plan.decode_tok_s.value <= plan.decode_tok_s.high
            assert plan.decode_tok_s_full.value <= plan.decode_tok_s.value
            assert plan.max_ctx >= plan.settings.n_ctx
            assert plan.why
            assert all(len(line) <= 120 for line in explain.explain(plan, device))


def test_the_same_question_has_the_same_answer() -> None:
    device = resolve("Strix Halo 128GB")
    forward, backward = (
        recommend.recommend(device, order, Workload()) for order in (MODELS, MODELS[::-1])
    )
    one, two = (json.dumps(serialise.recommendation_to_json(a, {})) for a in (forward, backward))
    assert one == two


def test_the_longest_context_fits_and_the_next_does_not() -> None:
    device = resolve("RTX 3060 12GB")
    plan = golden.plan("RTX 3060 12GB", "llama-3.1-8b-instruct")
    longest = max_context(device, plan)
    assert longest < plan.model.native_context

    def fits(n_ctx: int) -> bool:
        need = memory.need(plan.model, plan.variant, replace(plan.settings, n_ctx=n_ctx), device)
        return need.total_bytes <= device.usable_bytes

    assert fits(longest)
    assert not fits(longest + kv_sizes.CONTEXT_STEP)


def test_smaller_formats_cost_quality_in_order() -> None:
    model = BY_ID["qwen3-32b"]
    known = {v.quant: quality.format_cost(model, v) for v in model.variants}
    order = [known[q] for q in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")]
    assert order == sorted(order)
    assert known["Q4_K_M"] < 1.0


def test_an_unrated_newcomer_does_not_outrank_on_its_date_alone() -> None:
    rated, unrated = BY_ID["qwen3.5-9b"], BY_ID["granite-4.2-8b"]
    assert quality.rate(rated).spread < quality.rate(unrated).spread
    device = resolve("RTX 4090")
    order = [p.model.id for p in recommend.recommend(device, [rated, unrated], Workload()).plans]
    assert order[0] == rated.id or quality.rate(unrated).points > quality.rate(rated).points + 5


# --- the verify loop ------------------------------------------------------------------------------


def test_a_measurement_a_third_below_the_prediction_names_likely_causes() -> None:
    device, model = resolve("RTX 4090"), BY_ID["qwen3-8b"]
    variant = next(v for v in model.variants if v.quant == "Q4_K_M")
    predicted = golden.plan("RTX 4090", "qwen3-8b").decode_tok_s.value
    fine = verify.compare(device, Measured(model, variant, "llamacpp", predicted * 0.9))
    slow = verify.compare(device, Measured(model, variant, "llamacpp", predicted * 0.6))
    crawling = verify.compare(device, Measured(model, variant, "llamacpp", predicted * 0.1))
    assert fine.causes == ()
    assert any("another program" in c for c in slow.causes)
    assert any("power" in c for c in slow.causes)
    assert "CPU" in crawling.causes[0]
    full = replace(device, memory=replace(device.memory, available_bytes=1 << 30))
    assert any(
        "swap" in c for c in verify.compare(full, Measured(model, variant, "llamacpp", 1.0)).causes
    )


def test_faster_than_the_memory_means_the_bandwidth_is_wrong() -> None:
    device, model = resolve("RTX 4090"), BY_ID["qwen3-8b"]
    variant = next(v for v in model.variants if v.quant == "Q4_K_M")
    (cause,) = verify.compare(device, Measured(model, variant, "llamacpp", 1000.0)).causes
    assert "bandwidth" in cause


# --- pictures and JSON ----------------------------------------------------------------------------


def picks(machine: str = "M4 Max 128GB") -> tuple[Device, list[Plan]]:
    device = resolve(machine)
    return device, list(recommend.recommend(device, MODELS, Workload()).plans)


def test_the_roofline_is_drawn_in_text_and_svg() -> None:
    picture = roofline.of(*picks())
    assert all(gb * tok_s <= picture.bandwidth_gbps for gb, tok_s, _ in picture.points)
    lines = roofline.text(picture)
    assert sum("·" in line for line in lines) >= 5
    assert len(picture.points) == 8
    svg = roofline.svg(picture)
    assert svg.count("<circle") == 8


def conforms(value: Any, schema: dict[str, Any], at: str = "$") -> list[str]:
    """Return the parts of `value` that break `schema` (the part of JSON Schema that ours uses)."""
    if "$ref" in schema:
        return conforms(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], at)
    if "anyOf" in schema:
        found = [conforms(value, s, at) for s in schema["anyOf"]]
        return [] if [] in found else found[0]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    wanted = schema.get("type", [])
    for name in [wanted] if isinstance(wanted, str) else wanted:
        if name == "integer" and isinstance(value, int) and not isinstance(value, bool):
            break
        if name == "number" and isinstance(value, int | float) and not isinstance(value, bool):
            break
        if name in kinds and isinstance(value, kinds[name]):
            break
    else:
        if wanted:
            return [f"{at}: {value!r} is not {wanted}"]
    problems = []
    if "enum" in schema and value not in schema["enum"]:
        problems.append(f"{at}: {value!r} not in {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        problems.append(f"{at}: {value!r} is not {schema['const']}")
    if "minimum" in schema and value is not None and value < schema["minimum"]:
        problems.append(f"{at}: {value} below {schema['minimum']}")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        problems += [f"{at}.{k} is missing" for k in schema.get("required", []) if k not in value]
        if schema.get("additionalProperties") is False:
            problems += [f"{at}.{k} is not in the schema" for k in value if k not in known]
        for key, item in value.items():
            if key in known:
                problems += conforms(item, known[key], f"{at}.{key}")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            problems += conforms(item, schema["items"], f"{at}[{i}]")
    return problems


@pytest.mark.parametrize("machine", ["M4 Max 128GB", "RTX 5090", "Jetson Orin Nano 8GB"])
def test_json_conforms_to_the_published_schema(machine: str) -> None:
    from localllm.device.types import device_to_json

    device = resolve(machine)
    answer = recommend.recommend(device, MODELS, Workload())
    body = json.loads(json.dumps(serialise.recommendation_to_json(answer, device_to_json(device))))
    assert conforms(body, SCHEMA) == []
    body["plans"][0]["fits"] = "maybe"
    del body["plans"][1]["memory"]
    assert len(conforms(body, SCHEMA)) == 2


def test_one_model_lists_every_variant_whether_or_not_it_fits() -> None:
    device, model = resolve("RTX 5090"), BY_ID["qwen3-32b"]
    plans = recommend.variants_of(device, model, Workload())
    assert len(plans) == sum(v.format == "gguf" for v in model.variants)
    assert {p.fits for p in plans} >= {"yes", "no"}
    for plan in plans:
        if plan.fits == "no":
            assert plan.max_ctx < plan.settings.n_ctx
            assert "needs" in plan.why


def test_the_meaning_of_tight_is_explained_only_if_a_plan_is_tight() -> None:
    device = resolve("M4 24GB")
    plans = recommend.variants_of(device, BY_ID["qwen3-32b"], Workload())
    assert {"yes", "tight"} <= {p.fits for p in plans}
    for plan in plans:
        said = "\n".join(explain.explain(plan, device, columns=120))
        assert ("tight: needs more memory than is free now, or over 93%" in said) == (
            plan.fits == "tight"
        )
