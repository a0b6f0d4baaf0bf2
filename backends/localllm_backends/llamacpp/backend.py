"""LlamaCppBackend: the contract's operations over one llama_model and one llama_context."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import (
    BackendFailure,
    CannotRewindError,
    Capabilities,
    Chunk,
    LoadSpec,
    MemoryReport,
    ModelInfo,
    NoCellsError,
    SequenceId,
    StepError,
)
from localllm_backends.llamacpp import kv_blocks
from localllm_backends.llamacpp.batch import Batch
from localllm_backends.llamacpp.cells import CellLedger
from localllm_backends.llamacpp.context import outputs_reserved
from localllm_backends.llamacpp.mtp import MtpHeads
from localllm_backends.llamacpp.native import GGML_TYPES, c_string, has_gpu, token_piece
from localllm_backends.llamacpp.native_log import BufferSizes, log
from localllm_backends.llamacpp.pausing_prefill import MICRO_BATCH, PausingPrefill, cells_for
from localllm_backends.llamacpp.weights import fingerprint, kv_meaning

_FIM = ("pre", "suf", "mid", "pad", "rep", "sep")


class _Result:
    """Logits of the last step: a view of llama.cpp's own output rows."""

    def __init__(self, rows: NDArray[np.float32], offsets: list[tuple[int, int]]) -> None:
        self.rows = rows
        self._offsets = offsets

    def argmax(self, chunk: int) -> list[int]:
        start, stop = self._offsets[chunk]
        return [int(self.rows[i].argmax()) for i in range(start, stop)]

    def logits(self, chunk: int) -> NDArray[np.float32]:
        start, stop = self._offsets[chunk]
        return self.rows[start:stop]


