"""LlamaCppBackend: the contract's operations with one llama_model and one llama_context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from localllm_backends.contract import (
    BackendFailure,
    CannotRewindError,
    Chunk,
    InterruptedStepError,
    KvFidelity,
    LoadSpec,
    MemoryReport,
    ModelInfo,
    NoCellsError,
    SequenceId,
    StepError,
)
from localllm_backends.draft_head_state import join_blocks, split_blocks
from localllm_backends.fingerprints import fingerprint, loaded_adapters
from localllm_backends.llamacpp.adapters import apply_adapters, with_scales
from localllm_backends.llamacpp.batch import (
    ABORTED,
    Batch,
    Decoder,
    LlamaCppStepResult,
    Rows,
)
from localllm_backends.llamacpp.cells import CellLedger
from localllm_backends.llamacpp.devices import has_gpu
from localllm_backends.llamacpp.heads import DraftHeads
from localllm_backends.llamacpp.huge_weights import HugeWeights
from localllm_backends.llamacpp.kv_blocks import (
    KV,
    KV_WITH_HEADS,
    STATE,
    SequenceMemory,
    header,
    parse_block,
)
from localllm_backends.llamacpp.kv_fidelity import compared
from localllm_backends.llamacpp.model_info import LlamaCppVocabulary, capabilities, model_info
from localllm_backends.llamacpp.native import Buffers, log, memory_report, purpose_bytes
from localllm_backends.llamacpp.pausing_prefill import MICRO_BATCH, PausingPrefill, cells_for
from localllm_backends.llamacpp.top_logits import TopLogits
from localllm_backends.shared_behaviour import OwnedBackend, owner_only


class LlamaCppBackend(LlamaCppVocabulary, OwnedBackend):
    """One GGUF model. Sequences are llama.cpp sequence ids in one unified KV cache; `fork` shares
    cells."""

    # True if image tokens have two-dimensional positions. Exported KV then lists its images.
    _two_dimensional = False
    _projector_bytes = 0
    _heads: DraftHeads | None

    def __init__(
        self, llama: Any, model: Any, context: Any, spec: LoadSpec, path: Path, buffers: Buffers,
        heads: DraftHeads | None,
    ) -> None:  # fmt: skip
        super().__init__(llama, model)
        self._take_ownership()
        self._heads = heads
        self._buffers = buffers
        self._llama = llama
        self._model = model
        self._context = context
        self._spec = spec
        self._memory = SequenceMemory(llama, context)
        self._decoder = Decoder(llama, context)
        self._n_swa = int(llama.llama_model_n_swa(model))
        self._recurrent = bool(
            llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
        )
        self._n_rewind = 0
        if self._recurrent and not llama.missing("rewinding"):
            self._n_rewind = int(llama.llama_n_rs_seq(context))
        # For recurrent models: how many tokens of the last step can be removed; negative after a
        # removal, which is possible only once.
        self._rewindable_tokens: dict[SequenceId, int] = {}
        # Sliding windows: True if there was a fork since all sequences last had window cells of
        # their own.
        self._shares_windows = False
        n_batch = int(llama.llama_n_batch(context))
        self._batch = Batch(llama, n_batch)
        self._ledger = CellLedger(int(llama.llama_n_ctx(context)))
        # Objects that track every sequence.
        self._trackers: list[Any] = [self._ledger]
        self._magic = KV
        if heads is not None:
            self._trackers.append(heads)
            self._magic = KV_WITH_HEADS
        n_native = int(llama.llama_n_seq_max(context))
        self._scratch_sequence: int | None = None
        if n_native > spec.n_seq_max:
            self._scratch_sequence = n_native - 1
        self._slices: PausingPrefill | None = None
        self._top = TopLogits(llama, context, self.n_vocab)
        self._idle = list(range(min(spec.n_seq_max, n_native) - 1, -1, -1))
        # Can states be exported apart from the KV (Capabilities.states)?
        self._states = False
        self.info = self._model_info(path, n_batch)
        self._find_capabilities(path, n_batch)

    def _find_capabilities(self, path: Path, n_batch: int) -> None:
        """Warm up, and set the capabilities of this memory and its device."""
        sequence = self._warm_up(1)
        keeps_all = not self._n_swa and not self._recurrent
        if self._scratch_sequence is not None and not keeps_all:
            self._states = self._memory.separate_states(sequence, self._scratch_sequence)
            if not self._states:
                self._scratch_sequence = None
        self.drop(sequence)
        on_device = self._spec.n_gpu_layers != 0 and has_gpu()
        # A device may compute directly from the mapping.
        self._mapped = HugeWeights(path, 0 if on_device else None)
        self.capabilities = capabilities(
            self._heads,
            window_rewind=n_batch if self._n_swa else 0,
            recurrent=self._recurrent,
            n_rewind=self._n_rewind,
            states=self._states,
            on_device=on_device,
        )
        if self._llama.missing("states"):
            self._scratch_sequence = None
            self.capabilities = replace(self.capabilities, segments=False, sliced_prefill=False)
        if self.capabilities.asynchronous and keeps_all and TopLogits.exists(self._llama):
            self.sort_where_computed()

    def sort_where_computed(self) -> None:
        """Let the device select the top-k logits, because full rows take long to copy from it."""
        self._top.enabled = True
        self.capabilities = replace(self.capabilities, samples=True)

    # --- sequences --------------------------------------------------------------------------------

    @owner_only
    def new_sequence(self) -> SequenceId:
        if not self._idle:
            raise NoCellsError(f"all {self._spec.n_seq_max} sequences are in use")
        sequence = self._idle.pop()
        for book in self._trackers:
            book.open(sequence)
        return sequence

    @owner_only
    def fork(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """Create a sequence that shares the first `n_tokens` cells of `source`."""
        if not n_tokens:
            return self.new_sequence()
        self._check_range(source, 0, n_tokens)
        if not self._can_split(source, n_tokens):
            raise CannotRewindError(f"this model's memory can't be split at {n_tokens} tokens")
        target = self.new_sequence()
        self._share(source, target, n_tokens)
        return target

    def _can_split(self, source: SequenceId, n_tokens: int) -> bool:
        """Return whether a fork can have the first `n_tokens` of `source`."""
        if not self._recurrent:
            return self.can_rewind(source, n_tokens)
        # llama_memory_seq_cp copies the newest recurrent state, even if tokens are taken back
        # later.
        return (
            n_tokens == self._ledger.length(source) and self._rewindable_tokens.get(source, 0) >= 0
        )

    def _share(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        """Give the empty `target` the first `n_tokens` cells of `source`."""
        self._memory.copy(source, target, 0, self._ledger.position(source, n_tokens))
        for book in self._trackers:
            book.fork(source, target, n_tokens)
        self._shares_windows = bool(self._n_swa)

    @owner_only
    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        length = self._ledger.length(sequence)
        if n_tokens >= length:
            return
        position = self._ledger.position(sequence, n_tokens)
        if not self.can_rewind(sequence, n_tokens) or not self._memory.cut(sequence, position):
            raise CannotRewindError(
                f"this model's memory can't be truncated from {length} to {n_tokens} tokens"
            )
        for book in self._trackers:
            book.truncate(sequence, n_tokens)
        self._rewindable_tokens[sequence] = -1 if n_tokens else 0

    @owner_only
    def drop(self, sequence: SequenceId) -> None:
        """Free the sequence and those of its cells that no other sequence shares."""
        self._memory.cut(sequence)
        for book in self._trackers:
            book.close(sequence)
        self._rewindable_tokens.pop(sequence, None)
        self._idle.append(sequence)

    def length(self, sequence: SequenceId) -> int:
        return self._ledger.length(sequence)

    def cells_free(self) -> int:
        return self._ledger.free

    def can_rewind(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return whether memory still holds everything that position `n_tokens` attends to."""
        length = self._ledger.length(sequence)
        if n_tokens >= length or not n_tokens:
            return True
        if self._recurrent:
            # llama.cpp keeps one snapshot per token of the last step. It would also restore older,
            # stale snapshots.
            return length - n_tokens <= self._rewindable_tokens.get(sequence, 0)
        if not self._n_swa:
            return True
        first = self._ledger.position(sequence, n_tokens) - self._n_swa
        return self._memory.first(sequence) <= max(0, first)

    # --- compute ----------------------------------------------------------------------------------

    @owner_only
    def step(self, chunks: Sequence[Chunk]) -> LlamaCppStepResult:
        """Compute all chunks in one llama_decode; on an error, no chunk is appended."""
        n_outputs = sum(min(chunk.outputs, len(chunk.tokens)) for chunk in chunks)
        self._check_step(sum(len(chunk.tokens) for chunk in chunks), n_outputs)
        if self._n_rewind and len(chunks) > 1:
            return self._decode_separately(chunks)
        return self._decode(chunks)

    def _decode_separately(self, chunks: Sequence[Chunk]) -> LlamaCppStepResult:
        """Decode each chunk on its own.

        With sequences of unequal lengths in one llama_decode, recurrent rollback (n_rs_seq,
        "experimental" in llama.h) was seen to restore wrong states.
        """
        rows: list[Rows] = []
        for chunk in chunks:
            try:
                rows.append(self._decode([chunk]).rows.copy())
            except NoCellsError as e:
                raise StepError(str(e)) from e

        def read(_n_rows: int) -> Rows:
            return np.concatenate(rows)

        return LlamaCppStepResult(read, chunks)

    def _decode(self, chunks: Sequence[Chunk]) -> LlamaCppStepResult:
        batch = self._batch
        batch.clear()
        for chunk in chunks:
            batch.add(chunk.sequence, self._end(chunk.sequence), chunk.tokens, chunk.outputs)
        return self._run_step(batch, chunks)

    def _run_step(self, batch: Batch, chunks: Sequence[Chunk]) -> LlamaCppStepResult:
        """Run llama_decode on `batch`, which holds the tokens of `chunks`."""
        apply_adapters(self._context, self._spec.adapters)
        top_k = self._top.prepare(chunks)
        decode = partial(
            self._decoder.decode, batch.native, interruptible=self._can_remove_step(chunks)
        )
        if self._slices is not None:
            code = self._slices.run_step(decode)
        else:
            code = decode()
        if code == 1 and self._separate_windows(chunks):
            code = self._decoder.decode(batch.native)
        if code:
            self._remove_step(chunks)
            if code == ABORTED:
                raise InterruptedStepError("the step was interrupted")
            if code == 1:
                raise NoCellsError("llama.cpp's KV cache has no free cells for this step")
            raise StepError(f"llama_decode failed with code {code}: {log.reason()}")
        for chunk in chunks:
            self._ledger.append(chunk.sequence, len(chunk.tokens))
            if self._n_rewind:
                self._rewindable_tokens[chunk.sequence] = min(self._n_rewind, len(chunk.tokens) - 1)
        if self._heads is not None:
            self._heads.stepped(chunks)
        if not any(chunk.outputs for chunk in chunks):
            # A device may only have queued the work. Wait, so that the caller measures the step's
            # full time.
            self._llama.llama_synchronize(self._context)
        return LlamaCppStepResult(self._decoder.logits, chunks, self._top if top_k else None, top_k)

    def _end(self, sequence: SequenceId) -> int:
        """Return the position of the next token. The sequence must not end inside an image."""
        return self._ledger.position(sequence, self._ledger.length(sequence))

    def _separate_windows(self, chunks: Sequence[Chunk] = ()) -> bool:
        """Free space in a sliding-window cache that forks fill, within a step of `chunks`.

        Returns False if no space can be freed.
        """
        if not self._shares_windows or not self._states or self._recurrent:
            return False
        self._remove_step(chunks)
        self._memory.separate_windows(self._ledger.sequences)
        self._shares_windows = False
        return True

    def interrupt(self) -> None:
        self._decoder.interrupt()

    def _can_remove_step(self, chunks: Sequence[Chunk]) -> bool:
        """Return False in the middle of an image whose tokens share one position.

        Undoing the step would also remove the beginning of the image.
        """
        parts = [chunk.media for chunk in chunks if chunk.media is not None]
        return not any(part.run.grid is not None and part.start for part in parts)

    def _remove_step(self, chunks: Sequence[Chunk]) -> None:
        if not self._can_remove_step(chunks):
            return
        for chunk in chunks:
            self._memory.cut(chunk.sequence, self._end(chunk.sequence))

    def sliced_prefill_bytes(self, n_tokens: int) -> int:
        kv = purpose_bytes(self._buffers, "KV")
        compute = purpose_bytes(self._buffers, "compute")
        # Its micro-batches may be larger than those of the main context.
        compute = compute * MICRO_BATCH // min(MICRO_BATCH, self.info.n_batch)
        return kv * cells_for(n_tokens) // self._ledger.capacity + compute

    @owner_only
    def slice_prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> PausingPrefill:
        self._slices = PausingPrefill(self._llama, self._model, self._spec, self, sequence, tokens)
        return self._slices

    def use_adapters(self, scales: Sequence[float]) -> None:
        # Draft heads keep the adapters they were loaded with: their drafts are verified anyway.
        pairs = zip(self._spec.adapters, scales, strict=True)
        if any(adapter.scale != scale for adapter, scale in pairs):
            self._spec = with_scales(self._spec, scales)

    def use_threads(self, max_threads: int) -> None:
        self._decoder.use_threads(max_threads)

    def idle_work(self, spare_bytes: int | None) -> bool:
        """Move weights that steps read from the file mapping into huge pages."""
        return self._mapped.move(spare_bytes)

    @owner_only
    def compare_kv(
        self, pairs: Sequence[tuple[str, str]], tokens: Sequence[int]
    ) -> tuple[KvFidelity, ...]:
        """Compare KV of each pair of types with f16 over `tokens`, in separate contexts."""
        return compared(self._llama, self._model, self._spec, pairs, tokens)

    # --- export and import of KV ------------------------------------------------------------------

    @owner_only
    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """Return the KV of tokens [start, stop): a header, then llama.cpp's sequence state."""
        self._check_range(sequence, start, stop)
        ledger = self._ledger
        scratch: int | None = self._scratch_sequence
        if (start, stop) == (0, ledger.length(sequence)) and not self._states:
            scratch = sequence
        if scratch is None:
            raise CannotRewindError("only the complete memory of this model can be exported")
        images = ledger.images_in(sequence, start, stop)
        last_position = ledger.last_position(sequence, stop)
        block_header = header(self._magic, start, stop, last_position, images)
        start_position = ledger.position(sequence, start)
        end_position = ledger.position(sequence, stop)
        data = self._memory.export(sequence, start_position, end_position, scratch, block_header)
        if self._heads is not None:
            data = join_blocks(data, self._heads.export_range(sequence, start, stop, scratch))
        return data

    def export_runs(self, sequence: SequenceId, start: int, stop: int) -> int:
        """Return the approximate number of contiguous cell ranges that hold these tokens.

        llama.cpp copies each range separately, twice per layer.
        """
        return self._ledger.runs(sequence, start, stop)

    @owner_only
    def import_range(
        self, sequence: SequenceId, data: bytes | memoryview, start: int, stop: int
    ) -> None:
        model_data = memoryview(data)
        heads = memoryview(b"")
        if self._heads is not None:
            model_data, heads = split_blocks(data, 2)
        first, last, last_position, images, kv = parse_block(model_data, self._magic)
        if not first <= start < stop <= last:
            raise BackendFailure("the data is not an exported KV block of these tokens")
        self._check_follows(sequence, start, stop)
        self._require_cells(last - first)
        if self._scratch_sequence is None and (start, stop, first) != (0, last, 0):
            raise CannotRewindError("only the complete memory of this model can be imported")
        for image in images:
            if start <= image.start and image.stop <= stop:
                self._ledger.place(sequence, image)
        start_position = self._ledger.position(sequence, start)
        end_position = self._ledger.position(sequence, stop)
        via = sequence if self._scratch_sequence is None else self._scratch_sequence
        end_range = range(last_position + 1, last_position + 2)
        try:
            self._memory.append(sequence, kv, start_position, end_position, via, end_range)
        except BackendFailure:
            self._ledger.truncate(sequence, start)
            raise
        if self._heads is not None:
            self._heads.import_range(sequence, heads, start, stop, via)
        self._ledger.append(sequence, stop - start)

    def state_bytes(self, sequence: SequenceId) -> int:
        return len(header(STATE, 0, 0, 0)) + self._memory.size(sequence, partial=True)

    @owner_only
    def export_state(self, sequence: SequenceId) -> bytes:
        n_tokens = self._ledger.length(sequence)
        return self._memory.write(sequence, header(STATE, 0, n_tokens, 0), partial=True)

    @owner_only
    def import_state(self, sequence: SequenceId, data: bytes | memoryview, n_tokens: int) -> None:
        self._check_range(sequence, 0, n_tokens)
        last = self._ledger.last_position(sequence, n_tokens)
        try:
            self._memory.load_state(sequence, data, n_tokens, last)
        except BackendFailure:
            if not self._separate_windows():
                raise
            self._memory.load_state(sequence, data, n_tokens, last)
        # Cut after loading the state: recurrent layers refuse to be cut before they have it.
        if not self._memory.cut(sequence, self._ledger.position(sequence, n_tokens)):
            raise BackendFailure("llama.cpp did not truncate the sequence to the end of its state")
        for book in self._trackers:
            book.truncate(sequence, n_tokens)
        self._rewindable_tokens.pop(sequence, None)

    @owner_only
    def fork_state(self, source: SequenceId, data: bytes | memoryview, n_tokens: int) -> SequenceId:
        """Create a sequence that shares the first `n_tokens` cells of `source`, with their
        state."""
        self._check_range(source, 0, n_tokens)
        target = self.new_sequence()
        self._share(source, target, n_tokens)
        try:
            self.import_state(target, data, n_tokens)
        except BackendFailure:
            self.drop(target)
            raise
        return target

    def memory(self) -> MemoryReport:
        """Return the bytes that llama.cpp allocated for the context and the draft heads, and the
        size of the weights."""
        weights = int(self._llama.llama_model_size(self._model))
        if self._heads is not None:
            weights += self._heads.weights_bytes
        return memory_report(self._buffers, weights, self._projector_bytes)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()

    def close(self) -> None:
        if self._context is not None:
            if self._heads is not None:
                self._heads.free()
            self._top.close()
            self._llama.llama_free(self._context)
            self._llama.llama_model_free(self._model)
            self._context = None
            self._model = None

    def _model_info(self, path: Path, n_batch: int) -> ModelInfo:
        # KV that was stored with draft heads can't be used without them.
        identity = fingerprint(path)
        if self._spec.drafter:
            identity += f"-{fingerprint(Path(self._spec.drafter))[:12]}"
        elif self._heads is not None:
            identity += "-mtp"
        return model_info(
            self,
            self._llama,
            self._model,
            self._spec,
            fingerprint=identity,
            n_ctx=self._ledger.capacity,
            n_seq_max=len(self._idle),
            n_batch=n_batch,
            n_outputs=self._spec.outputs_of(n_batch),
            adapters=loaded_adapters(self._spec.adapters),
        )
