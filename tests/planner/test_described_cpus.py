"""Processors by name: cores and vector units of each, speeds by the formula, and no figures
measured on the user's own machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device import cpus, parts_table
from localllm.device.name_lookup import resolve
from localllm.device.overrides import overridden
from localllm.device.types import Figure, MatrixRates, TypeRates
from localllm.planner import speed
from localllm.planner.recommend import recommend
from localllm.planner.types import Workload
from localllm_catalog import catalog
from localllm_catalog.types import Model, Variant

CATALOG = catalog.load()
CPUS = [row.name for row in parts_table.rows() if row.accelerator == "cpu"]


def file_of(model_id: str, quant: str) -> tuple[Model, Variant]:
    model = CATALOG.by_id[model_id]
    return model, next(v for v in model.variants if v.quant == quant and v.format == "gguf")


@pytest.mark.parametrize("name", CPUS)
def test_every_processor_of_the_table_has_cores_and_vectors(name: str) -> None:
    device = resolve(name)
    assert device.n_cpu_cores > 1
    assert device.cpu_vectors


@pytest.mark.parametrize(("quant", "tok_s"), [("Q4_K_M", 28.74), ("Q6_K", 23.25), ("Q8_0", 19.19)])
def test_the_predicted_decode_speed_of_an_epyc_matches_a_measurement(
    quant: str, tok_s: float
) -> None:
    """Phi-4 on an EPYC 9554 with twelve channels of DDR5-4800 (https://ahelpme.com/?p=6685)."""
    said = speed.decode(resolve("EPYC 9554 192GB"), *file_of("phi-4", quant)).value
    assert said == pytest.approx(tok_s, rel=0.25)


def test_arm_cores_with_matrix_instructions_prefill_as_fast_as_measured() -> None:
    """Eight cores of an M4 Max (4.5 GHz) read a prompt of Qwen3 8B at 106 tokens/s, and of Llama
    3.1 8B at 107 (https://github.com/ggml-org/llama.cpp/pull/18888). Snapdragon's cores have as many
    units at 3.4 to 4 GHz. Those of a Raspberry Pi 5 do not have these instructions."""
    eight = replace(resolve("Snapdragon X Elite 32GB"), n_cpu_cores=8)
    for model_id in ("qwen3-8b", "llama-3.1-8b-instruct"):
        known = file_of(model_id, "Q4_K_M")
        assert 106 * 3.2 / 4.5 < speed.prefill(eight, *known).value < 106 * 4 / 4.5
        assert speed.prefill(resolve("Raspberry Pi 5 8GB"), *known).value < 12


def test_more_cores_prefill_faster_and_decode_no_slower() -> None:
    few, many = (replace(resolve("EPYC 9005 12-channel DDR5-6000"), n_cpu_cores=n) for n in (8, 64))
    known = file_of("gpt-oss-120b", "MXFP4")
    assert speed.prefill(many, *known).value > 3 * speed.prefill(few, *known).value
    assert speed.prefill(many, *known).value > 100
    assert speed.decode(many, *known).value > speed.decode(few, *known).value


def test_a_server_of_768_gb_is_given_a_large_model() -> None:
    first = recommend(
        resolve("EPYC 9005 12-channel DDR5-6000", memory_gb=768),
        CATALOG.models,
        Workload(),
        limit=1,
    ).plans[0]
    assert first.model.params_total > 10e9


def test_kernel_timings_of_another_cpu_are_not_used_for_a_described_one() -> None:
    slow = MatrixRates(*(Figure(0.001, "measured") for _ in range(3)))
    asker = replace(resolve("EPYC 9554 192GB"), matrix_rates=(TypeRates("Q4_K", slow, slow),))
    assert overridden(asker, bandwidth_gbps=300).matrix_rates == ()
    assert resolve("EPYC 9554 192GB").matrix_rates == ()


@pytest.mark.parametrize(
    ("vectors", "cores", "gbps"),
    [("AVX2", 8, 38.4), ("AVX-512", 1, 20.0), ("AVX", 4, 19.2), ("", 2, 38.4)],
)
def test_an_unknown_memory_bandwidth_is_assumed_from_cores_and_vector_units(
    vectors: str, cores: int, gbps: float
) -> None:
    figure = cpus.usual_bandwidth("", vectors)
    device = replace(
        resolve("EPYC 9554 192GB"), bandwidth_gbps=figure, n_cpu_cores=cores, cpu_vectors=vectors
    )
    said = speed.decode(device, *file_of("phi-4", "Q4_K_M"))
    assert said.basis == f"assumed {gbps:.0f} GB/s"
