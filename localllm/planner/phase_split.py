"""Predict a model whose prompts are read on one machine and whose answers are written on another. Pure.

Both machines hold the whole model. The KV of a prompt crosses the link in blocks as they are
computed, so the longer one of computing and sending counts, and one block of the other:

    first token = latency + max(prefill there, bytes ÷ link) + one block of the shorter one
                  + one step here

Tokens after the first take as long as on the second machine alone. Predictions of the machines are
those of speed.py, and KV bytes those of kv_sizes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from localllm.device.types import Device
from localllm.planner import cluster, kv_sizes, speed
from localllm.planner.cluster import Link, Share
from localllm.planner.types import Range, RunSettings, backend_of
from localllm_catalog.types import Model, Variant

# Tokens whose KV is sent together. A step of the other server computes several blocks of the wire.
PART_TOKENS = 256
# Bytes per second between which the needed link is searched, and the number of halvings.
_SLOWEST_BYTES_S = 1e6
_FASTEST_BYTES_S = 1e12
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class Phases:
    """One way to serve prompts of some lengths: seconds to the first token for each length, and the
    tokens/s of the answer (None: the model does not fit that way)."""

    name: str
    ttft_s: tuple[Range, ...]
    decode_tok_s: Range


@dataclass(frozen=True, slots=True)
class PhaseSplit:
    """Prefill on `there`, decode on `here`, over `link`, with prompts of `prompt_tokens`.

    - `pays_from`: the shortest prompt for each link whose first token comes sooner than from `here`
      alone (None: no prompt that fits the context).
    - `needed_bytes_s`: the slowest link with which the longest of the prompts gains (None: no link
      is fast enough).
    - `kv_bytes`: of each prompt.
    """

    there: Device
    here: Device
    link: Link
    prompt_tokens: tuple[int, ...]
    ways: tuple[Phases, ...]
    pays_from: tuple[tuple[Link, int | None], ...]
    needed_bytes_s: float | None
    kv_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The machines and what they run."""

    there: Device
    here: Device
    model: Model
    variant: Variant
    settings: RunSettings

    def single(self, device: Device, n_tokens: int) -> Range:
        prefill = speed.prefill(
            device, self.model, self.variant, self.settings, prompt_tokens=n_tokens
        )
        return speed.ttft(prefill, self.decode(device), n_tokens)

    def decode(self, device: Device) -> Range:
        return speed.decode(device, self.model, self.variant, self.settings)

    def kv_bytes(self, n_tokens: int) -> int:
        """The bytes that cross the link for a prompt."""
        prompt_settings = replace(self.settings, n_ctx=n_tokens, slots=1, spare=0)
        state_bytes = kv_sizes.recurrent_bytes(self.model, prompt_settings)
        if self.variant.is_folder:
            return kv_sizes.mlx_kv_bytes(self.model, prompt_settings) + state_bytes
        return kv_sizes.kv_bytes(self.model, prompt_settings) + state_bytes

    def split(self, n_tokens: int, bytes_per_s: float, latency_s: tuple[float, float]) -> Range:
        prefill = speed.prefill(
            self.there, self.model, self.variant, self.settings, prompt_tokens=n_tokens
        )
        decode = self.decode(self.here)
        sent_s = self.kv_bytes(n_tokens) / bytes_per_s
        best_s, worst_s = latency_s

        def seconds(prefill_tok_s: float, decode_tok_s: float, one_way_s: float) -> float:
            computed_s = n_tokens / prefill_tok_s
            n_blocks = max(1.0, n_tokens / PART_TOKENS)
            overlapped_s = max(computed_s, sent_s) + min(computed_s, sent_s) / n_blocks
            return 2 * one_way_s + overlapped_s + 1 / decode_tok_s

        return Range(
            seconds(prefill.value, decode.value, (best_s + worst_s) / 2),
            seconds(prefill.high, decode.high, best_s),
            seconds(prefill.low, decode.low, worst_s),
            f"{prefill.basis}; {decode.basis}",
        )

    def gains(self, n_tokens: int, link: Link) -> bool:
        """True if the first token comes sooner than from the second machine alone."""
        split = self.split(n_tokens, link.bytes_per_s, link.latency_s)
        return split.value < self.single(self.here, n_tokens).value


