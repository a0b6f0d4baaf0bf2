"""Stated certainty: wider where less was measured; attention over a quantised cache as its kernels
have it."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from localllm.device.named import resolve
from localllm.device.types import Device
from localllm.planner import decode_cost, efficiency, prefill_cost, ranges, speed
from localllm.planner.types import USUAL, Range
from localllm_catalog import catalog
from localllm_catalog.types import Model, Variant

CATALOG = catalog.load()
ROWS = Path(__file__).parents[2] / "benchmarks" / "data" / "speeds.csv"


def file_of(model_id: str, quant: str = "Q4_K_M") -> tuple[Model, Variant]:
    model = CATALOG.by_id[model_id]
    return model, next(v for v in model.variants if v.quant == quant)


def spread(found: Range) -> float:
    return math.log(found.high / found.value)


def decoded(device: Device, *, depth: int = 0, kv_type: str = "f16") -> Range:
    return speed.decode(
        device, *file_of("llama-3.1-8b-instruct"), USUAL.with_kv_type(kv_type), depth=depth
    )


@pytest.mark.parametrize("name", ["RTX 4090", "RTX 3090", "RTX 5070 Ti", "Arc B580"])
def test_what_is_asked_with_less_evidence_has_a_wider_range(name: str) -> None:
    """A part nobody measured, a cache of fewer bits, a great depth: each is stated no surer than
    what was measured."""
    device = resolve(name)
    usual = spread(decoded(device))
    unseen = replace(device, match=f"{device.match} Nonesuch", name=f"{device.name} Nonesuch")
    assert spread(decoded(unseen)) > usual
    assert spread(decoded(device, kv_type="q8_0", depth=4096)) > spread(decoded(device, depth=4096))
    shallow, deep, deepest = (
        spread(decoded(device, depth=depth)) for depth in (0, 16_384, 100_000)
    )
    assert shallow <= deep < deepest


def test_several_cards_are_known_less_well_than_one() -> None:
    one, two = resolve("RTX 3090"), resolve("2x RTX 3090")
    assert spread(decoded(two)) > spread(decoded(one))


def test_a_range_has_bounds_whatever_applies() -> None:
    draw = random.Random(5)
    names = [f"s{n}" for n in range(12)]
    for _ in range(200):
        shares = {name: draw.uniform(-3, 3) for name in (*names, "base")}
        assert 0 < ranges.width(shares, draw.sample(names, 6)) < 2
    assert ranges.width({}, ()) > 0.4


def test_every_stratum_of_less_evidence_only_widens() -> None:
    less = (
        "several cards",
        "quantised KV",
        "deep",
        "very deep",
        "unseen part",
        "unseen kind",
        "unseen engine",
    )
    for law in ("decode", "prefill"):
        table = efficiency.load()[law]
        assert table.width["base"] < 0
        assert all(table.width.get(name, 0.0) >= 0 for name in less)


def test_a_quantised_cache_on_cuda_is_as_slow_as_it_was_measured() -> None:
    """An RTX 3080 with q8_0 and q4_0 caches at 52,000 to 210,000 tokens: within a fifth in the
    median."""
    card, off = resolve("RTX 3080 10GB"), []
    with ROWS.open(newline="") as rows:
        for row in csv.DictReader(rows):
            if "3080" in row["device"] and row["kv"] and int(row["depth"]) >= 8192:
                model = CATALOG.by_id[row["model"]]
                variant = Variant("gguf", row["quant"], "", (), int(row["file_bytes"]))
                said = speed.decode(
                    card, model, variant, USUAL.with_kv_type(row["kv"]), depth=int(row["depth"])
                )
                off.append(abs(said.value / float(row["tok_s"]) - 1))
    assert len(off) >= 4
    assert median(off) <= 0.2


def test_a_quantised_cache_hurts_at_depth_on_cuda_and_not_where_it_is_only_read() -> None:
    for name in ("RTX 3080 10GB", "RTX 3090", "RTX 4090"):
        card = resolve(name)
        assert (
            decoded(card, depth=52_000, kv_type="q8_0").value <= decoded(card, depth=52_000).value
        )
    halo = replace(resolve("Strix Halo 128GB"), accelerator="vulkan")
    assert decoded(halo, depth=52_000, kv_type="q8_0").value > decoded(halo, depth=52_000).value


def test_prompts_under_mlx_pay_for_scores_that_no_kernel_keeps() -> None:
    """The same model with heads of 256, which MLX has no fused kernel for, takes longer at depth
    than with heads of 128."""
    model, variant = file_of("qwen3-8b", "4bit")
    wide = replace(
        model,
        layers=tuple(
            replace(layer, head_dim_k=256, head_dim_v=256, n_heads=16) for layer in model.layers
        ),
    )
    machine = decode_cost.hardware_of(resolve("M5 Max 128GB"), "mlx")
    terms = [prefill_cost.prefill_terms(m, variant, machine, depth=100_000) for m in (model, wide)]
    assert terms[1].attention_flops == pytest.approx(terms[0].attention_flops)
    assert terms[1].seconds["activations"] > 3 * terms[0].seconds["activations"]
