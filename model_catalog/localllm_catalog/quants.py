"""The number formats of weights and KV caches: exact block sizes, average bits of real files, and
quality lost.

Block sizes are those of ggml (https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h, read
at b11434; equal to GGML_QUANT_SIZES of the `gguf` package 0.19) and of MLX (mlx-lm 0.32.2
convert.py, utils.py).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from localllm_catalog.errors import BadHeaderError, CatalogError


class TensorType(NamedTuple):
    """One tensor format: `block` elements are stored in `block_bytes` bytes. `id` is its number in
    GGUF files."""

    name: str
    id: int
    block: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits of one element."""
        return 8 * self.block_bytes / self.block


class Mixture(NamedTuple):
    """A file type: the formats of its tensors. Bits are per weight.

    - `file_bits`: average of a complete published file.
    - `embed`, `head`: formats of the token embedding and the output matrix.
    - `reference`: the model that `file_bits` was taken from. Its shapes are needed to separate the
      body from the embeddings.
    - `ppl_delta`: published loss against f16 (None: unknown), as added perplexity. Llama-3-8B, wiki
      (llama.cpp tools/quantize/quantize.cpp, b11434).
    - `ln_ppl_ratio`: the same as ln(PPL / PPL_f16), of salamandra-2b,
      https://huggingface.co/robbiemu/salamandra-2b-instruct.
    """

    name: str
    file_bits: float
    base: str
    embed: str
    head: str
    reference: str
    ppl_delta: float | None = None
    ln_ppl_ratio: float | None = None


# Single numbers without blocks.
_PLAIN_TYPES = (
    TensorType("F32", 0, 1, 4),
    TensorType("F16", 1, 1, 2),
    TensorType("I8", 24, 1, 1),
    TensorType("I16", 25, 1, 2),
    TensorType("I32", 26, 1, 4),
    TensorType("I64", 27, 1, 8),
    TensorType("F64", 28, 1, 8),
    TensorType("BF16", 30, 1, 2),
)
# Blocks of 32 with one scale.
_LEGACY_TYPES = (
    TensorType("Q4_0", 2, 32, 18),
    TensorType("Q4_1", 3, 32, 20),
    TensorType("Q5_0", 6, 32, 22),
    TensorType("Q5_1", 7, 32, 24),
    TensorType("Q8_0", 8, 32, 34),
    TensorType("Q8_1", 9, 32, 40),
)
# Super-blocks of 256.
_K_TYPES = (
    TensorType("Q2_K", 10, 256, 84),
    TensorType("Q3_K", 11, 256, 110),
    TensorType("Q4_K", 12, 256, 144),
    TensorType("Q5_K", 13, 256, 176),
    TensorType("Q6_K", 14, 256, 210),
    TensorType("Q8_K", 15, 256, 292),
)
# Weights from codebooks.
_IQ_TYPES = (
    TensorType("IQ2_XXS", 16, 256, 66),
    TensorType("IQ2_XS", 17, 256, 74),
    TensorType("IQ3_XXS", 18, 256, 98),
    TensorType("IQ1_S", 19, 256, 50),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("IQ3_S", 21, 256, 110),
    TensorType("IQ2_S", 22, 256, 82),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("IQ1_M", 29, 256, 56),
)
# Ternary, microscaling and one- and two-bit formats.
_LATER_TYPES = (
    TensorType("TQ1_0", 34, 256, 54),
    TensorType("TQ2_0", 35, 256, 66),
    TensorType("MXFP4", 39, 32, 17),
    TensorType("NVFP4", 40, 64, 36),
    TensorType("Q1_0", 41, 128, 18),
    TensorType("Q2_0", 42, 64, 18),
)
GGUF_TYPES: dict[str, TensorType] = {
    t.name: t for t in (*_PLAIN_TYPES, *_LEGACY_TYPES, *_K_TYPES, *_IQ_TYPES, *_LATER_TYPES)
}
GGUF_TYPE_BY_ID: dict[int, TensorType] = {t.id: t for t in GGUF_TYPES.values()}

# Type numbers that ggml used once and dropped. A file with one of them must be requantised, so it
# gets its own error message.
REMOVED_TYPE_IDS = frozenset({4, 5, 31, 32, 33, 36, 37, 38})