def why_not(variant: Variant, there: Device, here: Device) -> str:
    """Return why KV of `variant` can't go from `there` to `here`, or "" if it can."""
    backend = backend_of(variant)
    unsupported = [d.name for d in (there, here) if not backend.runs_on(d.accelerator)]
    if unsupported:
        return (
            f"{backend.name} does not run on {unsupported[0]}, and KV goes only "
            "between equal engines"
        )
    return ""


def plan(
    model: Model,
    variant: Variant,
    settings: RunSettings,
    there: Device,
    here: Device,
    link: Link,
    others: Sequence[Link],
    prompt_tokens: Sequence[int],
) -> PhaseSplit:
    """Return the prediction for prompts of `prompt_tokens`, compared with each machine alone and,
    for GGUF files, with half of the layers on each. `others`: further links to compare."""
    pair = _Pair(there, here, model, variant, settings)
    ways = [
        Phases(
            "prefill there, decode here",
            tuple(
                pair.split(n_tokens, link.bytes_per_s, link.latency_s) for n_tokens in prompt_tokens
            ),
            pair.decode(here),
        )
    ]
    for device in (there, here):
        ttft_alone = tuple(pair.single(device, n_tokens) for n_tokens in prompt_tokens)
        ways.append(Phases(f"{device.name} alone", ttft_alone, pair.decode(device)))
    if not variant.is_folder:
        ways.append(_layers_on_both(pair, link, prompt_tokens))
    links = (link, *(other for other in others if other is not link))
    return PhaseSplit(
        there,
        here,
        link,
        tuple(prompt_tokens),
        tuple(ways),
        tuple((other_link, _pays_from(pair, other_link)) for other_link in links),
        _needed_bytes_s(pair, link, max(prompt_tokens)),
        tuple(pair.kv_bytes(n_tokens) for n_tokens in prompt_tokens),
    )


def _layers_on_both(pair: _Pair, link: Link, prompt_tokens: Sequence[int]) -> Phases:
    """Half of the layers on each machine (llama.cpp's RPC)."""
    n_layers = len(pair.model.layers)
    shares = [
        Share(pair.here, n_layers - n_layers // 2, 0, pair.here.usable_bytes),
        Share(pair.there, n_layers // 2, 0, pair.there.usable_bytes),
    ]
    decode = cluster.decode_over(pair.model, pair.variant, pair.settings, shares, link)
    ttft = []
    for n_tokens in prompt_tokens:
        prefill = cluster.prefill_over(
            pair.model, pair.variant, pair.settings, shares, link, prompt_tokens=n_tokens
        )
        ttft.append(speed.ttft(prefill, decode, n_tokens))
    return Phases("half of the layers on each", tuple(ttft), decode)


def _pays_from(pair: _Pair, link: Link) -> int | None:
    """The shortest prompt that gains, in whole blocks."""

    def gains(n_blocks: int) -> bool:
        return pair.gains(n_blocks * PART_TOKENS, link)

    return _first_block(gains, pair.settings.n_ctx // PART_TOKENS)


def _first_block(is_true: Callable[[int], bool], n_blocks: int) -> int | None:
    """The tokens of the first of 1 … `n_blocks` blocks for which `is_true` is true, if it stays
    true from there on; None if it is not true for the last."""
    if n_blocks < 1 or not is_true(n_blocks):
        return None
    low = 0
    high = n_blocks
    while high - low > 1:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle
    return high * PART_TOKENS


def _needed_bytes_s(pair: _Pair, link: Link, n_tokens: int) -> float | None:
    """The slowest link of the same latency with which a prompt gains; None if no link
    is fast enough."""
    if not pair.gains(n_tokens, replace(link, bytes_per_s=_FASTEST_BYTES_S)):
        return None
    slow = _SLOWEST_BYTES_S
    fast = _FASTEST_BYTES_S
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        if pair.gains(n_tokens, replace(link, bytes_per_s=middle)):
            fast = middle
        else:
            slow = middle
    return fast
