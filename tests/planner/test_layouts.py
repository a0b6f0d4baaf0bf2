"""The plan picks the weight layout with the lowest measured time for the prompts and answers of the
purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device.name_lookup import resolve
from localllm.device.types import Device, Figure, MatrixRates, Memory, TypeRates
from localllm.planner import kernels
from localllm.planner.plan import plan_for
from localllm.planner.types import Workload
from localllm_catalog import catalog
from localllm_catalog.types import Model, Purpose, Variant

GIB = 2**30


def rates(prompt_tflops: float, token_tflops: float) -> MatrixRates:
    prompt, token = (Figure(tflops, "measured") for tflops in (prompt_tflops, token_tflops))
    return MatrixRates(prompt, prompt, token)


# Two Zen cores with AVX-512, llama.cpp 0.3.36.
STORED, LAID_OUT = rates(0.51, 0.095), rates(0.291, 0.116)
ZEN = (TypeRates("Q4_K", STORED, LAID_OUT),)


def cpu(matrix_rates: tuple[TypeRates, ...] = ZEN) -> Device:
    pool = Memory(24 * GIB, 23 * GIB, 20 * GIB, "measured")
    plain = Device(
        "a small server", "system", "cpu", "server", pool, Figure(56.7, "measured"), n_cpu_cores=2
    )
    return replace(plain, matrix_rates=matrix_rates)


def of_quant(quant: str) -> tuple[Model, Variant]:
    m = catalog.load().by_id["qwen3-8b"]
    return m, next(v for v in m.variants if v.quant == quant and v.format == "gguf")


@pytest.mark.parametrize(
    ("purpose", "wanted"),
    [("coding", "stored"), ("long", "stored"), ("chat", "stored"), ("embedding", "stored")],
)
def test_weights_stay_as_stored_if_prompts_are_much_of_the_work(
    purpose: Purpose, wanted: str
) -> None:
    m, file = of_quant("Q4_K_M")
    assert kernels.layout(cpu(), m, file, Workload(purpose)) == wanted


def test_weights_are_repacked_if_answers_are_most_of_the_work() -> None:
    m, file = of_quant("Q4_K_M")
    assert kernels.layout(cpu(), m, file, Workload("chat", prompt_tokens=64)) == "auto"


@pytest.mark.parametrize(
    "device",
    [
        cpu(()),
        cpu((TypeRates("Q4_K", STORED),)),
        cpu((TypeRates("Q4_K", rates(0.05, 0.01), rates(0.08, 0.012)),)),
        replace(resolve("RTX 4090"), matrix_rates=ZEN),
    ],
    ids=["nothing timed", "nothing laid out", "laid out is quicker in both", "a graphics card"],
)
def test_the_engine_chooses_the_layout_if_no_other_is_known_to_be_faster(device: Device) -> None:
    m, file = of_quant("Q4_K_M")
    assert kernels.layout(device, m, file, Workload("coding")) == "auto"


def test_a_format_is_repacked_or_not_by_its_own_rates() -> None:
    m, file = of_quant("Q8_0")
    assert kernels.layout(cpu(), m, file, Workload("coding")) == "auto"
    timed = cpu((*ZEN, TypeRates("Q8_0", rates(0.6, 0.07), rates(0.3, 0.08))))
    assert kernels.layout(timed, m, file, Workload("coding")) == "stored"


def test_kernels_are_timed_only_for_models_that_take_longer_to_load() -> None:
    _, file = of_quant("Q4_K_M")
    assert kernels.types_to_time(cpu(()), file) == ["Q4_K", "Q6_K"]
    assert kernels.types_to_time(cpu(()), of_quant("Q8_0")[1]) == ["Q4_K", "Q8_0"]
    assert kernels.types_to_time(cpu(()), replace(file, weights_bytes=100_000_000)) == []
    assert kernels.types_to_time(resolve("RTX 4090"), file) == []


def test_a_plan_reports_its_weight_layout_and_the_measured_rate() -> None:
    from localllm.planner.explain import explain
    from localllm.planner.serialise import physics

    m, file = of_quant("Q4_K_M")
    plan = plan_for(cpu(), m, file, Workload("coding", context=4096))
    assert plan.settings.placement.layout == "stored"
    assert "as stored" in "\n".join(explain(plan, cpu()))
    # The chat's roofline is that of the kernels that run.
    assert physics(plan, cpu())["tflops"] == pytest.approx(0.51)
    assert "0.510 TFLOP/s (measured)" in "\n".join(explain(plan, cpu()))
