"""Is the wanted KV type fast here? Decodes a few tokens with it and with f16 on the loaded weights,
before the context.

A quantised cache should cost no speed; where it does, its kernel is missing on this device (CUDA
builds without all flash-attention pairs, heads that are no multiple of a block) and attention fell
to a slow path. Then a type that is served at full speed is better, and the load says so in
`ModelInfo.load_notes`.

Near the start a slow path of attention hides behind the weights (an RTX 3080 with q8_0: as f16
there, 0.6 of its speed at 52k). So on an accelerator both types are timed at two depths, and what a
token costs is carried on to half of the context.
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

# On the fast path a quantised type is within a tenth of f16 at this depth (two CPU cores, SmolLM2,
# q8_0 and q4_0); off it, it costs multiples. What lies between is noise of a shared machine, which
# can also look like more once: a slow verdict must come out every time.
SLOWER_RATIO = 1.5
_VERDICTS = 3
_PROMPT_TOKENS = 64
_DECODE_TOKENS = 64
_ROUND_TOKENS = 8
# The second depth: what the slower type reads in this time, and never more than a quarter of the
# context, so that both caches of the probe fit where the served one will.
_PREFILL_S = 0.5
_DEEP_TOKENS = 4096
_PREFILL_BATCH = 512
# Costs are carried on to at most so many times the depth that was reached: the noise of two depths
# grows with it.
_LEVER = 16
# A model of 2 tok/s is not decoded for a minute: as many rounds as fit in this, and at least one of
# each.
_BUDGET_S = 1.0
_PLAIN: tuple[KvType, ...] = ("f16", "bf16", "f32")
# After growing the cache to f16, this share of what is free must remain.
_MEMORY_SHARE = 0.8

Pair = tuple[KvType, KvType]
_F16: Pair = ("f16", "f16")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the fastest decoded token with a wanted pair of KV types and with f16, taken in
    turns, and the tokens of context they hold for. The fastest, because other processes only ever
    add time: on a busy machine medians of equal types differed tenfold."""

    wanted_s: float
    f16_s: float
    depth: int = 0

    @property
    def slow(self) -> bool:
        """True when the wanted pair is slower than noise explains."""
        return self.wanted_s > SLOWER_RATIO * self.f16_s

    def extrapolated(self, near: Timing, depth: int) -> Timing:
        """What a token costs at `depth`, by the line through `near` and this: attention reads every
        token of context."""
        further = (depth - self.depth) / (self.depth - near.depth)
        wanted_grew = max(0.0, self.wanted_s - near.wanted_s)
        f16_grew = max(0.0, self.f16_s - near.f16_s)
        wanted_s = self.wanted_s + further * wanted_grew
        f16_s = self.f16_s + further * f16_grew
        return Timing(wanted_s, f16_s, depth)


Measure = Callable[[Any, LoadSpec, Pair], Timing]


def choose(model: Any, spec: LoadSpec, measure: Measure | None = None) -> tuple[LoadSpec, str]:
    """The spec with KV types that are fast here, and one sentence if they are not the wanted ones
    ("" otherwise)."""
    wanted: Pair = (spec.kv_type_k, spec.kv_type_v)
    if all(kind in _PLAIN for kind in wanted):
        return spec, ""
    why = ""
    # A mixed pair is followed by K's type for both, and a quantised V, which needs flash attention
    # (llama.cpp refuses it otherwise), by K alone.
    k = spec.kv_type_k
    pairs: list[Pair] = [wanted, (k, k), (k, "f16"), _F16]
    for pair in [*dict.fromkeys(pairs)][:-1]:
        try:
            timing = confirmed(measure or measure_pair, model, spec, pair)
        except BackendFailure as e:
            reason = str(e)
        else:
            if not timing.slow:
                return _chosen(spec, wanted, pair, why)
            reason = (
                f"with {timing.depth:,} tokens of context it decodes at "
                f"{1 / timing.wanted_s:.0f} tok/s here, f16 at {1 / timing.f16_s:.0f}: "
                "this device has no fast kernel for it"
            )
        why = why or reason
    if not room_for_f16(model, spec):
        return spec, (
            f"KV type {_name(wanted)} is slow here ({why}), and is kept: "
            "an f16 cache does not fit in memory"
        )
    return _chosen(spec, wanted, _F16, why)


