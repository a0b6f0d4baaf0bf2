"""Where an engine has no good kernel for a format, the plan says so: slower by what others measured of it."""

from __future__ import annotations

from typing import Literal

import pytest

from localllm.planner import decode_cost, efficiency, kernels, prefill_cost
from localllm_catalog import catalog
from localllm_catalog.types import Layer, Variant

MODELS = catalog.load().by_id


def machine(name: str, engine: str, gbps: float = 400) -> decode_cost.Hardware:
    return decode_cost.Hardware(efficiency.hardware_keys(name, engine), gbps, 40)


def file(quant: str, file_format: Literal["gguf", "mlx"] = "gguf", size: int = 5_000_000_000) -> Variant:
    return Variant(file_format, quant, "", (), size)


def parts(model: str, variant: Variant, hardware: decode_cost.Hardware) -> dict[str, float]:
    return {n: p.value for n, p in decode_cost.decode_parts(MODELS[model], variant, hardware).items()}


def test_mesa_reads_only_the_oldest_formats_at_full_speed_on_intels_gpus() -> None:
    arc, geforce = machine("Intel Arc B580", "vulkan"), machine("NVIDIA GeForce RTX 4090", "vulkan")
    shares = {q: kernels.read_share(file(q), arc.keys) for q in ("Q4_0", "F16", "Q4_K_M", "Q8_0", "IQ3_XS", "MXFP4")}
    assert shares == {"Q4_0": 1.0, "F16": 1.0, "Q4_K_M": 0.5, "Q8_0": 0.5, "IQ3_XS": 0.5, "MXFP4": 0.5}
    assert kernels.read_share(file("Q4_K_M"), geforce.keys) == 1.0
    slow, fast = (parts("qwen3-8b", file("Q4_K_M"), hardware) for hardware in (arc, geforce))
    assert slow["weights"] == 2 * fast["weights"]


def test_experts_in_bfloat16_crawl_where_the_driver_does_not_know_the_type() -> None:
    halo, r9700 = machine("AMD Ryzen AI Max+ 395 (Strix Halo)", "vulkan"), machine("AMD Radeon AI PRO R9700", "vulkan")
    bf16 = file("BF16", size=61_000_000_000)
    slow, fast = (parts("qwen3-30b-a3b", bf16, hardware) for hardware in (halo, r9700))
    assert slow["routed"] == pytest.approx(5 * fast["routed"])
    assert slow["weights"] == fast["weights"]
    assert kernels.experts_read_share(bf16, efficiency.hardware_keys("Strix Halo", "rocm")) == 1.0


def test_two_and_three_bits_are_arithmetic_under_metal_alone() -> None:
    mac, geforce = machine("Apple M2 Max", "metal"), machine("NVIDIA GeForce RTX 4090", "cuda")
    assert parts("qwen3-8b", file("Q3_K_M"), mac)["hard_unpacked"] > 0
    assert parts("qwen3-8b", file("Q4_K_M"), mac)["hard_unpacked"] == 0
    assert parts("qwen3-8b", file("Q3_K_M"), geforce)["hard_unpacked"] == 0


def test_m5s_units_multiply_experts_in_tiles_of_64_rows() -> None:
    m, mlx = MODELS["qwen3-30b-a3b"], file("4bit", "mlx", 17_000_000_000)
    m5, m4 = (machine(chip, "mlx") for chip in ("Apple M5 Max", "Apple M4 Max"))
    new, old = (prefill_cost.prefill_parts(m, mlx, hardware, n_batch=512)["padding"] for hardware in (m5, m4))
    assert new.value == pytest.approx(64 * old.value)
    assert ("tile", 1) in old.powers
    assert ("tile", 1) not in new.powers


def test_what_the_mask_hides_is_skipped_by_some() -> None:
    """Metal and Vulkan skip it, CUDA and ROCm its end in large micro-batches, MLX what is not a window's."""
    assert kernels.masked_share(("metal",), 512) == kernels.masked_share(("vulkan",), 2048) == (0.0, 0.0)
    assert kernels.masked_share(("cuda",), 512) == kernels.masked_share(("cpu",), 2048) == kernels.ALL_MASKED
    assert kernels.masked_share(("rocm",), 2048) == (0.0, 0.5)
    assert kernels.masked_share(("mlx",), 2048) == (0.0, 1.0)


def test_a_window_costs_what_is_computed_beside_it() -> None:
    """A sliding layer's attention: its window, and of the micro-batch what the kernel does not skip."""
    layer = Layer("sliding", n_kv_heads=8, head_dim_k=64, head_dim_v=64, window=128)
    alone, beside = (decode_cost.attention_flops(layer, 64, 4096, beside=b) for b in (0, 1024))
    assert beside == alone * (128 + 1024) / 128
    assert decode_cost.attention_flops(layer, 64, 100, beside=1024) == alone * 100 / 128
