"""The micro-batch is part of the plan. It is larger if that is faster and fits, and it is loaded,
explained and included in the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device.name_lookup import resolve
from localllm.load.options import load_spec
from localllm.planner import memory, speed
from localllm.planner.explain import explain
from localllm.planner.plan import plan_for
from localllm.planner.speed import Measured
from localllm.planner.starting_settings import typical
from localllm.planner.types import Plan, RunSettings, Workload
from localllm_catalog import catalog

MODELS = {m.id: m for m in catalog.load().models}


def planned(machine: str, model: str, workload: Workload | None = None) -> Plan:
    files = [v for v in MODELS[model].variants if v.format == "gguf"]
    return plan_for(resolve(machine), MODELS[model], typical(files), workload or Workload())


def test_a_mixture_is_prefilled_in_large_steps_on_a_machine_with_much_compute() -> None:
    """GB10's published speed for gpt-oss-120b is 2,444 prompt tokens/s with micro-batches of 2,048.
    With 512 it is half as fast."""
    plan = planned("DGX Spark", "gpt-oss-120b")
    assert plan.settings.n_batch == 2048
    assert plan.prefill_tok_s.low <= 2444 <= plan.prefill_tok_s.high
    small = RunSettings(plan.settings.n_ctx)
    in_512 = speed.prefill(resolve("DGX Spark"), plan.model, plan.variant, small)
    assert plan.prefill_tok_s.value > 1.6 * in_512.value


def test_larger_steps_are_planned_to_the_byte_loaded_and_explained() -> None:
    plan, device = planned("RTX 4090", "qwen3-30b-a3b"), resolve("RTX 4090")
    assert plan.settings.n_batch == 2048
    assert plan.memory == memory.need(plan.model, plan.variant, plan.settings, device)
    assert load_spec("x.gguf", plan.settings).n_batch == 2048
    assert any("micro-batch 2,048" in line for line in explain(plan, device))


@pytest.mark.parametrize(
    "machine", ["Arc Pro B60", "2x Arc Pro B60", "Arc B580 + 64GB RAM", "Arc A770 16GB"]
)
@pytest.mark.parametrize("model", ["gpt-oss-20b", "qwen3-30b-a3b", "qwen3-8b"])
def test_an_arc_gets_no_steps_that_make_its_driver_lose_the_device(
    machine: str, model: str
) -> None:
    """ggml-org/llama.cpp#27638: the device is lost at 2,048 tokens, but not at 1,024."""
    assert planned(machine, model).settings.n_batch <= 1024
    assert planned("RTX 4090", "qwen3-30b-a3b").settings.n_batch > 1024


@pytest.mark.parametrize(
    ("machine", "weights"),
    [
        ("RX 7900 XTX", "read"),
        ("Strix Halo 128GB", "read"),
        ("RTX 4090", "auto"),
        ("Arc B580", "auto"),
        ("M4 Max 64GB", "auto"),
    ],
)
def test_rocm_reads_weights_and_other_backends_map_them(machine: str, weights: str) -> None:
    """On an RX 9070, a mapped file is read at 27 MB/s (sdnext#5028). On a Strix Halo, mapping above
    20 GB hangs (ROCm#6182)."""
    plan = planned(machine, "qwen3-8b")
    assert plan.settings.placement.weights == weights
    assert load_spec("x.gguf", plan.settings).placement.weights == weights


@pytest.mark.parametrize("machine", ["RTX 3060 12GB", "M2 16GB"])
def test_a_micro_batch_is_not_doubled_for_a_small_gain(machine: str) -> None:
    assert planned(machine, "qwen3-8b").settings.n_batch == 512


def test_a_larger_step_that_costs_almost_no_memory_is_used_on_mlx() -> None:
    """MLX reserves no memory for a larger step, and on a fast device each step of a small model
    causes a pause."""
    device = resolve("M3 Max 64GB")
    mlx = [v for v in MODELS["qwen3-8b"].variants if v.format == "mlx"]
    plan = plan_for(device, MODELS["qwen3-8b"], typical(mlx), Workload())
    assert plan.settings.n_batch == 2048
    small = memory.need(plan.model, plan.variant, replace(plan.settings, n_batch=512), device)
    assert 0 < plan.memory.total_bytes - small.total_bytes <= 0.01 * device.memory.limit_bytes
    device = resolve("M2 16GB")
    plan = plan_for(device, MODELS["qwen3-8b"], typical(mlx), Workload())
    assert plan.settings.n_batch < 2048, "it would take more there"


def test_a_cpu_keeps_the_default_step_size() -> None:
    assert planned("Intel Xeon 128GB", "qwen3-30b-a3b").settings.n_batch == 512


def test_larger_steps_never_cost_the_fit() -> None:
    for machine in ("RTX 4070 Ti SUPER", "Radeon RX 7900 XTX", "RTX 5090"):
        device = resolve(machine)
        for model in ("gpt-oss-20b", "qwen3-30b-a3b", "gemma-3-27b-it", "qwen3.5-27b"):
            plan = planned(machine, model, Workload("coding"))
            if plan.fits == "yes":
                assert plan.memory.total_bytes <= 0.93 * device.memory.limit_bytes
            elif plan.fits != "split":
                assert plan.settings.n_batch == 512


def test_with_experts_in_system_memory_larger_steps_are_planned() -> None:
    """Every step copies the experts in system memory over the bus, so few large steps are several
    times faster."""
    plan = planned("RTX 4090 + 64GB RAM", "gpt-oss-120b")
    assert plan.fits == "split"
    assert plan.settings.n_batch == 2048
    small = speed.prefill(
        resolve("RTX 4090 + 64GB RAM"),
        plan.model,
        plan.variant,
        RunSettings(16384, placement=plan.settings.placement),
    )
    assert plan.prefill_tok_s.value > 2.5 * small.value


def test_a_prompt_measured_in_small_steps_is_compared_with_small_steps() -> None:
    device, plan = resolve("DGX Spark"), planned("DGX Spark", "gpt-oss-120b")
    small, large = RunSettings(16384, n_batch=512), RunSettings(16384, n_batch=2048)
    said = speed.prefill(device, plan.model, plan.variant, small).value
    run = Measured(
        plan.model,
        plan.variant,
        "llamacpp",
        50.0,
        prefill_tok_s=said,
        prompt_tokens=2048,
        n_batch=512,
    )
    assert speed.prefill(
        device, plan.model, plan.variant, small, measured=[run]
    ).value == pytest.approx(said)
    predicted = speed.prefill(device, plan.model, plan.variant, large).value
    assert speed.prefill(
        device, plan.model, plan.variant, large, measured=[run]
    ).value == pytest.approx(predicted)
