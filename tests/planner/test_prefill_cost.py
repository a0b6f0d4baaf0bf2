"""The cost of a prompt's tokens in addition to matrix products: activations, masks, half-filled
tiles, launches, emulated types."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device.name_lookup import resolve
from localllm.planner import decode_cost, efficiency, kernels, prefill_cost
from localllm.planner.prefill_cost import PrefillTerms
from localllm_catalog import catalog
from localllm_catalog.layers.sliding import Sliding
from localllm_catalog.types import Model, Variant

MODELS = catalog.load().by_id
SPARK = decode_cost.hardware_of(resolve("DGX Spark"), "llamacpp")
CPU = decode_cost.Hardware(("cpu",), 30, 1, 8)


def file_of(model: Model, quant: str) -> Variant:
    return next(v for v in model.variants if v.quant == quant)


def terms(
    name: str,
    hardware: decode_cost.Hardware,
    *,
    tokens: int = 2048,
    depth: int = 0,
    n_batch: int = 512,
) -> PrefillTerms:
    m = MODELS[name]
    return prefill_cost.prefill_terms(
        m, file_of(m, "Q4_K_M"), hardware, prompt_tokens=tokens, depth=depth, n_batch=n_batch
    )  # fmt: skip


def test_activations_cost_memory_bandwidth_and_relatively_more_in_small_models() -> None:
    """Llama 3.1 8B: 32 layers of 4 bytes x (12 x 4,096 + 6 x 4,096 + 6 x 14,336) are 20.4 MB per
    token."""
    assert prefill_cost.activation_bytes(MODELS["llama-3.1-8b-instruct"]) == pytest.approx(
        20.4e6, rel=0.01
    )
    small, large = (terms(name, SPARK) for name in ("qwen3-0.6b", "qwen3-32b"))
    assert (
        small.seconds["activations"] / small.seconds["matmul"]
        > 2 * large.seconds["activations"] / large.seconds["matmul"]
    )
    twice = terms("qwen3-0.6b", replace(SPARK, bandwidth_gbps=2 * SPARK.bandwidth_gbps))
    assert twice.seconds["activations"] == pytest.approx(small.seconds["activations"] / 2)
    assert twice.seconds["matmul"] == small.seconds["matmul"]


def test_experts_that_get_few_tokens_waste_a_part_of_every_tile() -> None:
    """512 tokens give 32 to each of 128 experts, and 2,048 give 128. Larger steps need less time
    for the same matrices."""
    small, large = (terms("qwen3-30b-a3b", SPARK, n_batch=n) for n in (512, 2048))
    assert 1.05 < small.seconds["matmul"] / large.seconds["matmul"] < 1.5
    dense = [terms("qwen3-8b", SPARK, n_batch=n).seconds["matmul"] for n in (512, 2048)]
    assert dense[0] == dense[1]


def test_mlx_on_m5_multiplies_experts_with_few_tokens_in_half_tiles() -> None:
    """Of 256 experts, each gets 16 of 512 tokens and 64 of 2,048. MLX's tiles have 32 rows below 64
    tokens."""
    m5 = decode_cost.hardware_of(resolve("M5 Max 128GB"), "mlx")
    m = MODELS["qwen3.6-35b-a3b"]

    def padding_s(tokens: int) -> float:
        parts = prefill_cost.prefill_parts(
            m, file_of(m, "4bit"), m5, prompt_tokens=tokens, n_batch=2048
        )
        return tokens * parts["padding"].value

    assert padding_s(512) == pytest.approx(padding_s(2048) / 2, rel=0.01)
    assert padding_s(2047) == pytest.approx(padding_s(2048) / 2, rel=0.01)


def test_the_cpu_writes_the_mask_in_time_proportional_to_the_context() -> None:
    near, far = (terms("qwen3-8b", SPARK, depth=depth).seconds["mask"] for depth in (0, 30_000))
    assert far > 10 * near
    assert far < 100e-6
    m = MODELS["qwen3-8b"]
    mlx = decode_cost.hardware_of(resolve("M4 Max 128GB"), "mlx")
    assert prefill_cost.prefill_terms(m, file_of(m, "4bit"), mlx, depth=30_000).seconds["mask"] == 0
    spared = terms("qwen3-30b-a3b", CPU)
    assert spared.seconds["mask"] == spared.seconds["activations"] == 0


def test_kernel_launch_times_of_prefill_depend_on_the_clock() -> None:
    slow, fast = (
        terms("qwen3-8b", replace(SPARK, clock_ghz=ghz)) for ghz in (1.4, efficiency.REFERENCE_GHZ)
    )
    assert slow.seconds["layers"] > 1.1 * fast.seconds["layers"]
    assert slow.seconds["matmul"] == fast.seconds["matmul"]


def test_a_device_without_kernels_for_a_type_multiplies_at_half_the_rate() -> None:
    m = MODELS["qwen3-8b"]
    bf16 = Variant("gguf", "BF16", "", (), 16_400_000_000)
    halo, r9700, geforce = (
        decode_cost.Hardware(efficiency.hardware_keys(name, "vulkan"), 256, 37)
        for name in (
            "AMD Ryzen AI Max+ 395 (Strix Halo)",
            "AMD Radeon AI PRO R9700",
            "NVIDIA GeForce RTX 4090",
        )
    )
    shares = [kernels.matrix_share(bf16, hardware.keys) for hardware in (halo, r9700, geforce)]
    assert shares == [0.5, 1.0, 1.0]
    assert kernels.matrix_share(file_of(m, "Q4_K_M"), halo.keys) == 1.0
    p100, p40 = (
        decode_cost.Hardware(efficiency.hardware_keys(n, "cuda"), 700, 20)
        for n in ("Tesla P100", "Tesla P40")
    )
    assert [kernels.matrix_share(file_of(m, "Q4_K_M"), h.keys) for h in (p100, p40)] == [0.3, 1.0]


def test_m1_and_m2_emulate_the_bfloat16_of_mlx() -> None:
    key = "apple-emulated-bf16.mlx"
    assert all(key in efficiency.hardware_keys(chip, "mlx") for chip in ("Apple M1", "M2 Ultra"))
    assert not any(key in efficiency.hardware_keys(chip, "mlx") for chip in ("Apple M3", "M4 Max"))
    assert key not in efficiency.hardware_keys("Apple M1", "metal")


def test_a_sliding_window_costs_the_computed_part_of_the_micro_batch() -> None:
    """A sliding layer's attention covers its window, and the part of the micro-batch that the
    kernel does not skip."""
    mixer = Sliding(n_kv_heads=8, head_dim_k=64, head_dim_v=64, window=128)
    alone, beside = (mixer.flops(64, 4096, b) for b in (0, 1024))
    assert beside == alone * (128 + 1024) / 128
    assert mixer.flops(64, 100, 1024) == alone * 100 / 128


@pytest.mark.parametrize(
    ("machine", "name", "quant", "shallow", "deep"),
    [
        ("Tesla P100", "llama-3.1-8b-instruct", "Q8_0", 650.6, 172.1),
        ("Tesla P100", "gemma-4-31b-it", "Q4_0", 151.2, 67.1),
        ("Tesla P40", "qwen3.6-35b-a3b", "Q4_K_M", 964.5, 427.2),
    ],
)
def test_depth_slows_prefill_as_measured_on_chips_without_matrix_units(
    machine: str, name: str, quant: str, shallow: float, deep: float
) -> None:
    """512 tokens at depths 0 and 32,768. A P100 has half as many lanes per unit as a P40."""
    m = MODELS[name]
    v = next((v for v in m.variants if v.quant == quant), m.variants[0])
    hardware = decode_cost.hardware_of(resolve(machine), "llamacpp")
    seconds = [
        prefill_cost.prefill_terms(m, v, hardware, prompt_tokens=512, depth=depth).total_s
        for depth in (0, 32_768)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(shallow / deep, rel=0.3)
