"""The backend contract: the one page to read before writing a backend.

A Backend is a loaded Variant: weights plus KV memory, and the few operations an engine needs. It knows token ids
and positions; it knows nothing of requests, text rules, sampling, caching policy or HTTP.

Rules every backend keeps (tests/backends/test_conformance.py is the executable form):

* One thread owns it: `load`, every method except `tokenize`/`detokenize`/`token_bytes`/`interrupt`, and `close` are called
  from that thread only. `tokenize` and `detokenize` are pure over the vocabulary and may be called from any thread.
* A Sequence is a line of tokens 0..n-1 whose KV is held. `new_sequence` makes an empty one; `step` appends to it;
  `truncate` takes the tail back; `fork` makes another one that shares a prefix (without copying where
  `Capabilities.shares_cells`); `drop` frees it. Every handle is an opaque int, never reused while held.
* `step` is one sweep over the weights for all chunks. It either appends every chunk or raises and appends none.
* Memory is exact: `memory()` reports what was really allocated, `cells_free()` what can still be appended.
* Errors are `BackendFailure` and its subclasses, each with a message a user can read. Nothing else crosses the border.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from localllm_backends.failures import BackendFailure as BackendFailure
from localllm_backends.failures import CannotRewindError as CannotRewindError
from localllm_backends.failures import InterruptedStepError as InterruptedStepError
from localllm_backends.failures import LoadError as LoadError
from localllm_backends.failures import NoCellsError as NoCellsError
from localllm_backends.failures import OutOfMemoryError as OutOfMemoryError
from localllm_backends.failures import StepError as StepError
from localllm_backends.kv_comparison import KvComparison as KvComparison
from localllm_backends.kv_comparison import KvFidelity as KvFidelity
from localllm_backends.pictures import ImagePart as ImagePart
from localllm_backends.pictures import ImageRun as ImageRun
from localllm_backends.pictures import Picture as Picture
from localllm_backends.placement import Placement as Placement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Logits: TypeAlias = NDArray[np.float32]

SequenceId: TypeAlias = int
KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and how much memory to give it; 0 and None mean "the backend's own default".

    `n_ctx` counts KV cells (tokens) shared by all sequences; `n_batch` bounds the tokens of one step and
    `n_outputs` how many of them may want logits. `kv_type_k`/`kv_type_v` are the KV cache's element types. `n_rewind`
    asks a recurrent model to keep that many snapshots so that as many tokens can be taken back (for drafting). `mtp`
    loads the model's own draft heads with it (LoadError where it has none, or they can't run here). `placement` says where
    layers, experts and KV lie (LoadError where the engine can't place it so). `projector` is the file of the image
    projector beside the model ("": images are not wanted; LoadError where it is of no use to this model).
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
    n_outputs: int = 0
    n_rewind: int = 0
    mtp: bool = False
    placement: Placement = field(default_factory=Placement)
    projector: str = ""

    @property
    def n_gpu_layers(self) -> int:
        """Layers that the accelerators compute (-1 = all)."""
        return self.placement.gpu_layers

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoadSpec:
        """The spec that `dataclasses.asdict` made plain data of, and JSON lists of its tuples."""
        sent: dict[str, Any] = data.get("placement") or {}
        placed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in sent.items()}
        return cls(**{**data, "placement": Placement(**placed)})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this loaded model's memory can do; asked of the object, never guessed from a name.

    `rewind`: "any" = truncate to any length; "bounded" = at least the last `rewind_tokens` tokens of the step just
    made, further back only while the memory still holds them; "none" = only to 0.
    `shares_cells`: `fork` takes no cells until the sequences diverge; where it is False, one for each token at once.
    `segments`: `export_range`/`import_range` work on any part of a sequence: a cached prefix can be stored in pieces.
    Where it is False only a whole sequence (0..n) can be exported, and it can be imported only whole.
    `states`: the same, but a sequence can be stepped only with the state behind its last token (windows, recurrent layers),
    which is kept apart from its KV, see `StateBackend`.
    `exact_batching`: logits of a sequence do not depend, to the last bit, on what shares its step.
    `drafts`: longest draft (tokens) the model's own heads write, see `DraftingBackend`; 0 = it has none, or they are
    not loaded.
    `sliced_prefill`: prompts can be read beside the steps, see `SlicingBackend`.
    `draws`: chunks may ask for a token drawn where the logits are, see `Draw`.
    `kv_on_device`: KV lies in a device's own memory, and every run of it that is exported costs a round trip there, see
    `DeviceBackend`.
    `interruptible`: a step can be ended from another thread, see `InterruptibleBackend`.
    `sees`: pictures can be part of a prompt, see `SeeingBackend`. `whole_images`: the tokens of one see each other, so that
    all of them must go into one step.
    """

    rewind: Literal["any", "bounded", "none"]
    rewind_tokens: int
    shares_cells: bool
    segments: bool
    exact_batching: bool
    kv_types: tuple[KvType, ...]
    drafts: int = 0
    sliced_prefill: bool = False
    states: bool = False
    draws: bool = False
    kv_on_device: bool = False
    interruptible: bool = False
    sees: bool = False
    whole_images: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model that the engine, the templates and the faces need.

    `fingerprint` identifies weights and tokenizer (used as a cache key); `n_ctx` is the served context in tokens.
    `sees`: its prompts may have images. `kv_meaning` names, besides those and the KV types, all that gives exported KV
    its meaning: the versions of the libraries that compute it and whatever changes how they do. KV written under
    another one must never be imported.
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
    sees: bool = False
    fim_tokens: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes really allocated by this backend, by purpose; the sum is what unloading gives back.

    `projector_bytes`: the image projector's weights and buffers. `places`: the same bytes by where they lie, in the
    engine's own names (CPU, CUDA0, CPU_Mapped …); empty where it does not say. What is mapped from a file counts with
    the whole of the mapping.
    """

    weights_bytes: int
    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int
    output_bytes: int
    projector_bytes: int = 0
    places: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Everything, in bytes."""
        held = self.weights_bytes + self.kv_bytes + self.recurrent_bytes + self.compute_bytes + self.output_bytes
        return held + self.projector_bytes


