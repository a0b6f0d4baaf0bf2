"""Ranges of predicted speeds: less evidence, more cards or a deeper context never makes a range
narrower. Attention over a quantised cache takes as long as its kernels need."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from localllm.device import parts_table
from localllm.device.name_lookup import resolve
from localllm.device.parts_table import DeviceRow
from localllm.device.synthetic_device import one_computer, simulate
from localllm.device.types import Device
from localllm.planner import decode_cost, efficiency, prefill_cost, ranges, speed
from localllm.planner.types import USUAL, Range
from localllm_catalog import catalog
from localllm_catalog.layers.full import Full
from localllm_catalog.types import Layer, Model, Variant

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


def machine(row: DeviceRow) -> Device:
    return simulate(row, row.memory_gb[0] if row.memory_gb else 32.0, [])


def predicted(device: Device, *, depth: int = 0) -> dict[str, float]:
    """Return the widths of the ranges for decode and prefill, of a dense model and a mixture, with
    every engine of the machine."""
    found = {}
    for model_id, quants in (
        ("llama-3.1-8b-instruct", ("Q4_K_M", "4bit")),
        ("qwen3-30b-a3b", ("Q4_K_M", "4bit")),
    ):
        engines = quants if device.accelerator == "metal" else quants[:1]
        for quant in engines:
            file = file_of(model_id, quant)
            name = f"{model_id} {quant}"
            found[f"{name} answers"] = spread(speed.decode(device, *file, depth=depth))
            found[f"{name} prompts"] = spread(speed.prefill(device, *file, depth=depth))
            several = speed.decode(device, *file, depth=depth, n_sequences=4)
            found[f"{name} four answers"] = spread(several)
    return found


def narrower(than: dict[str, float], found: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return the predictions of `found` with a narrower range, with both widths."""
    return {
        name: (width, found[name]) for name, width in than.items() if found[name] < width - 1e-9
    }


@pytest.mark.parametrize("row", parts_table.rows(), ids=lambda row: row.name)
def test_a_deeper_context_never_makes_a_range_narrower(row: DeviceRow) -> None:
    device = machine(row)
    widths = [predicted(device, depth=depth) for depth in (0, 8_192, 16_384, 100_000)]
    for shallow, deep in pairwise(widths):
        assert not narrower(shallow, deep)


@pytest.mark.parametrize("row", parts_table.rows(), ids=lambda row: row.name)
def test_less_evidence_never_makes_a_range_narrower(row: DeviceRow) -> None:
    """The range of an unmeasured part is at least as wide as that of a measured one of its
    family."""
    device = machine(row)
    name = f"{device.match or device.name} Nonesuch"
    unseen = replace(device, match=name, name=name)
    for depth in (0, 16_384):
        assert not narrower(predicted(device, depth=depth), predicted(unseen, depth=depth))


@pytest.mark.parametrize(
    "row", [row for row in parts_table.rows() if row.kind == "discrete"], ids=lambda row: row.name
)
def test_more_cards_never_make_a_range_narrower(row: DeviceRow) -> None:
    one = machine(row)
    for depth in (0, 16_384):
        alone = predicted(one, depth=depth)
        for n in (2, 4):
            assert not narrower(alone, predicted(one_computer([one] * n), depth=depth))


def test_a_range_is_that_of_the_narrowest_known_stratum() -> None:
    keys = efficiency.hardware_keys("RTX 3090", "cuda")
    names = ranges.strata(ranges.SEEN, keys, "MoE", 0)
    assert names[0] == "seen: nvidia-ampere.cuda MoE short"
    assert names[-1] == ranges.SEEN
    for n, name in enumerate(names):
        assert ranges.width(dict.fromkeys(names[n:], 9.0) | {name: 0.1}, names) == 0.1
    assert ranges.width({}, names) == ranges.UNMEASURED_WIDTH
    assert all("ampere" not in name for name in ranges.strata(ranges.UNSEEN_KIND, keys, "MoE", 0))


def test_the_evidence_level_of_a_machine_depends_on_its_rows() -> None:
    def known(name: str, engine: str = "cuda") -> str:
        rows = efficiency.load()["decode"].rows
        return ranges.evidence(rows, efficiency.hardware_keys(name, engine))

    assert known("NVIDIA GeForce RTX 3090") == known("NVIDIA H200 SXM") == ranges.SEEN
    assert known("NVIDIA GeForce RTX 3095") == ranges.UNSEEN_PART
    assert known("NVIDIA B200") == ranges.UNSEEN_KIND
    assert known("NVIDIA GeForce RTX 3090", "nobody's") == ""


@pytest.mark.parametrize("name", ["B200", "MI300X", "GH200"])
def test_a_data_centre_card_without_rows_has_the_wide_range_of_the_first_one(
    name: str,
) -> None:
    """Before an H200 had rows, a mixture was 1.7 times as fast as predicted, and prompts a quarter
    as fast."""
    device = resolve(name)
    assert spread(decoded(device)) >= 0.5
    read = speed.prefill(device, *file_of("llama-3.1-8b-instruct"))
    assert spread(read) >= 1.3


def test_the_predicted_speed_of_a_quantised_cache_on_cuda_matches_measurements() -> None:
    """An RTX 3080 with q8_0 and q4_0 caches at 52,000 to 210,000 tokens: the median error is at
    most 20 %."""
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


def test_a_quantised_cache_slows_deep_decoding_on_cuda_but_not_on_vulkan() -> None:
    for name in ("RTX 3080 10GB", "RTX 3090", "RTX 4090"):
        card = resolve(name)
        assert (
            decoded(card, depth=52_000, kv_type="q8_0").value <= decoded(card, depth=52_000).value
        )
    halo = replace(resolve("Strix Halo 128GB"), accelerator="vulkan")
    assert decoded(halo, depth=52_000, kv_type="q8_0").value > decoded(halo, depth=52_000).value


def test_mlx_prefill_is_slower_for_heads_without_a_fused_kernel() -> None:
    """MLX has no fused kernel for heads of 256. At depth, such a model is slower than the same
    model with heads of 128."""
    model, variant = file_of("qwen3-8b", "4bit")
    heads = Layer(Full(n_kv_heads=8, head_dim_k=256, head_dim_v=256, n_heads=16))
    wide = replace(model, layers=(heads,) * len(model.layers))
    machine = decode_cost.hardware_of(resolve("M5 Max 128GB"), "mlx")
    terms = [prefill_cost.prefill_terms(m, variant, machine, depth=100_000) for m in (model, wide)]
    assert terms[1].attention_flops == pytest.approx(terms[0].attention_flops)
    assert terms[1].seconds["activations"] > 3 * terms[0].seconds["activations"]
