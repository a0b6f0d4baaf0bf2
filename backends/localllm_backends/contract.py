"""The backend contract. Read this module before you write a backend.

A Backend is a loaded Variant: weights, KV memory, and the few operations that an engine needs. It
handles token ids and positions. Requests, text rules, sampling, caching policy and HTTP are outside
its scope.

Rules for every backend (tests/backends/test_conformance.py checks them):

* One thread owns a backend. Only that thread may call `load`, `close` and every method except
  `tokenize`, `detokenize`, `token_bytes` and `interrupt`. `tokenize` and `detokenize` depend only
  on the vocabulary and may be called from any thread. So may other methods whose docstring permits
  it.
* A sequence is a list of tokens 0..n-1 whose KV is in memory.
  `new_sequence` creates an empty sequence;
  `step` appends to it;
  `truncate` removes its tail;
  `fork` creates another sequence with the same prefix (without copying if
  `Capabilities.shares_cells`);
  `drop` frees it.
  Each handle is an opaque int that is not reused while the sequence exists.
* `step` reads the weights once for all chunks. It either appends every chunk, or raises and
  appends no tokens.
* Memory figures are exact: `memory()` reports the allocated bytes, `cells_free()` the number of
  tokens that can still be appended.
* Errors are `BackendFailure` and its subclasses, each with a message for the user. A backend raises
  no other exceptions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from localllm_backends.declaration import Declaration
from localllm_backends.failures import (
    BackendFailure,
    CannotRewindError,
    InterruptedStepError,
    LoadError,
    NoCellsError,
    OtherMachineError,
    OutOfMemoryError,
    StepError,
    UnusableEngineError,
)
from localllm_backends.placement import Placement
from localllm_backends.values import (
    MAX_SAMPLED_TOP_K,
    Capabilities,
    Chunk,
    ImagePixels,
    KvFidelity,
    KvType,
    LoadSpec,
    LoraAdapter,
    Media,
    MediaPart,
    MediaRun,
    MemoryReport,
    ModelInfo,
    QuantizeOrder,
    SampleSpec,
    SeenTokens,
    SequenceId,
    SoundSamples,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Logits: TypeAlias = NDArray[np.float32]


__all__ = [
    "MAX_SAMPLED_TOP_K", "Backend", "BackendFailure", "CannotRewindError",
    "Capabilities", "Chunk", "Declaration", "ImagePixels", "InterruptedStepError", "KvFidelity",
    "KvType", "LoadError", "LoadSpec", "LoraAdapter", "Media", "MediaPart", "MediaRun",
    "MemoryReport", "ModelInfo", "NoCellsError", "OtherMachineError", "OutOfMemoryError",
    "Placement", "PrefillSlices", "QuantizeOrder", "SampleSpec", "SeenTokens", "SequenceId",
    "SoundSamples", "StepError", "StepResult", "UnusableEngineError",
]  # fmt: skip


class StepResult(ABC):
    """The results of a step, valid until the next call of `step` on the same backend.

    If `Capabilities.asynchronous`, each method waits until the step is computed, and it may raise
    the step's BackendFailure.
    """

    @abstractmethod
    def argmax(self, chunk: int) -> list[int]:
        """Return the best token of each requested output of chunk number `chunk`, in order."""

    @abstractmethod
    def logits(self, chunk: int) -> Logits:
        """Return the logits of the requested outputs of chunk number `chunk`: float32 [outputs,
        n_vocab], read-only."""

    def sampled(self, chunk: int) -> int | None:
        """Return the token for the `sample` of chunk number `chunk`.

        The backend computes in single precision. If a cumulative probability ends within 1e-4 of
        `uniform` or of top_p, the result may be the neighbouring token. Returns None if the chunk
        has no `sample`, or if the caller must sample from the logits. Needs Capabilities.samples.
        """
        return None


class PrefillSlices(ABC):
    """A prefill that runs between decode steps, in slices of the owner's time.

    Call `run` until all tokens are computed, or `stop` earlier. Then call `join` until all computed
    tokens are appended, and `close`. The sequence does not change before `join` and must not be
    stepped before then.
    """

    @abstractmethod
    def run(self, seconds: float) -> int:
        """Compute for about `seconds` and return the number of tokens computed so far.

        A BackendFailure ends the prefill.
        """

    @abstractmethod
    def stop(self) -> int:
        """Stop computing and return the number of computed tokens, all of which can be appended.

        May be called at any time, also after a failure. Partly computed tokens do not count.
        """

    @abstractmethod
    def join(self) -> int:
        """Append one piece of the computed tokens to the sequence.

        Returns the number of tokens still to be appended, including those not yet computed. Raises
        NoCellsError, without appending, if there are too few free cells.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop, and free the prefill's memory. Appended tokens stay in the sequence."""


