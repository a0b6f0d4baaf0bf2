"""The backend contract: the one page to read before writing a backend.

A Backend is a loaded Variant: weights plus KV memory, and the few operations an engine needs. It
knows token ids and positions; it knows nothing of requests, text rules, sampling, caching policy or
HTTP.

Rules every backend keeps (tests/backends/test_conformance.py is the executable form):

* One thread owns it: `load`, every method except `tokenize`/`detokenize`/`token_bytes`/`interrupt`,
  and `close` are called from that thread only. `tokenize` and `detokenize` are pure over the
  vocabulary and may be called from any thread.
* A Sequence is a line of tokens 0..n-1 whose KV is held.
  `new_sequence` makes an empty one;
  `step` appends to it;
  `truncate` takes the tail back;
  `fork` makes another one that shares a prefix (without copying where `Capabilities.shares_cells`);
  `drop` frees it. Every handle is an opaque int, never reused while held.
* `step` is one sweep over the weights for all chunks. It either appends every chunk or raises and
  appends none.
* Memory is exact: `memory()` reports what was really allocated, `cells_free()` what can still be
  appended.
* Errors are `BackendFailure` and its subclasses, each with a message a user can read. Nothing else
  crosses the border.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from localllm_backends.declaration import (
    Declaration,
)
from localllm_backends.placement import (
    Placement,
)
from localllm_backends.values import (
    MAX_SAMPLED_TOP_K,
    Capabilities,
    Chunk,
    ImagePart,
    ImagePixels,
    ImageRun,
    KvFidelity,
    KvType,
    LoadSpec,
    LoraAdapter,
    MemoryReport,
    ModelInfo,
    SampleSpec,
    SeenTokens,
    SequenceId,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Logits: TypeAlias = NDArray[np.float32]


__all__ = [
    "MAX_SAMPLED_TOP_K",
    "Backend",
    "BackendFailure",
    "BackendType",
    "CannotRewindError",
    "Capabilities",
    "Chunk",
    "Declaration",
    "ImagePart",
    "ImagePixels",
    "ImageRun",
    "InterruptedStepError",
    "KvFidelity",
    "KvType",
    "LoadError",
    "LoadSpec",
    "LoraAdapter",
    "MemoryReport",
    "ModelInfo",
    "NoCellsError",
    "OtherMachineError",
    "OutOfMemoryError",
    "Placement",
    "PrefillSlices",
    "SampleSpec",
    "SeenTokens",
    "SequenceId",
    "StepError",
    "StepResult",
]


class BackendFailure(Exception):  # noqa: N818 - a family name; the leaves say Error
    """Base of everything a backend raises: `str(e)` says what happened and why; `hint` what to do,
    where that is not what it is for all of its kind."""

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class LoadError(BackendFailure):
    """The files can't be loaded: missing, truncated, another format, an unknown architecture."""


class OutOfMemoryError(BackendFailure):
    """Loading or stepping needs more memory than there is."""


class NoCellsError(BackendFailure):
    """A step would need more KV cells than are free. Nothing was appended."""


class StepError(BackendFailure):
    """The engine failed inside a step. Sequences named in it must be dropped."""


class InterruptedStepError(BackendFailure):
    """Somebody called `interrupt` while the step ran. Nothing was appended, and nothing is lost."""


class CannotRewindError(BackendFailure):
    """This model's memory can't be cut back to that length (recurrent state, trimmed window)."""


class OtherMachineError(LoadError):
    """Another machine that was to hold layers can't be had: no fault of the model's files."""


class StepResult(ABC):
    """What a step computed. Valid until the next call of `step` on the same backend. Where
    `Capabilities.asynchronous`, whoever asks waits for the computing to end, and a BackendFailure
    may only come then."""

    @abstractmethod
    def argmax(self, chunk: int) -> list[int]:
        """Best token of each wanted output of chunk number `chunk`, in order."""

    @abstractmethod
    def logits(self, chunk: int) -> Logits:
        """Logits of the wanted outputs of chunk number `chunk`: float32 [outputs, n_vocab],
        read-only."""

    def sampled(self, chunk: int) -> int | None:
        """The token that the `sample` of chunk number `chunk` asked for, in single precision: where
        a share ends within 1e-4 of `uniform` or of top_p it may be the next one. None where that
        takes a look at the logits, and where no `sample` was asked for. (Capabilities.samples)"""
        return None


