"""Test whether the requested KV type is fast here, before the context is created.

The test decodes a few tokens with that type and with f16 on the loaded weights. A quantised cache
should cost no speed. If it does, its kernel is missing on this device, and attention uses a slow
path. Causes are CUDA builds without all flash-attention pairs, and head sizes that are no multiple
of a block. Then a type with full speed is used instead, and `ModelInfo.load_notes` reports it.

At a low depth, the time for the weights hides a slow attention. An RTX 3080 with q8_0 was as fast
as f16 there, but had 0.6 of its speed at 52k tokens. So on an accelerator both types are timed at
two depths, and the time per token is extrapolated to half of the context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from localllm_backends.contract import BackendFailure, KvType, LoadSpec
from localllm_backends.llamacpp.context import served_context, trial_context
from localllm_backends.llamacpp.devices import accelerators
from localllm_backends.llamacpp.native import log, start_native

# With a fast kernel, a quantised type is within 10 % of f16 at this depth (two CPU cores, SmolLM2,
# q8_0 and q4_0). Without one it takes several times as long. Ratios between are noise of a shared
# machine. Noise can also look like a slow type once, so a slow result must repeat every time.
SLOWER_RATIO = 1.5
_MAX_TRIALS = 3
_PROMPT_TOKENS = 64
_DECODE_TOKENS = 64
_ROUND_TOKENS = 8
# The second depth: tokens that the slower type computes in this time, and at most a quarter of the
# context. So both caches of the test fit into the memory for the real one.
_PREFILL_S = 0.5
_DEEP_TOKENS = 4096
_PREFILL_BATCH = 512
# Extrapolate to at most this multiple of the measured depth, since the noise grows with it.
_MAX_EXTRAPOLATION = 16
# Time limit, so that a model with 2 tok/s does not decode for a minute. At least one round of each
# type runs.
_BUDGET_S = 1.0
_PLAIN: tuple[KvType, ...] = ("f16", "bf16", "f32")
# Largest share of the free memory that an f16 cache may take.
_MEMORY_SHARE = 0.8

Pair = tuple[KvType, KvType]
_F16: Pair = ("f16", "f16")


@dataclass(frozen=True, slots=True)
class Timing:
    """Decode times of a requested pair of KV types and of f16, in seconds per token, at `depth`
    tokens.

    Each is the fastest token; the two types take turns. The fastest, because other processes only
    add time: on a busy machine, medians of equal types differed tenfold.
    """

    wanted_s: float
    f16_s: float
    depth: int = 0

    @property
    def slow(self) -> bool:
        """True if the requested pair is slower than noise can explain."""
        return self.wanted_s > SLOWER_RATIO * self.f16_s

    def extrapolated(self, shallow: Timing, depth: int) -> Timing:
        """Extrapolate linearly from `shallow` and this timing to `depth`.

        The time grows linearly because attention reads every token of the context.
        """
        further = (depth - self.depth) / (self.depth - shallow.depth)
        wanted_grew = max(0.0, self.wanted_s - shallow.wanted_s)
        f16_grew = max(0.0, self.f16_s - shallow.f16_s)
        wanted_s = self.wanted_s + further * wanted_grew
        f16_s = self.f16_s + further * f16_grew
        return Timing(wanted_s, f16_s, depth)


Measure = Callable[[Any, LoadSpec, Pair], Timing]


def choose(model: Any, spec: LoadSpec, measure: Measure | None = None) -> tuple[LoadSpec, str]:
    """Return the spec with KV types that are fast here, and a sentence if they were changed (else
    "")."""
    wanted: Pair = (spec.kv_type_k, spec.kv_type_v)
    if all(kind in _PLAIN for kind in wanted):
        return spec, ""
    reason_of_change = ""
    # After a mixed pair, try K's type for both, then K's type with f16 V. A quantised V needs flash
    # attention, or llama.cpp rejects it.
    k = spec.kv_type_k
    pairs: list[Pair] = [wanted, (k, k), (k, "f16"), _F16]
    for pair in [*dict.fromkeys(pairs)][:-1]:
        try:
            timing = timing_of(measure or measure_pair, model, spec, pair)
        except BackendFailure as e:
            reason = str(e)
        else:
            if not timing.slow:
                return _chosen(spec, wanted, pair, reason_of_change)
            reason = (
                f"with {timing.depth:,} tokens of context this type decodes at "
                f"{1 / timing.wanted_s:.0f} tok/s on this machine, f16 at "
                f"{1 / timing.f16_s:.0f}: this device has no fast kernel for it"
            )
        reason_of_change = reason_of_change or reason
    if not f16_fits(model, spec):
        return spec, (
            f"KV type {_name(wanted)} is slow on this machine ({reason_of_change}), but it "
            "stays in use because an f16 cache does not fit in memory"
        )
    return _chosen(spec, wanted, _F16, reason_of_change)


def timing_of(measure: Measure, model: Any, spec: LoadSpec, pair: Pair) -> Timing:
    """Return the first timing that is not slow, or the last of `_MAX_TRIALS` slow ones."""
    for _ in range(_MAX_TRIALS):
        timing = measure(model, spec, pair)
        if not timing.slow:
            break
    return timing


def _chosen(spec: LoadSpec, wanted: Pair, pair: Pair, reason: str) -> tuple[LoadSpec, str]:
    if pair == wanted:
        return spec, ""
    note = f"KV type {_name(wanted)} was replaced by {_name(pair)}: {reason}"
    return replace(spec, kv_type_k=pair[0], kv_type_v=pair[1]), note


def _name(pair: Pair) -> str:
    if pair[0] == pair[1]:
        return pair[0]
    return f"{pair[0]} K with {pair[1]} V"


def measure_pair(model: Any, spec: LoadSpec, pair: Pair) -> Timing:
    """Time a pair of KV types and f16, alternating between two small contexts with the same
    weights.

    They are timed at a low depth and then, on an accelerator, at a higher one. The processor has
    all kernels, and there noise is larger than the effect of depth. Raises the errors of creating
    the context.
    """
    served = served_context(model, spec)
    max_prompt_tokens = _PROMPT_TOKENS
    if spec.n_gpu_layers != 0 and accelerators(spec.placement.cards):
        max_prompt_tokens = max(_PROMPT_TOKENS, min(_DEEP_TOKENS, served // 4))
    with (
        _small(model, spec, pair, max_prompt_tokens) as wanted,
        _small(model, spec, _F16, max_prompt_tokens) as f16,
    ):
        slowest_s = max(wanted.read(_PROMPT_TOKENS), f16.read(_PROMPT_TOKENS))
        shallow, _ = _alternating(wanted, f16)
        affordable = int(_PROMPT_TOKENS * _PREFILL_S / slowest_s)
        more = min(max_prompt_tokens, affordable) - wanted.depth
        if shallow.slow or more < _PROMPT_TOKENS:
            return shallow
        wanted.read(more)
        f16.read(more)
        deep, usual_f16_s = _alternating(wanted, f16)
    # Differences within the token-to-token noise of f16 are not extrapolated.
    if deep.wanted_s <= usual_f16_s:
        return deep
    depth = min(served // 2, _MAX_EXTRAPOLATION * deep.depth)
    return deep.extrapolated(shallow, max(deep.depth, depth))


def _alternating(wanted: _Timed, f16: _Timed) -> tuple[Timing, float]:
    """Return the fastest token of each, and the median time of f16 in seconds."""
    wanted_s: list[float] = []
    f16_s: list[float] = []
    started = time.perf_counter()
    for _ in range(_DECODE_TOKENS // _ROUND_TOKENS):
        wanted_s += [wanted.step(1) for _ in range(_ROUND_TOKENS)]
        f16_s += [f16.step(1) for _ in range(_ROUND_TOKENS)]
        if time.perf_counter() - started > _BUDGET_S:
            break
    return Timing(min(wanted_s), min(f16_s), wanted.depth), median(f16_s)


@contextmanager
def _small(model: Any, spec: LoadSpec, pair: Pair, max_prompt_tokens: int) -> Iterator[_Timed]:
    """Create a context with space for `max_prompt_tokens` tokens of prompt and the tokens decoded
    at two depths."""
    n_ctx = max_prompt_tokens + 2 * _DECODE_TOKENS
    n_batch = min(max_prompt_tokens, _PREFILL_BATCH)
    with trial_context(model, spec, pair, n_ctx=n_ctx, n_batch=n_batch, n_outputs=1) as context:
        yield _Timed(model, context, n_batch)


class _Timed:
    """Prefills and decodes in a small context and measures the time."""

    def __init__(self, model: Any, context: Any, n_batch: int) -> None:
        self._llama = start_native()
        self._context = context
        self._n_batch = n_batch
        vocab = self._llama.llama_model_get_vocab(model)
        self._n_vocab = int(self._llama.llama_vocab_n_tokens(vocab))
        self.depth = 0

    def read(self, n: int) -> float:
        """Compute the next `n` tokens of a prompt and return the seconds."""
        return sum(self.step(min(self._n_batch, n - at)) for at in range(0, n, self._n_batch))

    def step(self, n: int) -> float:
        """Compute a step of `n` tokens and return the seconds."""
        numbers = [7 * (self.depth + i) % self._n_vocab for i in range(n)]
        tokens = (self._llama.llama_token * n)(*numbers)
        self.depth += n
        started = time.perf_counter()
        code = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(tokens, n))
        self._llama.llama_synchronize(self._context)
        if code:
            raise BackendFailure(
                f"llama_decode failed with code {code} during the test of this KV type"
            )
        return time.perf_counter() - started


def f16_fits(model: Any, spec: LoadSpec) -> bool:
    """Return whether an f16 cache for the full context would leave enough memory on each device.

    The size is scaled up from the log of a small context.
    """
    import psutil

    free = {device.name: device.free_bytes for device in accelerators(spec.placement.cards)}
    with _small(model, spec, _F16, _PROMPT_TOKENS):
        small = log.buffers()
    scale = served_context(model, spec) / (_PROMPT_TOKENS + 2 * _DECODE_TOKENS)
    for (place, purpose), n_bytes in small.items():
        free_bytes = free.get(place, psutil.virtual_memory().available)
        if purpose == "KV" and scale * n_bytes > _MEMORY_SHARE * free_bytes:
            return False
    return True
