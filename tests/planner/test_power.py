"""Power limits of boards: prefill runs at the limit, decode below it. A missing figure changes no
prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device.name_lookup import resolve
from localllm.planner import decode_cost, efficiency, prefill_cost
from localllm_catalog import catalog

MODEL = next(m for m in catalog.load().models if m.id == "llama-3.1-8b-instruct")
VARIANT = next(v for v in MODEL.variants if v.quant == "Q4_K_M")


def test_a_third_of_the_power_gives_two_thirds_of_the_prefill_speed() -> None:
    """llama.cpp's scoreboard for CUDA, Llama 2 7B in Q4_0, as a share of the units' nominal rate:
    an L40 (142 SMs, 300 W) 0.67, an RTX 4090 (128, 450 W) 0.94, an RTX 4080 (76, 320 W) 1.14."""
    l40, card, small = (
        efficiency.share(part, units)
        for part, units in (("l40", 142), ("rtx 4090", 128), ("rtx 4080", 76))
    )
    assert l40 / card == pytest.approx(0.67 / 0.94, rel=0.1)
    assert small / card == pytest.approx(1.14 / 0.94, rel=0.1)


def test_a_power_limit_slows_only_matrix_multiplications() -> None:
    limited = decode_cost.hardware_of(resolve("L40"), "llamacpp")
    free = replace(limited, power_share=1.0)
    a, b = (prefill_cost.prefill_terms(MODEL, VARIANT, hardware) for hardware in (limited, free))
    assert a.seconds["matmul"] == pytest.approx(b.seconds["matmul"] / limited.power_share)
    assert (a.seconds["attention"], a.seconds["weights"], a.seconds["layers"]) == (
        b.seconds["attention"],
        b.seconds["weights"],
        b.seconds["layers"],
    )
    assert decode_cost.decode_terms(MODEL, VARIANT, limited) == decode_cost.decode_terms(
        MODEL, VARIANT, free
    )


@pytest.mark.parametrize("name", ["M4 Max 128GB", "RTX 4090 Laptop GPU", "Strix Halo 128GB"])
def test_without_a_stated_power_limit_no_speed_is_subtracted(name: str) -> None:
    assert decode_cost.hardware_of(resolve(name), "llamacpp").power_share == 1.0


def test_large_steps_skip_what_the_mask_hides() -> None:
    """CUDA's attention processes all of a small micro-batch, masked or not. For a large one, it
    stops at each tile's last token."""
    hardware = decode_cost.hardware_of(resolve("DGX Spark"), "llamacpp")
    small, large = (
        prefill_cost.prefill_terms(MODEL, VARIANT, hardware, prompt_tokens=2048, n_batch=n)
        for n in (512, 2048)
    )
    assert large.seconds["attention"] == pytest.approx(small.seconds["attention"] * 1024 / 1280)
