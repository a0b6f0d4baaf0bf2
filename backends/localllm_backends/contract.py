"""The backend contract: the one page to read before writing a backend.

A Backend is a loaded Variant: weights plus KV memory, and the few operations an engine needs. It knows token ids
and positions; it knows nothing of requests, text rules, sampling, caching policy or HTTP.

Rules every backend keeps (tests/backends/test_conformance.py is the executable form):

* One thread owns it: `load`, every method except `tokenize`/`detokenize`/`token_bytes`, and `close` are called from
  that thread only. `tokenize` and `detokenize` are pure over the vocabulary and may be called from any thread.
* A Sequence is a line of tokens 0..n-1 whose KV is held. `new_sequence` makes an empty one; `step` appends to it;
  `truncate` takes the tail back; `fork` makes another one that shares a prefix (without copying where
  `Capabilities.shares_cells`); `drop` frees it. Every handle is an opaque int, never reused while held.
* `step` is one sweep over the weights for all chunks. It either appends every chunk or raises and appends none.
* Memory is exact: `memory()` reports what was really allocated, `cells_free()` what can still be appended.
* Errors are `BackendFailure` and its subclasses, each with a message a user can read. Nothing else crosses the border.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Logits: TypeAlias = NDArray[np.float32]

SequenceId: TypeAlias = int
KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


class BackendFailure(Exception):  # noqa: N818 - a family name; the leaves say Error
    """Base of everything a backend raises: `str(e)` says what happened and why."""


class LoadError(BackendFailure):
    """The files can't be loaded: missing, truncated, another format, an unknown architecture."""


class OutOfMemoryError(BackendFailure):
    """Loading or stepping needs more memory than there is."""


class NoCellsError(BackendFailure):
    """A step would need more KV cells than are free. Nothing was appended."""


class StepError(BackendFailure):
    """The engine failed inside a step. Sequences named in it must be dropped."""


