"""Workload, RunSettings and Plan: the planner's nouns. Frozen, serialisable; the only thing the
planner hands on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from localllm.memory.verdict import Fits
from localllm_backends import registry
from localllm_backends.declaration import Declaration
from localllm_backends.placement import Placement
from localllm_catalog.types import Model, Purpose, Variant


@dataclass(frozen=True, slots=True)
class Workload:
    """What the person wants to do. `context` 0 = the purpose's default; tokens throughout; speeds
    in tokens/s."""

    purpose: Purpose = "chat"
    context: int = 0
    prompt_tokens: int = 2048
    parallel: int = 1
    min_decode_tok_s: float = 0.0


# Sequences held at once, and tokens of one step, unless a plan says otherwise.
DEFAULT_SLOTS = 8
DEFAULT_BATCH = 512


def backend_of(variant: Variant) -> Declaration:
    """The engine that runs a variant's files."""
    return registry.running(variant.format)


@dataclass(frozen=True, slots=True)
class CompanionDrafter:
    """A drafter trained for a model, in a file of its own: `kind` is "eagle3", "dflash" or
    "gemma4-assistant", `width` that of the model's layers, `kv_elements` how many numbers a token
    takes in its KV cache, `block` the tokens it writes in one pass (0: one)."""

    kind: str
    path: str
    file_bytes: int
    kv_elements: int
    width: int
    block: int = 0


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What proposes tokens: `name` is "auto", "off", "ngram", "mtp" (the model's own heads), or
    that of a second model.

    `second`: that model and its files, which are loaded beside the first. `companion`: a drafter
    trained for the model, which is left out where it can't be loaded if it is `optional`.
    """

    name: str = "auto"
    second: tuple[Model, Variant] | None = None
    companion: CompanionDrafter | None = None
    optional: bool = False

    @property
    def is_mtp(self) -> bool:
        """True where the model's own heads (MTP) draft."""
        return self.name == "mtp"

    @property
    def reads_along(self) -> bool:
        """True where something drafts from what the model's layers made."""
        return self.is_mtp or self.companion is not None


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a Variant is run: what its memory and its speed follow from, and what a LoadSpec is made
    from.

    `n_ctx`: KV cells shared by all sequences.
    `slots`: sequences held at once (llama.cpp's n_seq_max), beside the `spare` ones that the
    backend keeps for itself where each has a window or state of its own.
    `n_batch`: tokens of one step, the micro-batch.
    `n_outputs`: rows of logits a step may ask for.
    `placement`: where weights and KV lie.
    `n_rewind`: snapshots a recurrent model keeps, so that as many tokens can be taken back. 0 of
    `n_ctx`, `n_batch` or `n_outputs` is the backend's own default, which only a file that can't be
    planned is given.
    `projector_bytes`: what reading images takes beside the model.
    `scores_at_once`: new tokens times all tokens that one call attends with, where attention holds
    its scores (0 = a whole step's).
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
        """How many windows or states there are."""
        return max(1, self.slots) + self.spare

    @property
    def kv_type(self) -> str:
        """The KV cache's type, or "K/V" where keys and values differ."""
        if self.kv_type_k == self.kv_type_v:
            return self.kv_type_k
        return f"{self.kv_type_k}/{self.kv_type_v}"

    def with_kv_type(self, kv_type: str) -> RunSettings:
        """These settings with `kv_type` for keys and values, or with its two for a pair "K/V"."""
        k, _, v = kv_type.partition("/")
        if (k, v or k) == (self.kv_type_k, self.kv_type_v):
            return self
        return replace(self, kv_type_k=k, kv_type_v=v or k)

    def placed(self, **places: Any) -> RunSettings:
        """These settings with parts of the placement changed."""
        return replace(self, placement=replace(self.placement, **places))


# Everything as it is unless somebody says otherwise.
USUAL = RunSettings()


@dataclass(frozen=True, slots=True)
class Range:
    """A predicted number with its plausible range and basis (e.g. "table: apple-max × llama.cpp ×
    dense, n=41")."""

    value: float
    low: float
    high: float
    basis: str


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes a Plan needs, by purpose, and the limit it was held against (bytes).

    `host_bytes` are in system memory beside a discrete accelerator. `cards_bytes`: of each of
    several cards, all it holds; `cards_limit_bytes`: what each may. `disk_bytes` stay in their file
    and are read row by row.
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

    @property
    def total_bytes(self) -> int:
        """Bytes needed in the accelerator's pool (host_bytes are apart)."""
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.recurrent_bytes
            + self.compute_bytes
            + self.overhead_bytes
            + self.draft_bytes
            + self.projector_bytes
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run one Variant on one Device, with everything `serve` needs to run exactly that:
    `settings`.

    `quality` are points for the purpose, format and KV type taken off, `quality_spread` their
    uncertainty;
    `is_rated` is False where nothing but the model's size and date is known, `makers_own` True
    where nothing but what its maker says.
    `score` is the rank's sum (quality points);
    `kv_bytes_per_1k` what 1,024 more tokens of context cost and `max_ctx` the longest context that
    still fits (tokens);
    `draft_gain` the predicted speed-up of the drafter's second model, `drafting` that of this
    purpose's answers for all the drafting it does (None: not known to be any), `kv_why` what the
    choice of the KV type rests on.
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
        """Seconds to the first token of a later turn, most of whose prompt is cached."""
        return (self.ttft_cached_s or self.ttft_s).value

    @property
    def stream_tok_s(self) -> float:
        """What one stream is answered at: decode, with the drafts of heads or a trained drafter."""
        if self.settings.drafter.reads_along:
            drafts = self.drafting
        else:
            drafts = None
        return self.decode_tok_s.value * (drafts.value if drafts is not None else 1.0)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A Model (its least demanding acceptable Variant) that is not offered, and the one reason
    why."""

    model: Model
    variant: Variant
    reason: str
    kind: Literal["memory", "speed", "context", "purpose", "ranking"] = "memory"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What `recommend` answers: at most eight Plans, best first, and what was not offered with the
    reasons."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    workload: Workload
