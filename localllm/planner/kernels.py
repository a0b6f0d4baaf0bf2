"""What a format costs more where an engine has no good kernel for it (kernels.toml), and how fast
its matrices were timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from localllm.device.types import Device, MatrixRates, TypeRates
from localllm.planner import efficiency, needs
from localllm.planner.kernel_facts import facts
from localllm.planner.streams import streamed
from localllm.planner.types import Workload, backend_of
from localllm_catalog import quants
from localllm_catalog.types import Model, Variant

Keys = tuple[str, ...]

# llama.cpp lays these out anew for no processor, and has no kernel for many rows of them: the rate
# that is measured is of Q4_K (two Zen cores, AVX-512, 512 tokens: 87 GFLOP/s of Q4_1, 289 of Q4_K
# laid out anew, 278 of Q4_0).
CPU_PLAIN_FORMATS = ("Q4_1", "Q5_0", "Q5_1")
_CPU_PLAIN_SHARE = 0.3

# From this micro-batch on some kernels skip what the mask hides at its end.
_LARGE_BATCH = 1024
# Shares of what the mask hides from a token: (of the tokens after it, of those before its window).
ALL_MASKED = (1.0, 1.0)


def masked_share(keys: Keys, batch: int) -> tuple[float, float]:
    """What attention computes of a micro-batch although the mask hides it, as shares: of the tokens
    after one, and of those before its window."""
    row = facts(keys)
    if row.masked_large is not None and batch >= _LARGE_BATCH:
        return row.masked_large
    return row.masked


def read_share(variant: Variant, keys: Keys) -> float:
    """Share of the usual rate at which weights of this format are read for one token."""
    row = facts(keys)
    if efficiency.quant_class(variant) in row.read_fast:
        return 1.0
    return row.read_share


def experts_read_share(variant: Variant, keys: Keys) -> float:
    """The same of chosen experts."""
    share = facts(keys).bf16_experts_share
    if variant.quant.upper() == "BF16" and share < 1:
        return share
    return read_share(variant, keys)


def unpack_flops(variant: Variant, keys: Keys) -> float:
    """Arithmetic at the units' nominal rate that a weight of this format takes beyond what every
    format does."""
    return facts(keys).unpack_flops.get(efficiency.quant_class(variant), 0.0)


def matrix_share(variant: Variant, keys: Keys) -> float:
    """Share of the units' nominal rate at which matrices of this format are multiplied.

    A processor's are those of Q4_K laid out anew, where this type was not timed itself.
    """
    row = facts(keys)
    quant = variant.quant.upper()
    if quant == "BF16" and row.bf16_share < 1:
        return row.bf16_share
    if keys[0] == "cpu" and quant in CPU_PLAIN_FORMATS:
        return _CPU_PLAIN_SHARE
    return row.matrix_share


# What a mixture raises above its own type: its output, and of a K mixture about every second of the
# rest that it raises.
_RAISED = "Q6_K"
# The same of MXFP4, and of what has more bits than the above (Unsloth's dynamic files).
_RAISED_HIGH = "Q8_0"
# Up to so many tokens at once a matrix is multiplied token by token; from so many on as fast as a
# whole prompt's. (Products of Q4_K as stored, two Zen cores: 155, 150, 154, 191, 331, 457 and 506
# GFLOP/s with 1, 2, 4, 8, 16, 32 and 64 tokens.)
_FEW = 2
_MANY = 64
_UNMIXED = ("Q8_0", "F16", "BF16", "F32")
# Of these the output alone is raised, which a prompt is not multiplied with but for its last token.
_OUTPUT_RAISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")


def base_type(variant: Variant) -> str:
    """The type of most of the file's weights ("Q4_K" of "UD-Q4_K_XL"); "" of a name that says
    none."""
    quant = variant.quant.upper()
    mixture = quants.MIXTURES.get(quant)
    if mixture is not None:
        return mixture.base
    for name in (quant, quant.partition("_")[0]):
        if name in quants.GGUF_TYPES:
            return name
    return ""


def types_needed(variant: Variant) -> list[str]:
    """The types whose rates tell how fast the file is multiplied; none of a file whose types nobody
    can tell."""
    base = base_type(variant)
    if not base:
        return []
    return list(dict.fromkeys((efficiency.CPU_YARDSTICK, base, _raised(base, 0.0)[0])))


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Of the weights that one token is multiplied with, `n_params` of one type; `routed`: of
    experts."""

    type: str
    n_params: float
    routed: bool


@lru_cache(4096)
def parts(model: Model, variant: Variant) -> tuple[WeightPart, ...]:
    """What one token is multiplied with, by type. A file says its bits, and its name the type of
    most of it; what is above that type's bits is of the type that mixtures raise their better
    matrices to."""
    base = base_type(variant)
    read = streamed(model, variant)
    found = list[WeightPart]()
    both = (
        (False, read.dense_bytes, read.dense_params),
        (True, read.routed_bytes, read.routed_params),
    )
    for routed, n_bytes, n_params in both:
        if base and n_params:
            raised, share = _raised(base, 8 * n_bytes / n_params)
            found.append(WeightPart(base, n_params * (1 - share), routed))
            found.append(WeightPart(raised, n_params * share, routed))
    return tuple(part for part in found if part.n_params)


