"""Workload, RunSettings and Plan: the planner's types, and the only values that it passes on.
Frozen and serialisable."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from localllm.memory.verdict import TIGHT_SHARE, Fits
from localllm_backends import registry
from localllm_backends.declaration import Declaration
from localllm_backends.placement import Placement
from localllm_catalog.types import Model, Purpose, Variant


@dataclass(frozen=True, slots=True)
class Workload:
    """The user's task. `context` 0 means the purpose's default. Lengths are in tokens, speeds in
    tokens/s."""

    purpose: Purpose = "chat"
    context: int = 0
    prompt_tokens: int = 2048
    parallel: int = 1
    min_decode_tok_s: float = 0.0


# Default number of sequences held at once, and default tokens of one step.
DEFAULT_SLOTS = 8
DEFAULT_BATCH = 512


def backend_of(variant: Variant) -> Declaration:
    """Return the engine that runs a variant's files."""
    return registry.running(variant.format)


@dataclass(frozen=True, slots=True)
class CompanionDrafter:
    """A drafter trained for a model, in its own file.

    - `kind`: "eagle3", "dflash" or "gemma4-assistant".
    - `width`: the width of the model's layers.
    - `kv_elements`: numbers per token in its KV cache.
    - `block`: tokens that it writes in one pass (0: one).
    - `is_folder`: it is a folder of safetensors, and so are the models it drafts for.
    """

    kind: str
    path: str
    file_bytes: int
    kv_elements: int
    width: int
    block: int = 0
    is_folder: bool = False


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The source of draft tokens. `name` is "auto", "off", "ngram", "mtp" (the model's own heads),
    or a second model's name.

    - `second`: that model and its files, loaded together with the first.
    - `companion`: a drafter trained for the model. If it is `optional` and cannot be loaded, it is
      left out.
    """

    name: str = "auto"
    second: tuple[Model, Variant] | None = None
    companion: CompanionDrafter | None = None
    optional: bool = False

    @property
    def is_mtp(self) -> bool:
        """True if the model's own heads (MTP) draft."""
        return self.name == "mtp"

    @property
    def reads_hidden_states(self) -> bool:
        """True if a drafter reads the outputs of the model's layers."""
        return self.is_mtp or self.companion is not None


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How to run a Variant: the input to its memory and speed predictions, and to its LoadSpec.

    - `n_ctx`: KV cells shared by all sequences.
    - `slots`: sequences held at once (llama.cpp's n_seq_max), without the `spare` ones. The backend
      keeps those for itself if each sequence has its own window or state.
    - `n_batch`: tokens of one step, the micro-batch.
    - `n_outputs`: rows of logits that a step may request.
    - `placement`: where weights and KV are.
    - `n_rewind`: snapshots that a recurrent model keeps, which is also how many tokens it can take
      back.
    - `projector_bytes`: bytes for reading images, in addition to the model.
    - `scores_at_once`: the most attention scores (new tokens × all tokens) of one call, if
      attention stores them (0: a step is not divided).

    0 for `n_ctx`, `n_batch` or `n_outputs` means the backend's own default. Only a file that cannot
    be planned uses it.
    """

    n_ctx: int = 0
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    slots: int = DEFAULT_SLOTS
    spare: int = 0
    n_batch: int = DEFAULT_BATCH
    n_outputs: int = 64
    placement: Placement = field(default_factory=Placement)
    n_rewind: int = 0
    drafter: DraftChoice = DraftChoice()
    projector_bytes: int = 0
    scores_at_once: int = 0

    @property
    def n_sequences(self) -> int:
        """Number of windows or states."""
        return max(1, self.slots) + self.spare

    @property
    def kv_type(self) -> str:
        """The KV cache's type, or "K/V" if keys and values differ."""
        if self.kv_type_k == self.kv_type_v:
            return self.kv_type_k
        return f"{self.kv_type_k}/{self.kv_type_v}"

    def with_kv_type(self, kv_type: str) -> RunSettings:
        """Return these settings with `kv_type` for keys and values. A pair "K/V" gives both."""
        k, _, v = kv_type.partition("/")
        if (k, v or k) == (self.kv_type_k, self.kv_type_v):
            return self
        return replace(self, kv_type_k=k, kv_type_v=v or k)

    def placed(self, **places: Any) -> RunSettings:
        """Return these settings with parts of the placement changed."""
        if all(getattr(self.placement, name) == place for name, place in places.items()):
            return self
        return replace(self, placement=replace(self.placement, **places))


# The default settings.
USUAL = RunSettings()


class Range(NamedTuple):
    """A predicted number with its plausible range and basis (e.g. "table: apple-max × llama.cpp ×
    dense, n=41")."""

    value: float
    low: float
    high: float
    basis: str


class MemoryNeed(NamedTuple):
    """Bytes that a Plan needs, by purpose, and the limit that applies.

    - `host_bytes`: in system memory, apart from a discrete accelerator. `host_limit_bytes`: the
      most that may be used of it (0: unknown).
    - `cards_bytes`: all bytes on each of several cards.
    - `cards_limit_bytes`: the limit of each card.
    - `disk_bytes`: these stay in their file and are read row by row.
    """

    weights_bytes: int
    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    overhead_bytes: int
    draft_bytes: int
    limit_bytes: int
    host_bytes: int = 0
    cards_bytes: tuple[int, ...] = ()
    cards_limit_bytes: tuple[int, ...] = ()
    disk_bytes: int = 0
    projector_bytes: int = 0
    host_limit_bytes: int = 0

    @property
    def fills_host(self) -> bool:
        """True if other programs would have nearly no system memory left."""
        return 0 < TIGHT_SHARE * self.host_limit_bytes < self.host_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes needed in the accelerator's pool (without `host_bytes`)."""
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.recurrent_bytes
            + self.compute_bytes
            + self.overhead_bytes
            + self.draft_bytes
            + self.projector_bytes
        )


class Plan(NamedTuple):
    """One way to run one Variant on one Device. `settings` hold all that `serve` needs to run it.

    - `quality`: points for the purpose, less the cost of format and KV type.
    - `quality_spread`: their uncertainty.
    - `is_rated`: False if only the model's size and date are known.
    - `makers_own`: True if all scores are from the model's maker.
    - `score`: the sum that ranks plans (quality points).
    - `kv_bytes_per_1k`: bytes of 1,024 more tokens of context.
    - `max_ctx`: the longest context that still fits (tokens).
    - `draft_gain`: predicted speed-up from the drafter's second model.
    - `drafting`: predicted speed-up of this purpose's answers from all drafting (None: no gain
      known).
    - `kv_why`: the reason for the KV type.
    """

    model: Model
    variant: Variant
    settings: RunSettings
    fits: Fits
    memory: MemoryNeed
    decode_tok_s: Range
    decode_tok_s_full: Range
    prefill_tok_s: Range
    ttft_s: Range
    load_s: Range
    ttft_cached_s: Range | None = None
    why: str = ""
    reasons: tuple[str, ...] = ()
    quality: float = 0.0
    quality_basis: str = ""
    quality_spread: float = 0.0
    is_rated: bool = True
    makers_own: bool = False
    score: float = 0.0
    kv_bytes_per_1k: int = 0
    max_ctx: int = 0
    draft_gain: float = 1.0
    drafting: Range | None = None
    kv_why: str = ""

    @property
    def backend(self) -> str:
        """The engine that runs it."""
        return backend_of(self.variant).name

    @property
    def later_ttft_s(self) -> float:
        """Seconds to the first token of a later turn, with most of the prompt cached."""
        return (self.ttft_cached_s or self.ttft_s).value

    @property
    def stream_tok_s(self) -> float:
        """Tokens/s of one stream: decode speed, with drafts of heads or a trained drafter."""
        return self.decode_tok_s.value * self._stream_gain

    @property
    def stream_range(self) -> Range:
        """The 80 % range of `stream_tok_s`: that of the decode speed, with the usual gain of
        drafts."""
        speed = self.decode_tok_s
        gain = self._stream_gain
        return Range(speed.value * gain, speed.low * gain, speed.high * gain, speed.basis)

    @property
    def _stream_gain(self) -> float:
        if self.drafting is None or not self.settings.drafter.reads_hidden_states:
            return 1.0
        return self.drafting.value


class Rejected(NamedTuple):
    """A Model that is not offered, with its least demanding acceptable Variant, and the reason."""

    model: Model
    variant: Variant
    reason: str
    kind: Literal["memory", "speed", "context", "purpose", "engine", "ranking"] = "memory"


class Recommendation(NamedTuple):
    """The result of `recommend`: at most eight Plans, best first, and the rejected models with
    their reasons."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    workload: Workload
