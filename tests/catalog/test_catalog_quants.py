"""Number formats agree with the reference tables of the gguf package and with arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from localllm_catalog import quants
from localllm_catalog.errors import BadHeaderError, CatalogError


@pytest.mark.parametrize("kind", list(GGMLQuantizationType), ids=lambda kind: kind.name)
def test_block_sizes_are_ggmls(kind: GGMLQuantizationType) -> None:
    ours = quants.GGUF_TYPES[kind.name]
    assert (ours.id, ours.block, ours.block_bytes) == (int(kind), *GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize(
    ("name", "elements", "size"),
    [
        ("Q4_K", 4096 * 4096, 9_437_184),
        ("Q6_K", 256, 210),
        ("Q8_0", 32, 34),
        ("MXFP4", 2880 * 32, 48_960),
        ("F32", 7, 28),
    ],
)
def test_tensor_bytes(name: str, elements: int, size: int) -> None:
    assert quants.tensor_bytes(name, elements) == size


def test_tensor_bytes_refuses_broken_blocks_and_unknown_names() -> None:
    with pytest.raises(BadHeaderError):
        quants.tensor_bytes("Q4_K", 100)
    with pytest.raises(BadHeaderError):
        quants.tensor_bytes("Q4_K", -256)
    with pytest.raises(CatalogError):
        quants.tensor_bytes("Q4_KM", 256)


@pytest.mark.parametrize(
    "mixture",
    [mixture for mixture in quants.MIXTURES.values() if mixture.reference == "llama-3.1-8b"],
    ids=lambda mixture: mixture.name,
)
def test_the_bits_of_a_quant_mix_are_near_its_base_format(mixture: quants.Mixture) -> None:
    base = quants.GGUF_TYPES[mixture.base].bits
    assert base - 0.15 <= quants.body_bits(mixture.name) <= base + 1.3


def test_more_bits_never_published_as_worse() -> None:
    ladder = ["Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
    losses = [quants.MIXTURES[name].ppl_delta or 0.0 for name in ladder]
    assert losses == sorted(losses, reverse=True)
    assert all(loss > 0 for loss in losses)


@pytest.mark.parametrize(
    ("mode", "bits"),
    [
        ("3bit", Fraction(7, 2)),
        ("4bit", Fraction(9, 2)),
        ("5bit", Fraction(11, 2)),
        ("6bit", Fraction(13, 2)),
        ("8bit", Fraction(17, 2)),
        ("4bit-g32", Fraction(5)),
        ("4bit-g128", Fraction(17, 4)),
        ("mxfp4", Fraction(17, 4)),
        ("nvfp4", Fraction(9, 2)),
        ("bf16", Fraction(16)),
    ],
)
def test_mlx_bits_are_exact(mode: str, bits: Fraction) -> None:
    assert quants.mlx_bits(mode) == bits


@pytest.mark.parametrize("mode", ["7bit", "4bit-g100", "four", ""])
def test_unknown_mlx_formats_are_refused(mode: str) -> None:
    with pytest.raises(CatalogError):
        quants.mlx_bits(mode)


def test_kv_types_agree_with_the_block_formats_of_the_same_name() -> None:
    for name in ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"):
        assert quants.KV_TYPES[name] == quants.GGUF_TYPES[name.upper()].bits / 8


def test_rows_that_do_not_divide_fall_back_as_llama_cpp_does() -> None:
    assert quants.fallback("Q4_K", 640) == "Q5_0"
    assert quants.fallback("Q6_K", 2688) == "Q8_0"
    assert quants.fallback("Q4_K", 4096) == "Q4_K"
    assert quants.fallback("Q4_0", 640) == "Q4_0"