def tensor_bytes(type_name: str, n_elements: int) -> int:
    """Return the exact bytes of a tensor of `n_elements` in a GGUF format (e.g. "Q4_K").

    Raises CatalogError for an unknown format. Raises BadHeaderError if the elements are not whole
    blocks.
    """
    tensor_type = GGUF_TYPES.get(type_name)
    if tensor_type is None:
        raise CatalogError(
            f"{type_name} is not a GGUF tensor format", "see localllm_catalog.quants.GGUF_TYPES"
        )
    if n_elements < 0 or n_elements % tensor_type.block:
        raise BadHeaderError(
            f"{n_elements} elements are not a multiple of {type_name}'s block size "
            f"{tensor_type.block}"
        )
    return n_elements // tensor_type.block * tensor_type.block_bytes


# --- mixtures -------------------------------------------------------------------------------------
# file_bits: llama.cpp tools/quantize/README.md (b11434), Llama-3.1-8B, unless another reference is
# named. Embedding and head formats: llama.cpp src/llama-quant.cpp. All K and IQ mixtures raise the
# output matrix to Q6_K. With tied embeddings, the one shared matrix is the output matrix.

_QWEN = "qwen3.6-35b-a3b"


def _mix(
    name: str,
    file_bits: float,
    base: str,
    embed: str = "",
    ppl: float | None = None,
    ln: float | None = None,
    head: str = "Q6_K",
    reference: str = "llama-3.1-8b",
) -> Mixture:
    return Mixture(name, file_bits, base, embed or base, head, reference, ppl, ln)


# Sorted by bits, fewest first.
_ONE_AND_TWO_BITS = (
    _mix("IQ1_S", 2.0042, "IQ1_S", "Q2_K"),
    _mix("IQ1_M", 2.146, "IQ1_M", "Q2_K"),
    _mix("IQ2_XXS", 2.3824, "IQ2_XXS", "Q2_K"),
    _mix("IQ2_XS", 2.5882, "IQ2_XS", "Q2_K"),
    _mix("IQ2_S", 2.7403, "IQ2_XS", "IQ3_S", ln=0.5013),
    _mix("IQ2_M", 2.9294, "IQ2_S", "IQ3_S", ln=0.3428),
    _mix("Q2_K_S", 2.9697, "Q2_K", "", 3.1836),
    _mix("Q2_K", 3.1593, "Q2_K", "", 3.5199),
)
_THREE_BITS = (
    _mix("IQ3_XXS", 3.2548, "IQ3_XXS", "IQ3_S"),
    _mix("IQ3_XS", 3.4977, "IQ3_XXS", "IQ3_S"),
    _mix("IQ3_S", 3.6606, "IQ3_S"),
    _mix("IQ3_M", 3.7628, "IQ3_S", ln=0.0868),
    _mix("Q3_K_S", 3.6429, "Q3_K", "", 1.6321),
    _mix("Q3_K_M", 3.996, "Q3_K", "", 0.6569, ln=0.0917),
    _mix("Q3_K_L", 4.2979, "Q3_K", "", 0.5562, ln=0.0707),
)
_FOUR_BITS = (
    _mix("IQ4_XS", 4.4597, "IQ4_XS", ln=0.037),
    _mix("IQ4_NL", 4.6818, "IQ4_NL", ln=0.037),
    # file bits computed: 4.5 with the output matrix in Q6_K
    _mix("Q4_0", 4.64, "Q4_0", "", 0.4685),
    # file bits computed: 5.0 with the output matrix in Q6_K
    _mix("Q4_1", 5.11, "Q4_1", "", 0.4511),
    _mix("Q4_K_S", 4.6672, "Q4_K", "", 0.2689, ln=0.0354),
    _mix("Q4_K_M", 4.8944, "Q4_K", "", 0.1754, ln=0.0311),
)
_FIVE_BITS_AND_MORE = (
    # file bits computed: 5.5 with the output matrix in Q6_K
    _mix("Q5_0", 5.57, "Q5_0", "", 0.1316),
    # file bits computed: 6.0 with the output matrix in Q6_K
    _mix("Q5_1", 6.04, "Q5_1", "", 0.1062),
    _mix("Q5_K_S", 5.5704, "Q5_K", "", 0.1049, ln=0.0071),
    _mix("Q5_K_M", 5.7036, "Q5_K", "", 0.0569, ln=0.0061),
    _mix("Q6_K", 6.5633, "Q6_K", "", 0.0217, ln=0.0011),
    _mix("Q8_0", 8.5008, "Q8_0", "", 0.0026, ln=0.0002, head="Q8_0"),
    _mix("F16", 16.0005, "F16", head="F16"),
    _mix("BF16", 16.0005, "BF16", head="BF16"),
)