# A `Draw` may keep at most so many tokens by top_k.
MOST_DRAWN = 512


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token behind a chunk's last output is drawn: of the tokens ranked by logit (equals by id) top_k (0: all), top_p
    (1: all) and min_p (0: all) leave some, in this order, by their softmax at temperature 1; the softmax of those at
    `temperature` (> 0) is summed up, best first, and the token is the one in which `uniform` in [0, 1) lies.

    `next_uniform` will draw the token after it, if nothing changes: a backend may begin with that step at once. None of `banned`
    is drawn, as if their logits were -inf."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    next_uniform: float | None = None
    banned: tuple[int, ...] = ()

    def behind(self) -> Draw | None:
        """How the token after it will be drawn."""
        return None if self.next_uniform is None else replace(self, uniform=self.next_uniform, next_uniform=None)

    def same(self, other: Draw) -> bool:
        """Does `other` draw the same token?"""
        return replace(self, next_uniform=None) == replace(other, next_uniform=None)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to one sequence in a step; the last `outputs` of them want logits (0 = none: mid-prefill). `draw` asks
    for a token behind the last one, where `Capabilities.draws`. With an `image` the tokens are only counted, the model
    reads its embeddings, and the chunk is alone in its step."""

    sequence: SequenceId
    tokens: Seq[int]
    outputs: int = 1
    draw: Draw | None = None
    image: ImagePart | None = None


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
class DrawingResult(StepResult, Protocol):
    """What a step of a backend whose `Capabilities.draws` is True computed."""

    def drawn(self, chunk: int) -> int | None:
        """The token that the `draw` of chunk number `chunk` asked for, exactly what double precision draws from its logits;
        None where that takes a look at them."""
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

    def can_rewind(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Would `truncate` to `n_tokens`, and `fork` there, be possible now?"""
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
class StateBackend(Backend, Protocol):
    """A Backend whose `Capabilities.states` is True. `export_range` and `import_range` are of the KV that every token keeps;
    a sequence with imported KV must not be stepped before `import_state`."""

    def state_bytes(self, sequence: SequenceId) -> int:
        """How many bytes `export_state` would give now."""
        ...

    def export_state(self, sequence: SequenceId) -> bytes:
        """The state behind all the tokens that `sequence` holds."""
        ...

    def import_state(self, sequence: SequenceId, data: bytes | memoryview, n_tokens: int) -> None:
        """Cut `sequence` to its first `n_tokens` and give it the state exported behind them. After a BackendFailure the
        sequence is good for nothing but to be dropped or cut to 0."""
        ...

    def fork_state(self, source: SequenceId, data: bytes | memoryview, n_tokens: int) -> SequenceId:
        """A new sequence with the first `n_tokens` of `source` and the state exported behind them. NoCellsError or
        BackendFailure, changing nothing, where that can't be."""
        ...


@runtime_checkable
class DeviceBackend(Backend, Protocol):
    """A Backend whose `Capabilities.kv_on_device` is True."""

    def export_runs(self, sequence: SequenceId, start: int, stop: int) -> int:
        """In how many runs of neighbouring cells the tokens [start, stop) lie, about: `export_range` makes a few copies of
        each layer for every one. Tokens that were decoded beside other sequences are a run each."""
        ...