class PrefillSlices(ABC):
    """Tokens being read beside the steps, in slices of the owner's time: `run` until all are
    computed, or `stop` before that; `join` until all that are computed are appended; `close`. The
    sequence they belong to stays as it is until `join`, and must not be stepped before."""

    @abstractmethod
    def run(self, seconds: float) -> int:
        """Compute for about `seconds`; returns how many of the tokens are computed by now.
        BackendFailure ends it."""

    @abstractmethod
    def stop(self) -> int:
        """Compute no more, at any time and whatever failed; returns how many of the tokens are
        computed, all of which can be appended. What is in the middle of being computed is not."""

    @abstractmethod
    def join(self) -> int:
        """Append one piece of what is computed to the sequence; returns how many tokens are still
        to be appended, those that are not computed among them. Raises NoCellsError (nothing
        appended) where there is no room."""

    @abstractmethod
    def close(self) -> None:
        """Stop, and free what it took. What was appended stays."""


class Backend(ABC):
    """A loaded Variant. See the module docstring for the rules. What `Capabilities` promises is
    written below the required
    operations: a backend without that ability leaves it as it is."""

    info: ModelInfo
    capabilities: Capabilities

    @abstractmethod
    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; `special` parses control tokens written in it, `add_bos` puts the
        model's BOS first."""

    def text_pieces(self, text: str, *, special: bool, add_bos: bool) -> Iterable[str]:
        """`text` in pieces of some thousand characters, whose tokens (a BOS at the first one's
        beginning) are together the text's: it may be cut where a tokenizer starts anew. In a longer
        text with the same beginning the first of them are the same."""
        return (text,)

    @abstractmethod
    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, control tokens rendered, invalid UTF-8 replaced."""

    @abstractmethod
    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes one token stands for; b"" for a control token unless `special`."""

    @abstractmethod
    def is_control(self, token: int) -> bool:
        """True for a token that marks structure (turns, end of text) rather than text."""

    @abstractmethod
    def new_sequence(self) -> SequenceId:
        """An empty sequence; raises NoCellsError when `n_seq_max` are held."""

    @abstractmethod
    def fork(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """A new sequence with the first `n_tokens` of `source`; CannotRewindError if it can't be
        split there, NoCellsError where there is no room for it."""

    @abstractmethod
    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        """Cut `sequence` back to its first `n_tokens`; CannotRewindError if impossible (then
        nothing changed)."""

    @abstractmethod
    def can_rewind(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Would `truncate` to `n_tokens`, and `fork` there, be possible now?"""

    @abstractmethod
    def drop(self, sequence: SequenceId) -> None:
        """Free a sequence."""

    @abstractmethod
    def length(self, sequence: SequenceId) -> int:
        """Tokens held by `sequence`."""

    @abstractmethod
    def cells_free(self) -> int:
        """Tokens that can still be appended over all sequences."""

    @abstractmethod
    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        """Append every chunk (at most `info.n_batch` tokens together) in one sweep over the
        weights."""

    @abstractmethod
    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """KV of tokens [start, stop) as bytes that `import_range` of the same fingerprint, KV types
        and meaning takes back."""

    @abstractmethod
    def import_range(
        self, sequence: SequenceId, data: bytes | memoryview, start: int, stop: int
    ) -> None:
        """Append exported tokens [start, stop) to `sequence`, whose length must be `start`.

        A blob may hold more tokens than asked for where `Capabilities.segments`. Raises
        BackendFailure, having appended nothing, on foreign data."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """What is allocated now."""

    @abstractmethod
    def check_integrity(self) -> None:
        """AssertionError where its books on cells and sequences are wrong; called by tests after
        whatever happened."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. The object is dead afterwards."""

    # --- Capabilities.states: `export_range` and `import_range` are of the KV that every token
    # keeps, and a sequence with imported KV must not be stepped before `import_state`.

    def state_bytes(self, sequence: SequenceId) -> int:
        """How many bytes `export_state` would give now."""
        raise NotImplementedError

    def export_state(self, sequence: SequenceId) -> bytes:
        """The state behind all the tokens that `sequence` holds."""
        raise NotImplementedError

    def import_state(self, sequence: SequenceId, data: bytes | memoryview, n_tokens: int) -> None:
        """Cut `sequence` to its first `n_tokens` and give it the state exported behind them. After
        a BackendFailure the sequence is good for nothing but to be dropped or cut to 0."""
        raise NotImplementedError

    def fork_state(self, source: SequenceId, data: bytes | memoryview, n_tokens: int) -> SequenceId:
        """A new sequence with the first `n_tokens` of `source` and the state exported behind them.
        NoCellsError or BackendFailure, changing nothing, where that can't be."""
        raise NotImplementedError

    # --- Capabilities.vision: a sequence is cut, forked, exported and imported only where no image
    # is cut in two.

    def tokenize_images(
        self, parts: Sequence[str | ImagePixels], *, add_bos: bool = False
    ) -> list[list[int] | ImageRun]:
        """A prompt of text (in a LiteralText no control token is read) and images as runs of token
        ids and of images, with what the model wants around each image. Any thread. BackendFailure
        where an image can't be read."""
        raise NotImplementedError

    def encode_image(self, run: ImageRun) -> Logits:
        """The embeddings, float32 [n_tokens, width], of `run`. Any thread, one at a time; steps may
        go on meanwhile."""
        raise NotImplementedError

    # --- Capabilities.sliced_prefill: it can pause in the middle of a sweep, so that a long prompt
    # is read in slices of time.

    def sliced_prefill_bytes(self, n_tokens: int) -> int:
        """Memory it takes whose sequence will hold `n_tokens`."""
        raise NotImplementedError

    def slice_prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> PrefillSlices:
        """Begin reading `tokens` behind what `sequence` holds. BackendFailure (OutOfMemoryError) if
        it can't be."""
        raise NotImplementedError

    # --- the other abilities, each behind a flag of its own name or nothing to be asked first

    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """The model's own heads' best guesses for each (sequence, its newest token, not stepped
        yet, most tokens to guess): what may follow that token. Shorter, or empty, where they are
        unsure. Changes no sequence."""
        return [[] for _ in wanted]

    def interrupt(self) -> None:  # noqa: B027 - a backend without it has nothing to do
        """End the step that runs now, or the next one if none does, with InterruptedStepError; or
        let it end by itself where that takes no time. May be called from any thread, at any
        time."""

    def export_runs(self, sequence: SequenceId, start: int, stop: int) -> int:
        """In how many runs of neighbouring cells the tokens [start, stop) lie, about: where
        `Capabilities.kv_on_device`, `export_range` makes a few copies of each layer for every one.
        Tokens decoded beside other sequences are a run each."""
        return 1

    def use_threads(self, most: int) -> None:  # noqa: B027 - a backend without threads has nothing to do
        """Compute short steps (decode) with no more than `most` threads from the next one on. More
        than it was loaded with are as many as that."""

    def compare_kv(
        self, pairs: Sequence[tuple[str, str]], tokens: Sequence[int]
    ) -> tuple[KvFidelity, ...]:
        """How far a cache of each pair of types (K, V) leads from one of f16 over `tokens`, in
        memory of its own. A pair this model can't have is left out. BackendFailure
        (OutOfMemoryError) if there is nothing to compare with."""
        raise BackendFailure("this backend can't compare KV types")

    def idle_work(self, spare_bytes: int | None) -> bool:
        """One piece of the backend's own housekeeping, of a few milliseconds, within `spare_bytes`
        of memory (None: unknown), while nobody asks anything; True while there is more. No sequence
        and no logit changes."""
        return False


class BackendType(ABC):
    """What the entry-point group `localllm.backends` names: how to recognise and load a Variant.
    Importing it imports nothing of the engine behind it."""

    declaration: Declaration

    @abstractmethod
    def available(self) -> str | None:
        """None if it can run here, else one sentence saying what is missing and how to get it."""

    def read_code(self) -> None:  # noqa: B027 - a backend may have nothing to do
        """Import what any load needs, before it is known what is loaded."""

    @abstractmethod
    def accepts(self, path: str) -> bool:
        """True if `path` is a Variant of this backend's format."""

    @abstractmethod
    def vocabulary(self, path: str) -> list[bytes]:
        """The bytes of every token, control tokens as they are written, read without loading the
        weights; LoadError."""

    @abstractmethod
    def load(self, spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> Backend:
        """Load it; raises LoadError or OutOfMemoryError. `on_progress` hears 0.0 … 1.0 as the
        weights come in."""

    def reads_images(self) -> str | None:
        """None where an image projector could be loaded, else why not."""
        return "this engine reads no images"

    def image_bytes(self, path: str) -> int:
        """What reading images takes beside the weights, where a model's own files have what reads
        them (0: they don't); `LoadSpec.projector` is then its own path. BackendFailure where they
        have, and it can't be used here."""
        return 0

    def load_embedder(
        self,
        path: str,
        *,
        n_ctx: int = 0,
        n_threads: int = 0,
        n_gpu_layers: int = -1,
        on_progress: Callable[[float], None] | None = None,
    ) -> Any:
        """Load the model at `path`, an embedding model or a reranker, for one thread: what
        `llamacpp/embed.py` calls LlamaCppEmbedder. Raises LoadError, also for one that makes
        neither embeddings nor scores."""
        raise LoadError(f"the {self.declaration.name} backend makes no embeddings")