class LlamaCppBackend:
    """One GGUF model. Sequences are llama.cpp sequence ids in one unified KV cache; `fork` shares cells."""

    def __init__(
        self,
        llama: Any,
        model: Any,
        context: Any,
        spec: LoadSpec,
        path: Path,
        sizes: BufferSizes,
        *,
        recurrent: bool,
        heads: MtpHeads | None = None,
    ) -> None:
        self._heads = heads
        self._llama, self._model, self._context, self._spec = llama, model, context, spec
        self._vocab = llama.llama_model_get_vocab(model)
        self._memory = llama.llama_get_memory(context)
        self._sizes = sizes
        self._owner = threading.get_ident()
        self._n_swa = int(llama.llama_model_n_swa(model))
        self._recurrent = recurrent
        self._n_rewind = int(llama.llama_n_rs_seq(context)) if recurrent else 0
        # Recurrent models only: how many tokens of a sequence's last step can be taken back, once.
        self._undoable: dict[SequenceId, int] = {}
        self._rolled_back: set[SequenceId] = set()
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        n_batch = int(llama.llama_n_batch(context))
        self._n_outputs = outputs_reserved(spec, n_batch)
        self._batch = Batch(llama, n_batch)
        self._ledger = CellLedger(int(llama.llama_n_ctx(context)))
        n_native = int(llama.llama_n_seq_max(context))
        self._spare: int | None = None if self._n_swa or recurrent else n_native - 1
        self._idle = list(range(min(spec.n_seq_max, n_native) - 1, -1, -1))
        segments = self._spare is not None
        rewind = "any" if segments else "bounded" if self._n_swa or self._n_rewind else "none"
        self.capabilities = Capabilities(
            rewind=rewind,  # type: ignore[arg-type]
            rewind_tokens=n_batch if self._n_swa and not recurrent else self._n_rewind,
            shares_cells=True,
            segments=segments,
            exact_batching=False,
            kv_types=tuple(GGML_TYPES),  # type: ignore[arg-type]
            drafts=heads.longest if heads is not None else 0,
            # Not run on a GPU: there a step's micro-batch is short anyway.
            sliced_prefill=segments and heads is None and (spec.n_gpu_layers == 0 or not has_gpu()),
        )
        self.info = self._model_info(path, n_batch)
        self._warm_up()

    # --- vocabulary (any thread) ---------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; BOS first if `add_bos` and the model wants one."""
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        buffer = (self._llama.llama_token * capacity)()
        n = self._llama.llama_tokenize(self._vocab, data, len(data), buffer, capacity, add_bos, special)
        if n < 0:
            buffer = (self._llama.llama_token * -n)()
            n = self._llama.llama_tokenize(self._vocab, data, len(data), buffer, -n, add_bos, special)
        return list(buffer[:n])

    def detokenize(self, tokens: Seq[int]) -> str:
        """Text of `tokens`."""
        return b"".join(self.token_bytes(t, special=True) for t in tokens).decode("utf-8", "replace")

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token; cached, because text is made of few tokens."""
        piece = self._pieces.get((token, special))
        if piece is None:
            if not 0 <= token < self._n_vocab:
                raise BackendFailure(f"token {token} is outside the vocabulary of {self._n_vocab}")
            piece = token_piece(self._llama, self._vocab, token, special=special)
            self._pieces[token, special] = piece
        return piece

    def is_control(self, token: int) -> bool:
        """True for the vocabulary's control tokens."""
        return bool(self._llama.llama_vocab_is_control(self._vocab, token))

    # --- sequences -----------------------------------------------------------------------------------------------

    def new_sequence(self) -> SequenceId:
        """An empty sequence; NoCellsError when all `n_seq_max` are held."""
        self._check_owner()
        if not self._idle:
            raise NoCellsError(f"all {self._spec.n_seq_max} sequences are in use")
        sequence = self._idle.pop()
        self._ledger.open(sequence)
        if self._heads is not None:
            self._heads.open(sequence)
        return sequence

    def fork(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """A sequence sharing the first `n_tokens` cells of `source`."""
        length = self._ledger.length(source)
        if not 0 <= n_tokens <= length:
            raise BackendFailure(f"can't fork at {n_tokens}: the sequence holds {length} tokens")
        if n_tokens < length and n_tokens and not self._holds_window(source, n_tokens):
            raise CannotRewindError(f"this model's memory can't be split at {n_tokens} of {length} tokens")
        if self._recurrent and n_tokens and (n_tokens < length or source in self._rolled_back):
            # llama_memory_seq_cp copies the newest state, whatever is to be taken back of it.
            raise CannotRewindError("a recurrent state can only be shared as it was left by the last step")
        target = self.new_sequence()
        if n_tokens:
            self._llama.llama_memory_seq_cp(self._memory, source, target, 0, n_tokens)
            self._ledger.share(source, target, n_tokens)
            if self._heads is not None:
                self._heads.fork(source, target, n_tokens)
        return target

    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        """Cut back to `n_tokens`; CannotRewindError (nothing changed) where the memory can't."""
        self._check_owner()
        length = self._ledger.length(sequence)
        if n_tokens >= length:
            return
        if n_tokens and not self._holds_window(sequence, n_tokens):
            raise CannotRewindError(f"this model's memory can't go back from {length} to {n_tokens} tokens")
        if not self._llama.llama_memory_seq_rm(self._memory, sequence, n_tokens, -1):
            raise CannotRewindError(f"this model's memory can't go back from {length} to {n_tokens} tokens")
        self._ledger.cut(sequence, n_tokens)
        if self._heads is not None:
            self._heads.truncate(sequence, n_tokens)
        self._undoable.pop(sequence, None)
        if self._recurrent and n_tokens:
            self._rolled_back.add(sequence)

    def drop(self, sequence: SequenceId) -> None:
        """Free the sequence's cells that nobody shares."""
        self._check_owner()
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._ledger.close(sequence)
        if self._heads is not None:
            self._heads.close(sequence)
        self._undoable.pop(sequence, None)
        self._rolled_back.discard(sequence)
        self._idle.append(sequence)

    def length(self, sequence: SequenceId) -> int:
        """Tokens held."""
        return self._ledger.length(sequence)

    def cells_free(self) -> int:
        """Tokens that can still be appended."""
        return self._ledger.free

    def _holds_window(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Can position `n_tokens` be computed again: is everything its attention sees still in memory?"""
        if self._recurrent:
            # llama.cpp keeps one snapshot per token of the last step, and would hand out older, stale ones too.
            return 0 < self._ledger.length(sequence) - n_tokens <= self._undoable.get(sequence, 0)
        if not self._n_swa:
            return True
        oldest = int(self._llama.llama_memory_seq_pos_min(self._memory, sequence))
        return oldest <= max(0, n_tokens - self._n_swa)

    # --- compute -------------------------------------------------------------------------------------------------

    def step(self, chunks: Seq[Chunk]) -> _Result:
        """One llama_decode over all chunks; all or nothing."""
        self._check_owner()
        n_tokens = n_outputs = 0
        offsets: list[tuple[int, int]] = []
        for chunk in chunks:
            n_tokens += len(chunk.tokens)
            wanted = min(chunk.outputs, len(chunk.tokens))
            offsets.append((n_outputs, n_outputs + wanted))
            n_outputs += wanted
        if not n_tokens:
            raise BackendFailure("a step needs at least one token")
        if n_tokens > self.info.n_batch:
            raise BackendFailure(f"a step of {n_tokens} tokens is over the batch of {self.info.n_batch}")
        if n_outputs > self._n_outputs:
            raise BackendFailure(f"a step with {n_outputs} outputs is over the reserved {self._n_outputs}")
        if n_tokens > self._ledger.free:
            raise NoCellsError(f"{n_tokens} KV cells needed, {self._ledger.free} of {self._ledger.capacity} free")
        if self._n_rewind and len(chunks) > 1:
            return self._step_apart(chunks, offsets)
        return self._decode(chunks, offsets, n_outputs)

    def _step_apart(self, chunks: Seq[Chunk], offsets: list[tuple[int, int]]) -> _Result:
        """Each chunk in a sweep of its own: with sequences of unequal lengths in one llama_decode, recurrent rollback
        (n_rs_seq, "experimental" in llama.h) was seen to restore wrong states."""
        rows = []
        for chunk, (start, stop) in zip(chunks, offsets, strict=True):
            try:
                rows.append(self._decode([chunk], [(0, stop - start)], stop - start).rows.copy())
            except NoCellsError as e:
                raise StepError(str(e)) from e
        return _Result(np.concatenate(rows), offsets)

    def _decode(self, chunks: Seq[Chunk], offsets: list[tuple[int, int]], n_outputs: int) -> _Result:
        batch = self._batch
        batch.clear()
        for chunk in chunks:
            batch.add(chunk.sequence, self._ledger.length(chunk.sequence), chunk.tokens, chunk.outputs)
        code = self._llama.llama_decode(self._context, batch.native)
        if code:
            self._undo(chunks)
            if code == 1:
                raise NoCellsError("llama.cpp found no room in its KV cache for this step")
            raise StepError(
                f"llama_decode failed with code {code}: {'; '.join(log.errors()[-2:]) or 'no reason given'}"
            )
        for chunk in chunks:
            self._ledger.append(chunk.sequence, len(chunk.tokens))
            if self._n_rewind:
                self._undoable[chunk.sequence] = min(self._n_rewind, len(chunk.tokens) - 1)
                self._rolled_back.discard(chunk.sequence)
        if self._heads is not None:
            self._heads.stepped(chunks)
        if not n_outputs:
            return _Result(np.empty((0, self._n_vocab), dtype=np.float32), offsets)
        address = ctypes.cast(self._llama.llama_get_logits(self._context), ctypes.c_void_p).value
        assert address is not None
        row = ctypes.c_float * (n_outputs * self._n_vocab)
        rows: NDArray[np.float32] = np.frombuffer(memoryview(row.from_address(address)), dtype=np.float32)
        return _Result(rows.reshape(n_outputs, self._n_vocab), offsets)

    def _undo(self, chunks: Seq[Chunk]) -> None:
        for chunk in chunks:
            self._llama.llama_memory_seq_rm(self._memory, chunk.sequence, self._ledger.length(chunk.sequence), -1)

    def sliced_prefill_bytes(self, n_tokens: int) -> int:
        """Memory it takes that ends up with `n_tokens`: its own KV, and buffers for its larger micro-batches."""
        kv = self._sizes.kv_bytes * cells_for(n_tokens) // self._ledger.capacity
        return kv + self._sizes.compute_bytes * MICRO_BATCH // min(MICRO_BATCH, self.info.n_batch)

    def slice_prefill(self, sequence: SequenceId, tokens: Seq[int]) -> PausingPrefill:
        """Start reading `tokens` behind `sequence` in a context of their own."""
        self._check_owner()
        return PausingPrefill(self._llama, self._model, self._spec, self, sequence, tokens)

    def draft(self, wanted: Seq[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Guesses of the model's own heads for each (sequence, its newest token, most tokens)."""
        self._check_owner()
        if self._heads is None:
            raise BackendFailure("this model was loaded without its draft heads")
        return self._heads.draft(wanted)

    def _warm_up(self) -> None:
        """Touch every weight once, so that the first request does not pay for page faults."""
        sequence = self.new_sequence()
        token = self.info.bos_token if self.info.bos_token is not None else 0
        self._llama.llama_set_warmup(self._context, True)
        self.step([Chunk(sequence, [token])])
        self._llama.llama_set_warmup(self._context, False)
        if self._heads is not None:
            self._heads.draft([(sequence, token, 1)])
        self.drop(sequence)

    # --- KV in and out -------------------------------------------------------------------------------------------

    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """KV of tokens [start, stop): llama.cpp's sequence state behind a 16-byte header."""
        self._check_owner()
        length = self._ledger.length(sequence)
        if not 0 <= start < stop <= length:
            raise BackendFailure(f"can't export tokens {start} to {stop} of {length}")
        source = sequence
        if self._spare is None:
            if (start, stop) != (0, length):
                raise CannotRewindError("this model's memory can only be exported whole")
        elif (start, stop) != (0, length):
            source = self._spare
            self._llama.llama_memory_seq_cp(self._memory, sequence, source, start, stop)
        try:
            data = kv_blocks.packed(self._llama, self._context, source, self._magic, start, stop)
        finally:
            if source != sequence:
                self._llama.llama_memory_seq_rm(self._memory, source, -1, -1)
        if self._heads is None:
            return data
        return kv_blocks.with_heads(data, self._heads.export_range(sequence, start, stop, source))

    def import_range(self, sequence: SequenceId, data: bytes | memoryview, start: int, stop: int) -> None:
        """Append tokens [start, stop) of an exported blob."""
        self._check_owner()
        first, last = kv_blocks.span(data, self._magic)
        if not first <= start < stop <= last:
            raise BackendFailure("this is not an exported KV block of these tokens")
        if self._ledger.length(sequence) != start:
            raise BackendFailure(f"tokens {start} to {stop} don't follow the {self._ledger.length(sequence)} held")
        if last - first > self._ledger.free:
            raise NoCellsError(f"{last - first} KV cells needed, {self._ledger.free} of {self._ledger.capacity} free")
        if self._spare is None and (start, stop, first) != (0, last, 0):
            raise CannotRewindError("this model's memory can only be imported whole")
        target = sequence if self._spare is None else self._spare
        raw, more = kv_blocks.parts(data, heads=self._heads is not None)
        kv_blocks.unpack(self._llama, self._context, target, raw, last)
        if target != sequence:
            self._llama.llama_memory_seq_cp(self._memory, target, sequence, start, stop)
            self._llama.llama_memory_seq_rm(self._memory, target, -1, -1)
        if self._heads is not None and more is not None:
            self._heads.import_range(sequence, more, start, stop, target)
        self._ledger.append(sequence, stop - start)

    @property
    def _magic(self) -> bytes:
        return kv_blocks.MAGIC if self._heads is None else kv_blocks.MAGIC_MTP

    # --- facts ---------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        """What llama.cpp said it allocated for the context (and the draft heads'), and the weights' own bytes."""
        return MemoryReport(
            weights_bytes=int(self._llama.llama_model_size(self._model)),
            kv_bytes=self._sizes.kv_bytes,
            recurrent_bytes=self._sizes.recurrent_bytes,
            compute_bytes=self._sizes.compute_bytes,
            output_bytes=self._sizes.output_bytes,
        )

    def check_integrity(self) -> None:
        """The ledger's conservation law; AssertionError where it is broken."""
        self._ledger.check_integrity()

    def close(self) -> None:
        """Free context and model."""
        if self._context is not None:
            if self._heads is not None:
                self._heads.free()
            self._llama.llama_free(self._context)
            self._llama.llama_model_free(self._model)
            self._context = self._model = None

    def _check_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise BackendFailure("a backend belongs to the thread that loaded it")

    def _model_info(self, path: Path, n_batch: int) -> ModelInfo:
        llama, model, vocab = self._llama, self._model, self._vocab
        metadata = {}
        for i in range(llama.llama_model_meta_count(model)):
            key = c_string(llama.llama_model_meta_key_by_index, model, i)
            value = c_string(llama.llama_model_meta_val_str_by_index, model, i)
            if key and value is not None and not key.startswith("tokenizer.") and len(value) < 1000:
                metadata[key] = value
        template = llama.llama_model_chat_template(model, None)
        bos, eos = int(llama.llama_vocab_bos(vocab)), int(llama.llama_vocab_eos(vocab))
        fim = {name: int(getattr(llama, f"llama_vocab_fim_{name}")(vocab)) for name in _FIM}
        return ModelInfo(
            architecture=metadata.get("general.architecture", ""),
            description=metadata.get("general.name") or path.stem,
            # What is stored with the heads' KV is of no use without them, and the other way round.
            fingerprint=fingerprint(path) + ("-mtp" if self._heads is not None else ""),
            n_vocab=self._n_vocab,
            n_ctx=self._ledger.capacity,
            n_ctx_train=int(llama.llama_model_n_ctx_train(model)),
            n_seq_max=len(self._idle),
            n_batch=n_batch,
            n_outputs=self._n_outputs,
            n_params=int(llama.llama_model_n_params(model)),
            weights_bytes=int(llama.llama_model_size(model)),
            eog_tokens=tuple(t for t in range(self._n_vocab) if llama.llama_vocab_is_eog(vocab, t)),
            bos_token=bos if bos >= 0 else None,
            eos_token=eos if eos >= 0 else None,
            adds_bos=bool(llama.llama_vocab_get_add_bos(vocab)),
            bos_text=self.token_bytes(bos, special=True).decode("utf-8", "replace") if bos >= 0 else "",
            eos_text=self.token_bytes(eos, special=True).decode("utf-8", "replace") if eos >= 0 else "",
            chat_template=template.decode("utf-8", "replace") if template else None,
            kv_type_k=self._spec.kv_type_k,
            kv_type_v=self._spec.kv_type_v,
            kv_meaning=kv_meaning(llama, self._spec),
            fim_tokens={name: token for name, token in fim.items() if token >= 0},
            metadata=metadata,
        )