# Unsloth Dynamic and MXFP4 mixtures: file bytes ÷ text weights of Qwen3.6-35B-A3B. From PyPI rigma
# 0.12.2 and https://github.com/janhq/model-catalog model_catalog_v2.json, 2026-05-05; the latter is
# rounded to 0.1 GiB.
def _dynamic(
    name: str, file_bits: float, base: str, embed: str = "", head: str = "Q6_K"
) -> Mixture:
    return _mix(name, file_bits, base, embed, head=head, reference=_QWEN)


_DYNAMIC = (
    _dynamic("UD-Q2_K_XL", 2.837, "Q2_K"),
    _dynamic("UD-Q3_K_M", 3.84, "Q3_K"),
    _dynamic("UD-Q3_K_XL", 3.888, "Q3_K"),
    _dynamic("UD-IQ4_XS", 4.09, "IQ4_XS"),
    _dynamic("UD-Q4_K_M", 5.109, "Q4_K"),  # 5.373 on Gemma 4 26B-A4B
    _dynamic("UD-Q4_K_XL", 5.161, "Q4_K"),
    _dynamic("UD-Q5_K_M", 6.1, "Q5_K"),
    _dynamic("UD-Q5_K_XL", 6.15, "Q5_K"),
    _dynamic("UD-Q6_K", 6.77, "Q6_K"),
    _dynamic("UD-Q6_K_XL", 7.36, "Q6_K", head="Q8_0"),
    _dynamic("UD-Q8_K_XL", 8.87, "Q8_0", head="Q8_0"),
    _dynamic("MXFP4_MOE", 5.01, "MXFP4", "Q8_0", head="Q8_0"),
)
MIXTURES: dict[str, Mixture] = {
    m.name: m
    for m in (*_ONE_AND_TWO_BITS, *_THREE_BITS, *_FOUR_BITS, *_FIVE_BITS_AND_MORE, *_DYNAMIC)
}

# Perplexity of Llama-3-8B at 16 bits, the base of the published losses of that model (9.7516 at
# Q2_K, which lost 3.5199: https://github.com/ggml-org/llama.cpp/pull/6936).
LLAMA_3_PPL = 6.2316
# The numbers of weights of the models that the losses were published for.
_SALAMANDRA_PARAMS = 2.25e9
_LLAMA_3_PARAMS = 8.03e9
# Small models lose more: in proportion to this power of the number of weights.
SIZE_EXPONENT = -0.35


def published_loss(mixture: Mixture, n_params: float) -> float | None:
    """Return the published ln(PPL / PPL_f16) of a mixture, scaled to a model of `n_params` weights.

    None if no figure is published.
    """
    if mixture.ln_ppl_ratio is not None:
        return mixture.ln_ppl_ratio * float((n_params / _SALAMANDRA_PARAMS) ** SIZE_EXPONENT)
    if mixture.ppl_delta is not None:
        ln_ratio = math.log(1 + mixture.ppl_delta / LLAMA_3_PPL)
        return ln_ratio * float((n_params / _LLAMA_3_PARAMS) ** SIZE_EXPONENT)
    return None


def loss_by_bits(bits: float, n_params: float) -> float:
    """Return ln(PPL / PPL_f16) of a format with `bits` a weight, for a model of `n_params` weights.

    ln of the published ratios falls by 1.22 a bit: 0.343 at 2.93 bits, 0.092 at 3.99, 0.031 at
    4.89.
    """
    salamandra_loss = math.exp(-3.47 - 1.22 * (bits - 4.89))
    return salamandra_loss * float((n_params / _SALAMANDRA_PARAMS) ** SIZE_EXPONENT)


# (weights, those of the token embedding) of the models that the mixtures' bits were read from. Both
# are untied.
_REFERENCES = {"llama-3.1-8b": (8_030_261_248, 525_336_576), _QWEN: (34_659_000_000, 508_559_360)}

