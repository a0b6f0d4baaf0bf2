"""Several sequences or cards are never slower than one. On a DGX Spark, larger weights are read at
a smaller share of its memory bandwidth."""

from __future__ import annotations

import random

import pytest

from localllm.device import parts_table
from localllm.device.name_lookup import resolve
from localllm.device.synthetic_device import one_computer, simulate
from localllm.device.types import Device
from localllm.planner import decode_cost, memory, speed
from localllm.planner.plan import plan_for
from localllm.planner.types import USUAL, RunSettings, Workload
from localllm_catalog import catalog
from localllm_catalog.types import Model, Variant

CATALOG = catalog.load()
MODELS = ("llama-3.1-8b-instruct", "qwen3.6-35b-a3b", "lfm2.5-8b-a1b", "glm-4.7-flash")
ROWS = [row for row in parts_table.rows() if row.accelerator != "cpu"]
SAMPLED = random.Random(86).sample(ROWS, 25)


def files(model_id: str, device: Device) -> list[tuple[Model, Variant]]:
    """Return a GGUF with about four bits, and an MLX folder if the device runs MLX."""
    model = CATALOG.by_id[model_id]
    formats = ("gguf", "mlx") if device.accelerator == "metal" else ("gguf",)
    found = [
        next((v for v in model.variants if v.format == kind and "4" in v.quant), None)
        for kind in formats
    ]
    return [(model, variant) for variant in found if variant is not None]


@pytest.mark.parametrize("row", SAMPLED, ids=lambda row: row.name)
def test_several_streams_never_give_less_than_one(row: parts_table.DeviceRow) -> None:
    device = simulate(row, row.memory_gb[0] if row.memory_gb else 32.0, [])
    for model_id in MODELS:
        for file in files(model_id, device):
            for depth in (0, 16_384):
                alone = speed.decode(device, *file, depth=depth).value
                for n in (2, 3, 8):
                    each = speed.decode(device, *file, depth=depth, n_sequences=n).value
                    assert n * each >= alone * (1 - 1e-9), (model_id, n, depth)


def test_two_cards_read_the_parts_of_a_long_prompt_at_the_same_time() -> None:
    """On two RTX 3060, prompts of 512, 2,048 and 4,096 tokens run at 556, 810 and 870 tok/s with
    micro-batches of 512 (llama-bench b10453). One micro-batch passes the cards one after the
    other."""
    model = CATALOG.by_id["qwen3.8-27b"]
    variant = next(v for v in model.variants if v.quant == "UD-Q4_K_XL")
    one = resolve("RTX 3060 12GB")
    two = one_computer([one, one])

    def prompt(device: Device, tokens: int) -> float:
        return speed.prefill(device, model, variant, prompt_tokens=tokens).value

    assert prompt(two, 512) == pytest.approx(prompt(one, 512), rel=0.02)
    assert prompt(two, 2048) > 1.3 * prompt(one, 2048)
    assert prompt(one_computer([one] * 3), 2048) > prompt(two, 2048)
    measured = speed.prefill(two, model, variant, prompt_tokens=2048)
    assert measured.low <= 810 <= measured.high


def test_layers_in_system_memory_stop_the_cards_from_working_at_the_same_time() -> None:
    model = CATALOG.by_id["qwen3.8-27b"]
    variant = next(v for v in model.variants if v.quant == "UD-Q4_K_XL")
    two = one_computer([resolve("RTX 3060 12GB")] * 2)
    halved = USUAL.placed(gpu_layers=len(model.layers) // 2)
    one = resolve("RTX 3060 12GB")
    assert speed.prefill(two, model, variant, halved, prompt_tokens=2048).value == pytest.approx(
        speed.prefill(one, model, variant, halved, prompt_tokens=2048).value, rel=0.05
    )


def test_a_spark_reads_larger_weights_at_a_smaller_share_of_its_rate() -> None:
    """A 32B in Q4_K_M decodes at 10.2 tok/s in two sources, a 27B at 10.7 and 11.3."""
    spark = resolve("DGX Spark")
    shares = []
    for model_id in ("qwen3-1.7b", "qwen3-8b", "qwen3-32b"):
        model = CATALOG.by_id[model_id]
        variant = next(v for v in model.variants if v.quant == "Q4_K_M")
        hardware = decode_cost.hardware_of(spark, "llamacpp")
        terms = decode_cost.decode_terms(model, variant, hardware)
        read = terms.streamed.total_bytes / (hardware.bandwidth_gbps * 1e9)
        shares.append(read / terms.seconds["weights"])
    assert shares == sorted(shares, reverse=True)
    assert shares[2] < 0.95 * shares[0]
    said = speed.decode(spark, model, variant)
    assert said.low <= 10.2 <= said.high


def test_per_layer_tables_are_in_system_memory_alone() -> None:
    """Gemma 4 E4B in Q4_K_M with 65,536 tokens of q8_0 KV uses 3,635 MiB of a card, and 5,940 MiB
    with the tables (llama.cpp's log on an RTX 4050 Laptop)."""
    model = CATALOG.by_id["gemma-4-e4b-it"]
    card = resolve("RTX 4050 Laptop 6GB + 16GB RAM")
    variant = next(v for v in model.variants if v.quant == "Q4_K_M")
    need = memory.need(model, variant, RunSettings(65_536).with_kv_type("q8_0"), card)
    assert 3_635 * 2**20 <= need.total_bytes <= 1.2 * 3_635 * 2**20
    assert need.total_bytes + need.host_bytes == pytest.approx(5_940 * 2**20, rel=0.12)
    for quant in ("Q4_K_M", "Q5_K_M", "Q6_K"):
        variant = next(v for v in model.variants if v.quant == quant)
        assert plan_for(card, model, variant, Workload()).fits == "yes", quant
    spark = resolve("DGX Spark")
    need = memory.need(model, variant, RunSettings(8192), spark)
    assert need.weights_bytes < 1.15 * variant.file_bytes