def confirmed(measure: Measure, model: Any, spec: LoadSpec, pair: Pair) -> Timing:
    """A timing that is not slow, or the last of `_VERDICTS` slow ones."""
    for _ in range(_VERDICTS):
        timing = measure(model, spec, pair)
        if not timing.slow:
            break
    return timing


def _chosen(spec: LoadSpec, wanted: Pair, pair: Pair, why: str) -> tuple[LoadSpec, str]:
    if pair == wanted:
        return spec, ""
    note = f"KV type {_name(wanted)} was replaced by {_name(pair)}: {why}"
    return replace(spec, kv_type_k=pair[0], kv_type_v=pair[1]), note


def _name(pair: Pair) -> str:
    if pair[0] == pair[1]:
        return pair[0]
    return f"{pair[0]} K with {pair[1]} V"


def measure_pair(model: Any, spec: LoadSpec, pair: Pair) -> Timing:
    """Decode alternately on two small contexts over the same weights, near the start and then, on
    an accelerator, deeper; raises what making the wanted one raises. (The processor has all
    kernels, and other work on it is louder than depth.)"""
    served = served_context(model, spec)
    most = _PROMPT_TOKENS
    if spec.n_gpu_layers != 0 and accelerators(spec.placement.cards):
        most = max(_PROMPT_TOKENS, min(_DEEP_TOKENS, served // 4))
    with _small(model, spec, pair, most) as wanted, _small(model, spec, _F16, most) as f16:
        slowest_s = max(wanted.read(_PROMPT_TOKENS), f16.read(_PROMPT_TOKENS))
        near, _ = _alternating(wanted, f16)
        affordable = int(_PROMPT_TOKENS * _PREFILL_S / slowest_s)
        more = min(most, affordable) - wanted.depth
        if near.slow or more < _PROMPT_TOKENS:
            return near
        wanted.read(more)
        f16.read(more)
        deep, usual_f16_s = _alternating(wanted, f16)
    # Within what f16 itself takes from token to token there is no difference to carry on.
    if deep.wanted_s <= usual_f16_s:
        return deep
    depth = min(served // 2, _LEVER * deep.depth)
    return deep.extrapolated(near, max(deep.depth, depth))


def _alternating(wanted: _Timed, f16: _Timed) -> tuple[Timing, float]:
    """The fastest token of each, and the median one of f16, in seconds."""
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
def _small(model: Any, spec: LoadSpec, pair: Pair, most: int) -> Iterator[_Timed]:
    """A context just large enough for the probe: a prompt of `most` tokens, and what is decoded at
    two depths."""
    n_ctx = most + 2 * _DECODE_TOKENS
    n_batch = min(most, _PREFILL_BATCH)
    with trial_context(model, spec, pair, n_ctx=n_ctx, n_batch=n_batch, n_outputs=1) as context:
        yield _Timed(model, context, n_batch)


class _Timed:
    """Reads and decodes in a small context, and takes the time."""

    def __init__(self, model: Any, context: Any, n_batch: int) -> None:
        self._llama = start_native()
        self._context = context
        self._n_batch = n_batch
        vocab = self._llama.llama_model_get_vocab(model)
        self._n_vocab = int(self._llama.llama_vocab_n_tokens(vocab))
        self.depth = 0

    def read(self, n: int) -> float:
        """Seconds of a prompt's next `n` tokens."""
        return sum(self.step(min(self._n_batch, n - at)) for at in range(0, n, self._n_batch))

    def step(self, n: int) -> float:
        """Seconds of a step of `n` tokens."""
        numbers = [7 * (self.depth + i) % self._n_vocab for i in range(n)]
        tokens = (self._llama.llama_token * n)(*numbers)
        self.depth += n
        started = time.perf_counter()
        code = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(tokens, n))
        self._llama.llama_synchronize(self._context)
        if code:
            raise BackendFailure(
                f"llama_decode failed with code {code} while this KV type was tried"
            )
        return time.perf_counter() - started


def room_for_f16(model: Any, spec: LoadSpec) -> bool:
    """Would an f16 cache of the whole context leave memory over wherever it lies? Scaled from a
    small one's own log."""
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