# The replacement for a K or IQ format if a row is not a multiple of 256 (llama.cpp
# src/llama-quant.cpp, fallback table).
_FALLBACK = {
    "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL", "IQ2_XXS": "IQ4_NL",
    "IQ2_XS": "IQ4_NL",
    "IQ2_S": "IQ4_NL", "IQ3_XXS": "IQ4_NL", "IQ3_S": "IQ4_NL", "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip


def fallback(type_name: str, row: int) -> str:
    """Return the format that llama.cpp actually uses for rows of `row` elements if `type_name` is
    requested."""
    if row % GGUF_TYPES[type_name].block:
        return _FALLBACK.get(type_name, type_name)
    return type_name


@cache
def body_bits(mixture: str) -> float:
    """Return the bits per weight of all but the embedding and output matrices, derived from the
    mixture's reference."""
    parts = MIXTURES[mixture]
    total, n_embedding = _REFERENCES[parts.reference]
    ends_bits = n_embedding * (GGUF_TYPES[parts.embed].bits + GGUF_TYPES[parts.head].bits)
    return (total * parts.file_bits - ends_bits) / (total - 2 * n_embedding)


# --- MLX ------------------------------------------------------------------------------------------


def mlx_bits(mode: str) -> Fraction:
    """Return the exact bits per quantised weight of an MLX format: "4bit" (group 64), "4bit-g32",
    "mxfp4", "nvfp4", "bf16"…

    Affine formats hold a 16-bit scale and a 16-bit bias per group. Raises CatalogError for an
    unknown format.
    """
    fixed = {
        "bf16": Fraction(16),
        "fp16": Fraction(16),
        "mxfp4": Fraction(17 * 8, 32),
        "mxfp8": Fraction(33 * 8, 32),
        "nvfp4": Fraction(9 * 8, 16),
    }
    if mode in fixed:
        return fixed[mode]
    bits_text, _, group_text = mode.partition("bit")
    group = group_text.removeprefix("-g") or "64"
    if bits_text not in {"2", "3", "4", "5", "6", "8"} or group not in {"32", "64", "128"}:
        raise CatalogError(
            f"{mode!r} is not an MLX weight format",
            "known: 2-6bit, 8bit, mxfp4, mxfp8, nvfp4, bf16",
        )
    return int(bits_text) + Fraction(32, int(group))


# --- KV cache -------------------------------------------------------------------------------------

# Bytes per cached element, for all types that llama.cpp accepts for -ctk/-ctv.
KV_TYPES: dict[str, Fraction] = {
    "f32": Fraction(4),
    "f16": Fraction(2),
    "bf16": Fraction(2),
    "q8_0": Fraction(34, 32),
    "q5_1": Fraction(24, 32),
    "q5_0": Fraction(22, 32),
    "q4_1": Fraction(20, 32),
    "q4_0": Fraction(18, 32),
    "iq4_nl": Fraction(18, 32),
}
# Types that only MLX has, for heads of 128: groups of 64 with a scale and a bias of 16 bits, and
# TurboQuant with a norm of 16 bits. The planner counts them for each model (planner/kv_sizes.py).
MLX_KV_TYPES: dict[str, Fraction] = {
    "q6_0": Fraction(52, 64),
    "q3_0": Fraction(28, 64),
    "q2_0": Fraction(20, 64),
    "turbo4": Fraction(66, 128),
    "turbo3": Fraction(50, 128),
    "turbo2": Fraction(34, 128),
}
_ALL_KV_TYPES = KV_TYPES | MLX_KV_TYPES


def kv_element_bytes(kv_type: str) -> Fraction:
    """Return the exact bytes of one cached element. For a pair "K/V" (such as q8_0/q4_0), return
    the mean of keys and values.

    Raises CatalogError for a type that no backend has.
    """
    if "/" in kv_type:
        k, v = kv_type.split("/", 1)
        return (kv_element_bytes(k) + kv_element_bytes(v)) / 2
    try:
        return _ALL_KV_TYPES[kv_type]
    except KeyError:
        raise CatalogError(
            f"{kv_type!r} is not a KV cache type", f"known: {', '.join(_ALL_KV_TYPES)}"
        ) from None