def _raised(base: str, bits: float) -> tuple[str, float]:
    """(type of the raised weights, their share) where weights of `base` and those together come to
    so many bits."""
    if base in _UNMIXED:
        return base, 0.0
    low = float(quants.GGUF_TYPES[base].bits)
    high = float(quants.GGUF_TYPES[_RAISED].bits)
    raised = _RAISED
    if base == "MXFP4" or bits > high >= low:
        raised = _RAISED_HIGH
    high = float(quants.GGUF_TYPES[raised].bits)
    if high > low:
        return raised, min(max((bits - low) / (high - low), 0.0), 1.0)
    return base, 0.0


def _timed(
    rates: Sequence[TypeRates], model: Model, variant: Variant, *, stored: bool
) -> list[tuple[WeightPart, MatrixRates]]:
    """The file's weights with the rates of their types, held as they are `stored` or as the engine
    would have it; none where its main type was not timed. A raised type that was not timed counts
    as the main one."""
    known = {each.type: each.stored if stored else each.usual for each in rates}
    main = known.get(base_type(variant))
    if main is None:
        return []
    return [(part, known.get(part.type, main)) for part in parts(model, variant)]


def _mean_flops_s(rated: Sequence[tuple[WeightPart, float]]) -> float:
    """FLOP/s of weights that are multiplied one after the other, each at its TFLOP/s."""
    n_params = sum(part.n_params for part, _ in rated)
    return 1e12 * n_params / sum(part.n_params / tflops for part, tflops in rated)


def _of_prompts(part: WeightPart, at: MatrixRates) -> float:
    if part.routed:
        return at.experts_tflops.value
    return at.prompt_tflops.value


def flops_s(
    rates: Sequence[TypeRates], model: Model, variant: Variant, *, stored: bool
) -> tuple[float, float] | None:
    """(FLOP/s of a prompt, FLOP/s of one token) of the file's matrices; None where its main type
    was not timed."""
    timed = _timed(rates, model, variant, stored=stored)
    base = base_type(variant)
    if not timed:
        return None
    is_plain = base not in _OUTPUT_RAISED
    read = [(part, at) for part, at in timed if part.type == base or is_plain] or timed
    prompt = _mean_flops_s([(part, _of_prompts(part, at)) for part, at in read])
    return prompt, _mean_flops_s([(part, at.token_tflops.value) for part, at in timed])


def rows_flops_s(
    rates: Sequence[TypeRates], model: Model, variant: Variant, rows: int, *, stored: bool
) -> float | None:
    """FLOP/s of the file's matrices in a step over `rows` tokens, such as several streams' or a
    draft's; None as `flops_s`. Experts get a share of the rows each, which is one for as long as
    there are more experts than rows."""
    timed = _timed(rates, model, variant, stored=stored)
    x = model.experts
    each = rows if x is None else rows * x.n_active / x.n_experts
    if not timed:
        return None
    rated = []
    for part, at in timed:
        shared = each if part.routed else rows
        rated.append((part, _between(at.token_tflops.value, _of_prompts(part, at), shared)))
    return _mean_flops_s(rated)


def _between(token: float, prompt: float, rows: float) -> float:
    """The rate of so many rows: a power of their number (at most itself, or more rows would take
    less time)."""
    most = math.log(_MANY / _FEW)
    power = min(1.0, math.log(prompt / token) / most)
    return float(token * math.exp(power * min(most, math.log(max(rows, _FEW) / _FEW))))


# What is written after a prompt, beside what a model that thinks writes first: a screen of text, or
# of code.
_ANSWER_TOKENS = 300
# A file of less is loaded, and answers, before its kernels are timed.
_WORTH_TIMING_BYTES = 128 * 2**20


def layout(
    device: Device, model: Model, variant: Variant, workload: Workload
) -> Literal["auto", "stored"]:
    """How `variant`'s weights are best held on `device` for that work; "auto" (the engine's own
    way) where nobody measured, and where it lays nothing out."""
    base = base_type(variant)
    if not _on_the_processor(device, variant):
        return "auto"
    if not any(rate.laid_out for rate in device.matrix_rates if rate.type == base):
        return "auto"
    stored = flops_s(device.matrix_rates, model, variant, stored=True)
    usual = flops_s(device.matrix_rates, model, variant, stored=False)
    if stored is None or usual is None:
        return "auto"
    need = needs.need_of(workload)

    def work(flops_s: tuple[float, float]) -> float:
        prompt, token = flops_s
        # Held so once for a whole session, whose first prompt nothing of is cached.
        return need.prompt_tokens / prompt + _ANSWER_TOKENS / token

    if work(stored) < work(usual):
        return "stored"
    return "auto"


def types_to_time(device: Device, variant: Variant) -> list[str]:
    """The types whose kernels are worth timing before `variant` is planned on `device`: they decide
    how its weights are held and how fast it is said to be."""
    heavy = (variant.weights_bytes or variant.file_bytes) >= _WORTH_TIMING_BYTES
    if heavy and _on_the_processor(device, variant):
        return types_needed(variant)
    return []


def _on_the_processor(device: Device, variant: Variant) -> bool:
    return device.accelerator == "cpu" and backend_of(variant).lays_out