class Backend(ABC):
    """A loaded Variant. See the module docstring for the rules.

    The methods that belong to a flag of `Capabilities` follow the required methods. A backend
    without that ability does not override them.
    """

    info: ModelInfo
    capabilities: Capabilities

    @abstractmethod
    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Return the token ids of `text`.

        `special` parses control tokens in the text. `add_bos` puts the model's BOS first.
        """

    def text_pieces(self, text: str, *, special: bool, add_bos: bool) -> Iterable[str]:
        """Split `text` into pieces of a few thousand characters that can be tokenized one by one.

        The tokens of all pieces, with a BOS before the first one, equal the tokens of the text. So
        cuts are made only at points where a tokenizer starts anew. A longer text with the same
        beginning has the same first pieces.
        """
        return (text,)

    @abstractmethod
    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, including control tokens. Invalid UTF-8 is replaced."""

    @abstractmethod
    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of one token; b"" for a control token unless `special`."""

    @abstractmethod
    def is_control(self, token: int) -> bool:
        """Return True if the token marks structure (turns, end of text) and is not text."""

    @abstractmethod
    def new_sequence(self) -> SequenceId:
        """Create an empty sequence. Raises NoCellsError if `n_seq_max` sequences exist."""

    @abstractmethod
    def fork(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """Create a sequence with the first `n_tokens` of `source`.

        Raises CannotRewindError if `source` can't be split there, and NoCellsError if there are too
        few free cells or sequences.
        """

    @abstractmethod
    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        """Truncate `sequence` to its first `n_tokens`.

        Raises CannotRewindError, and leaves everything unchanged, if that is impossible.
        """

    @abstractmethod
    def can_rewind(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return whether `truncate` to `n_tokens`, and `fork` at that length, are possible now."""

    @abstractmethod
    def drop(self, sequence: SequenceId) -> None:
        """Free a sequence."""

    @abstractmethod
    def length(self, sequence: SequenceId) -> int:
        """Return the number of tokens in `sequence`."""

    @abstractmethod
    def cells_free(self) -> int:
        """Return the number of tokens that can still be appended, over all sequences."""

    @abstractmethod
    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        """Append all chunks (at most `info.n_batch` tokens together) in one pass over the
        weights."""

    @abstractmethod
    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """Return the KV of tokens [start, stop) as bytes.

        `import_range` accepts them if the fingerprint, the KV types and `ModelInfo.kv_layout` are
        equal.
        """

    @abstractmethod
    def import_range(
        self, sequence: SequenceId, data: bytes | memoryview, start: int, stop: int
    ) -> None:
        """Append the exported tokens [start, stop) to `sequence`, whose length must be `start`.

        If `Capabilities.segments`, `data` may hold more tokens than are imported. Raises
        BackendFailure, without appending, if the data is invalid.
        """

    @abstractmethod
    def memory(self) -> MemoryReport:
        """Return the memory that is allocated now."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Check the bookkeeping of cells and sequences; for tests, after any operation.

        Raises AssertionError if the bookkeeping is inconsistent.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything. The backend can't be used afterwards."""

    # --- Capabilities.states: `export_range` and `import_range` handle only the KV that is kept for
    # each token. After an import of KV, call `import_state` before the next step.

    def state_bytes(self, sequence: SequenceId) -> int:
        """Return the number of bytes that `export_state` would return now."""
        raise NotImplementedError

    def export_state(self, sequence: SequenceId) -> bytes:
        """Return the recurrent or window state after the last token of `sequence`."""
        raise NotImplementedError

    def import_state(self, sequence: SequenceId, data: bytes | memoryview, n_tokens: int) -> None:
        """Truncate `sequence` to its first `n_tokens` and set the state that was exported after
        them.

        After a BackendFailure the sequence can only be dropped or truncated to 0.
        """
        raise NotImplementedError

    def fork_state(self, source: SequenceId, data: bytes | memoryview, n_tokens: int) -> SequenceId:
        """Create a sequence with the first `n_tokens` of `source` and the state exported after
        them.

        Raises NoCellsError or BackendFailure, and leaves everything unchanged, if that is
        impossible.
        """
        raise NotImplementedError

    # --- Capabilities.vision and audio: a sequence can't be truncated, forked, exported or imported
    # in the middle of a run.

    def tokenize_media(
        self, parts: Sequence[str | Media], *, add_bos: bool = False
    ) -> list[list[int] | MediaRun]:
        """Turn a prompt of text and media into runs of token ids and MediaRuns.

        The result includes the tokens that the model needs around each medium. Control tokens in a
        LiteralText are not parsed. May be called from any thread. Raises BackendFailure if a medium
        can't be read.
        """
        raise NotImplementedError

    def encode_media(self, run: MediaRun) -> Logits:
        """Return the embeddings of `run`: float32 [n_tokens, width].

        May be called from any thread, one call at a time, also during a step.
        """
        raise NotImplementedError

    # --- Capabilities.sliced_prefill: a prefill can pause inside a pass over the weights, so that a
    # long prompt is computed in slices of time.

    def sliced_prefill_bytes(self, n_tokens: int) -> int:
        """Return the memory that a sliced prefill needs if its sequence will hold `n_tokens`."""
        raise NotImplementedError

    def slice_prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> PrefillSlices:
        """Start the prefill of `tokens` after the present tokens of `sequence`.

        Raises BackendFailure (OutOfMemoryError if memory is short) if that is impossible.
        """
        raise NotImplementedError

    # --- Other abilities. Each has a flag of its own name, or a default that works without one.

    def use_adapters(self, scales: Sequence[float]) -> None:
        """Compute the next steps and sliced prefills with these scales of `ModelInfo.adapters`.

        An adapter of scale 0 is not applied. At first, the scales are those of `ModelInfo.adapters`.
        The KV of a sequence does not change: each sequence belongs to the scales it was computed
        with.
        """
        if scales:
            raise BackendFailure("this backend has no adapters")

    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Draft with the model's draft heads.

        `wanted` holds (sequence, its newest token, longest draft in tokens). The newest token has
        not been stepped yet; the draft follows it. Drafts are shorter, or empty, if the heads are
        unsure. No sequence changes.
        """
        return [[] for _ in wanted]

    def rest_heads(self, resting: bool) -> None:  # noqa: B027 - optional
        """Let draft heads that are not used stop following the model, which saves their time. Later
        drafts know only the tokens of a sequence that the model has read since the rest.
        """

    def interrupt(self) -> None:  # noqa: B027 - optional
        """End the running step with InterruptedStepError. Between steps, end the next one.

        A step that takes little time may finish instead. May be called from any thread at any time.
        """

    def export_runs(self, sequence: SequenceId, start: int, stop: int) -> int:
        """Return the approximate number of contiguous cell ranges that hold tokens [start, stop).

        If `Capabilities.kv_on_device`, `export_range` makes a few copies per layer for each range.
        Tokens that were decoded together with other sequences are one range each.
        """
        return 1

    def use_threads(self, max_threads: int) -> None:  # noqa: B027 - optional
        """Compute short steps (decode) with at most `max_threads` threads, starting with the next
        step.

        The number of threads at load time stays the upper limit.
        """

    def compare_kv(
        self, pairs: Sequence[tuple[str, str]], tokens: Sequence[int]
    ) -> tuple[KvFidelity, ...]:
        """Compare KV caches of each pair of types (K, V) with an f16 cache over `tokens`.

        The comparison allocates its own memory. Pairs that the model does not support are left out.
        Raises BackendFailure (OutOfMemoryError) if there is no memory for the comparison.
        """
        raise BackendFailure("this backend can't compare KV types")

    def idle_work(self, spare_bytes: int | None) -> bool:
        """Do one piece of housekeeping that takes a few milliseconds, while no request is running.

        It uses at most `spare_bytes` of memory (None: unknown). Returns True if more work remains.
        Sequences and logits do not change.
        """
        return False