@runtime_checkable
class SeeingBackend(Backend, Protocol):
    """A Backend whose `Capabilities.sees` is True. A sequence is cut, forked, exported and imported only where no picture
    is cut in two."""

    def read(self, parts: Seq[str | Picture], *, add_bos: bool = False) -> list[list[int] | ImageRun]:
        """A prompt of text and pictures as runs of token ids and of images, with what the model wants around each image.
        Any thread. BackendFailure where a picture can't be read."""
        ...

    def encode(self, run: ImageRun) -> NDArray[np.float32]:
        """The embeddings [n_tokens, width] of `run`. Any thread, one at a time; steps may go on meanwhile."""
        ...


@runtime_checkable
class DraftingBackend(Backend, Protocol):
    """A Backend whose `Capabilities.drafts` is not 0: the model carries heads that guess its next tokens."""

    def draft(self, wanted: Seq[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """The heads' best guesses for each (sequence, its newest token, not stepped yet, most tokens to guess): what
        may follow that token. Shorter, or empty, where they are unsure. Changes no sequence."""
        ...


@runtime_checkable
class ThreadedBackend(Backend, Protocol):
    """A Backend whose steps are computed by threads on the processor."""

    def use_threads(self, most: int) -> None:
        """Compute short steps (decode) with no more than `most` threads from the next one on. More than it was loaded with
        are as many as that."""


@runtime_checkable
class InterruptibleBackend(Backend, Protocol):
    """A Backend whose `Capabilities.interruptible` is True: what nobody wants any more need not be computed to its end."""

    def interrupt(self) -> None:
        """End the step that runs now, or the next one if none does, with InterruptedStepError; or let it end by itself where
        that takes no time. May be called from any thread, at any time."""


class PrefillSlices(Protocol):
    """Tokens being read beside the steps, in slices of the owner's time: `run` until all are computed, or `stop` before
    that; `join` until all that are computed are appended; `close`. The sequence they belong to stays as it is until `join`,
    and must not be stepped before."""

    def run(self, seconds: float) -> int:
        """Compute for about `seconds`; returns how many of the tokens are computed by now. BackendFailure ends it."""

    def stop(self) -> int:
        """Compute no more, at any time and whatever failed; returns how many of the tokens are computed, all of which can
        be appended. What is in the middle of being computed is not."""

    def join(self) -> int:
        """Append one piece of what is computed to the sequence; returns how many tokens are still to be appended, those that
        are not computed among them. Raises NoCellsError (nothing appended) where there is no room."""

    def close(self) -> None:
        """Stop, and free what it took. What was appended stays."""


@runtime_checkable
class SlicingBackend(Backend, Protocol):
    """A Backend whose `Capabilities.sliced_prefill` is True: it can pause in the middle of a sweep, so that a long prompt is
    read in pieces of time instead of tokens."""

    def sliced_prefill_bytes(self, n_tokens: int) -> int:
        """Memory it takes whose sequence will hold `n_tokens`."""

    def slice_prefill(self, sequence: SequenceId, tokens: Seq[int]) -> PrefillSlices:
        """Begin reading `tokens` behind what `sequence` holds. BackendFailure (OutOfMemoryError) if it can't be."""


@runtime_checkable
class SettlingBackend(Backend, Protocol):
    """A Backend with housekeeping of its own, for when nobody asks anything."""

    def settle(self, spare_bytes: int | None) -> bool:
        """One piece of it, of a few milliseconds, within `spare_bytes` of memory (None: unknown); True while there is more.
        No sequence and no logit changes."""


@runtime_checkable
class ComparingBackend(Backend, Protocol):
    """A Backend that can say what its KV types cost in precision, on its own weights."""

    def compare_kv(self, pairs: Seq[tuple[str, str]], tokens: Seq[int]) -> KvComparison:
        """Begin comparing caches of each pair of types (K, V) with one of f16 over `tokens`, in memory of its own. A pair
        this model can't have is left out. BackendFailure (OutOfMemoryError) if there is nothing to compare with."""


class BackendType(Protocol):
    """What the entry-point group `localllm.backends` names: how to recognise and load a Variant."""

    name: str

    def available(self) -> str | None:
        """None if it can run here, else one sentence saying what is missing and how to get it."""

    def accepts(self, path: str) -> bool:
        """True if `path` is a Variant of this backend's format."""

    def vocabulary(self, path: str) -> list[bytes]:
        """The bytes of every token, control tokens as they are written, read without loading the weights; LoadError."""

    def load(self, spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> Backend:
        """Load it; raises LoadError or OutOfMemoryError. `on_progress` hears 0.0 … 1.0 as the weights come in."""