class CannotRewindError(BackendFailure):
    """This model's memory can't be cut back to that length (recurrent state, trimmed window)."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and how much memory to give it; 0 and None mean "the backend's own default".

    `n_ctx` counts KV cells (tokens) shared by all sequences; `n_batch` bounds the tokens of one step and
    `n_outputs` how many of them may want logits. `kv_type_k`/`kv_type_v` are the KV cache's element types. `n_rewind`
    asks a recurrent model to keep that many snapshots so that as many tokens can be taken back (for drafting). `mtp`
    loads the model's own draft heads with it (LoadError where it has none, or they can't run here).
    """

    path: str
    n_ctx: int = 0
    n_seq_max: int = 8
    n_batch: int = 0
    n_threads: int = 0
    n_threads_batch: int = 0
    kv_type_k: KvType = "f16"
    kv_type_v: KvType = "f16"
    flash_attention: bool = True
    n_gpu_layers: int = -1
    n_outputs: int = 0
    n_rewind: int = 0
    mtp: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this loaded model's memory can do; asked of the object, never guessed from a name.

    `rewind`: "any" = truncate to any length; "bounded" = at least the last `rewind_tokens` tokens of the step just
    made, further back only while the memory still holds them; "none" = only to 0.
    `shares_cells`: `fork` takes no cells until the sequences diverge; where it is False, one for each token at once.
    `segments`: `export_range`/`import_range` work on any part of a sequence: a cached prefix can be stored in pieces.
    Where it is False only a whole sequence (0..n) can be exported, and it can be imported only whole.
    `exact_batching`: logits of a sequence do not depend, to the last bit, on what shares its step.
    `drafts`: longest draft (tokens) the model's own heads write, see `DraftingBackend`; 0 = it has none, or they are
    not loaded.
    `sliced_prefill`: prompts can be read beside the steps, see `SlicingBackend`.
    """

    rewind: Literal["any", "bounded", "none"]
    rewind_tokens: int
    shares_cells: bool
    segments: bool
    exact_batching: bool
    kv_types: tuple[KvType, ...]
    drafts: int = 0
    sliced_prefill: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model that the engine, the templates and the faces need.

    `fingerprint` identifies weights and tokenizer (used as a cache key); `n_ctx` is the served context in tokens.
    `kv_meaning` names, besides those and the KV types, all that gives exported KV its meaning: the versions of the
    libraries that compute it and whatever changes how they do. KV written under another one must never be imported.
    """

    architecture: str
    description: str
    fingerprint: str
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_seq_max: int
    n_batch: int
    n_outputs: int
    n_params: int
    weights_bytes: int
    eog_tokens: tuple[int, ...]
    bos_token: int | None
    eos_token: int | None
    adds_bos: bool
    bos_text: str
    eos_text: str
    chat_template: str | None
    kv_type_k: str
    kv_type_v: str
    kv_meaning: str = ""
    fim_tokens: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes really allocated by this backend, by purpose; the sum is what unloading gives back."""

    weights_bytes: int
    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    output_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything, in bytes."""
        return self.weights_bytes + self.kv_bytes + self.recurrent_bytes + self.compute_bytes + self.output_bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to one sequence in a step; the last `outputs` of them want logits (0 = none: mid-prefill)."""

    sequence: SequenceId
    tokens: Seq[int]
    outputs: int = 1


@runtime_checkable
class StepResult(Protocol):
    """What a step computed. Valid until the next call of `step` on the same backend."""

    def argmax(self, chunk: int) -> list[int]:
        """Best token of each wanted output of chunk number `chunk`, in order."""
        ...

    def logits(self, chunk: int) -> Logits:
        """Logits of the wanted outputs of chunk number `chunk`: float32 [outputs, n_vocab], read-only."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A loaded Variant. See the module docstring for the rules."""

    info: ModelInfo
    capabilities: Capabilities

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; `special` parses control tokens written in it, `add_bos` puts the model's BOS first."""
        ...

    def detokenize(self, tokens: Seq[int]) -> str:
        """Text of `tokens`, control tokens rendered, invalid UTF-8 replaced."""
        ...

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes one token stands for; b"" for a control token unless `special`."""
        ...

    def is_control(self, token: int) -> bool:
        """True for a token that marks structure (turns, end of text) rather than text."""
        ...

    def new_sequence(self) -> SequenceId:
        """An empty sequence; raises NoCellsError when `n_seq_max` are held."""
        ...

    def fork(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """A new sequence with the first `n_tokens` of `source`; CannotRewindError if it can't be split there, NoCellsError
        where there is no room for it."""
        ...

    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        """Cut `sequence` back to its first `n_tokens`; CannotRewindError if impossible (then nothing changed)."""
        ...

    def drop(self, sequence: SequenceId) -> None:
        """Free a sequence."""
        ...

    def length(self, sequence: SequenceId) -> int:
        """Tokens held by `sequence`."""
        ...

    def cells_free(self) -> int:
        """Tokens that can still be appended over all sequences."""
        ...

    def step(self, chunks: Seq[Chunk]) -> StepResult:
        """Append every chunk (at most `info.n_batch` tokens together) in one sweep over the weights."""
        ...

    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """KV of tokens [start, stop) as bytes that `import_range` of the same fingerprint, KV types and meaning takes back."""
        ...

    def import_range(self, sequence: SequenceId, data: bytes | memoryview, start: int, stop: int) -> None:
        """Append exported tokens [start, stop) to `sequence`, whose length must be `start`.

        A blob may hold more tokens than asked for where `Capabilities.segments`. Raises BackendFailure, having
        appended nothing, on foreign data."""
        ...

    def memory(self) -> MemoryReport:
        """What is allocated now."""
        ...

    def check_integrity(self) -> None:
        """AssertionError where its books on cells and sequences are wrong; called by tests after whatever happened."""
        ...

    def close(self) -> None:
        """Free everything. The object is dead afterwards."""
        ...


@runtime_checkable
class DraftingBackend(Backend, Protocol):
    """A Backend whose `Capabilities.drafts` is not 0: the model carries heads that guess its next tokens."""

    def draft(self, wanted: Seq[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """The heads' best guesses for each (sequence, its newest token, not stepped yet, most tokens to guess): what
        may follow that token. Shorter, or empty, where they are unsure. Changes no sequence."""
        ...


class PrefillSlices(Protocol):
    """Tokens being read beside the steps, in slices of the owner's time: `run` until all are computed, `join` until all
    are appended, `close`. The sequence they belong to stays as it is until `join`, and must not be stepped before."""

    def run(self, seconds: float) -> int:
        """Compute for about `seconds`; returns how many of the tokens are computed by now. BackendFailure ends it."""
        ...

    def join(self) -> int:
        """Append one piece of what is computed to the sequence; returns how many tokens are still to be appended.
        Raises NoCellsError (nothing appended) where there is no room."""
        ...

    def close(self) -> None:
        """Stop, and free what it took. What was appended stays."""
        ...


@runtime_checkable
class SlicingBackend(Backend, Protocol):
    """A Backend whose `Capabilities.sliced_prefill` is True: it can pause in the middle of a sweep, so that a long prompt is
    read in pieces of time instead of tokens."""

    def sliced_prefill_bytes(self, n_tokens: int) -> int:
        """Memory it takes whose sequence will hold `n_tokens`."""
        ...

    def slice_prefill(self, sequence: SequenceId, tokens: Seq[int]) -> PrefillSlices:
        """Begin reading `tokens` behind what `sequence` holds. BackendFailure (OutOfMemoryError) if it can't be."""
        ...


class BackendType(Protocol):
    """What the entry-point group `localllm.backends` names: how to recognise and load a Variant."""

    name: str

    def available(self) -> str | None:
        """None if it can run here, else one sentence saying what is missing and how to get it."""
        ...

    def accepts(self, path: str) -> bool:
        """True if `path` is a Variant of this backend's format."""
        ...

    def vocabulary(self, path: str) -> list[bytes]:
        """The bytes of every token, control tokens as they are written, read without loading the weights; LoadError."""
        ...

    def load(self, spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> Backend:
        """Load it; raises LoadError or OutOfMemoryError. `on_progress` hears 0.0 … 1.0 as the weights come in."""
        ...
