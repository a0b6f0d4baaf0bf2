"""MlxBackend: the contract's operations with one mlx-lm model and its sequences."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from localllm_backends.contract import (
    BackendFailure,
    CannotRewindError,
    Capabilities,
    Chunk,
    KvFidelity,
    LoadSpec,
    MemoryReport,
    ModelInfo,
    NoCellsError,
    OutOfMemoryError,
    SequenceId,
    StepError,
)
from localllm_backends.draft_head_state import join_blocks, split_blocks
from localllm_backends.fingerprints import loaded_adapters
from localllm_backends.mlx import backend_type, memory
from localllm_backends.mlx.adapters import AdapterLayers
from localllm_backends.mlx.attention import Attention
from localllm_backends.mlx.draft_heads import DraftModule, HeadMemory
from localllm_backends.mlx.files import fingerprint
from localllm_backends.mlx.kv_export import KV_LAYOUT, KvExport
from localllm_backends.mlx.kv_fidelity import compared
from localllm_backends.mlx.results import MlxStepResult
from localllm_backends.mlx.sequence_cache import SequenceCache, Undo
from localllm_backends.mlx.shapes import Shapes
from localllm_backends.mlx.shared_prefix import segment_bytes
from localllm_backends.mlx.split_attention import can_split
from localllm_backends.mlx.stepping import WHOLE_TOKENS, Stepper
from localllm_backends.mlx.vocabulary import MlxVocabulary
from localllm_backends.shared_behaviour import OwnedBackend, owner_only

# Tokens that a recurrent model with draft heads can take back by default. Few drafts are longer.
_DRAFT_REWIND = 3


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded checkpoint and its facts: everything that a backend needs."""

    model: Any
    adapters: AdapterLayers
    shapes: Shapes
    # The shapes with the model's own KV type, and why the requested type was replaced.
    own_shapes: Shapes
    spec: LoadSpec
    folder: Path
    config: dict[str, Any]
    n_ctx: int
    n_ctx_train: int
    n_batch: int
    weights_bytes: int
    n_params: int
    # Number of machines that share every layer.
    n_shares: int = 1
    heads: DraftModule | None = None
    # Why optional draft heads or an optional drafter were left out.
    unavailable_heads: str = ""
    kv_note: str = ""


class MlxBackend(MlxVocabulary, OwnedBackend):
    """One mlx-lm checkpoint. See sequence_cache.py for the layout of its memory."""

    _heads: HeadMemory | None

    def __init__(self, loaded: Loaded) -> None:
        spec = loaded.spec
        shapes = loaded.shapes
        n_batch = loaded.n_batch
        MlxVocabulary.__init__(self, loaded.folder, loaded.config, shapes.n_vocab)
        self._shapes = shapes
        self._own_shapes = loaded.own_shapes
        self._layout = layout = shapes.layout
        self._take_ownership()
        self._seqs: dict[SequenceId, SequenceCache] = {}
        self._next = 0
        self._n_rewind = 0
        if layout.recurrent:
            self._n_rewind = min(_n_rewind(spec.n_rewind, loaded.heads), n_batch)
        self.stepper = Stepper(
            loaded.adapters,
            layout,
            self._seqs,
            n_vocab=shapes.n_vocab,
            n_ctx=loaded.n_ctx,
            n_rewind=self._n_rewind,
            # Other machines can only repeat requested steps, so there is no early step with them.
            starts_steps_early=spec.starts_steps_early and loaded.n_shares == 1,
            fused=shapes.widths <= set(backend_type.declaration.fused_heads),
        )
        if loaded.n_shares == 1:
            layout.shares = can_split(loaded.adapters.model, layout)
        mx.set_cache_limit(memory.CACHE_HIGH_BYTES)
        memory.wire(enabled=spec.wired)
        self.capabilities = _capabilities(loaded, self._n_rewind)
        self.info = _model_info(loaded, self)
        identity = f"{self.info.fingerprint} {shapes.kv_type}"
        self._heads = None
        if loaded.heads is not None:
            self._heads = loaded.heads.open(self.stepper, identity, n_batch)
        self._exports = KvExport(identity, shapes, self.stepper, self.capabilities.states)
        # The first step compiles what steps need; the second one has the size of a decode step.
        self.drop(self._warm_up(2, 1))

    # --- sequences --------------------------------------------------------------------------------

    @owner_only
    def new_sequence(self) -> SequenceId:
        return self._open_sequence()

    def _open_sequence(self) -> SequenceId:
        if len(self._seqs) >= self.info.n_seq_max:
            raise NoCellsError(f"all {self.info.n_seq_max} sequences are in use")
        self._next += 1
        self._seqs[self._next] = SequenceCache(self._next, self._layout)
        if self._heads is not None:
            self._heads.open(self._next)
        return self._next

    @owner_only
    def fork(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """Create a sequence with the first `n_tokens` of `source`.

        The two share that memory, if the model's attention can be computed in parts. Otherwise the
        fork takes that many cells at once, and the first of the two that writes copies them.
        """
        seq = self._seq(source)
        if not n_tokens:
            return self._open_sequence()
        self._check_range(source, 0, n_tokens)
        if n_tokens < seq.length and (self._layout.recurrent or not seq.holds(n_tokens)):
            raise CannotRewindError(
                f"this model's memory can't be split at {n_tokens} of {seq.length} tokens"
            )
        if not self._layout.shares:
            self._require_cells(n_tokens)
        return self._copied(source, n_tokens)

    def _copied(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """Create a sequence that shares the memory of `source`."""
        target = self._open_sequence()
        seq = self._seq(source)
        self.stepper.undo_ahead_of(seq)
        seq.fork_into(self._seqs[target], n_tokens)
        if self._heads is not None:
            self._heads.fork(source, target, n_tokens)
        return target

    @owner_only
    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        seq = self._seq(sequence)
        if n_tokens >= seq.length:
            return
        if not self.can_rewind(sequence, n_tokens):
            raise CannotRewindError(
                f"this model's memory can't be truncated from {seq.length} to {n_tokens} tokens"
            )
        if n_tokens == 0:
            self.stepper.undo_ahead_of(seq)
            seq.clear()
        elif self._layout.recurrent and seq.undo is not None:
            self._rewind_state(seq, seq.undo, n_tokens)
        else:
            seq.length = n_tokens
            seq.place(n_tokens)
        seq.predicted = None
        seq.cut_images(n_tokens)
        if self._heads is not None:
            self._heads.truncate(sequence, n_tokens)

    def can_rewind(self, sequence: SequenceId, n_tokens: int) -> bool:
        seq = self._seq(sequence)
        if n_tokens >= seq.length or not n_tokens:
            return True
        if self._layout.recurrent:
            return self._can_undo(seq, n_tokens)
        return seq.holds(n_tokens)

    def _can_undo(self, seq: SequenceCache, n_tokens: int) -> bool:
        undo = seq.undo
        if undo is None or n_tokens < undo.length or seq.length - n_tokens > self._n_rewind:
            return False
        return seq.holds(undo.length)

    def _rewind_state(self, seq: SequenceCache, undo: Undo, n_tokens: int) -> None:
        """Truncate recurrent state, which can't be cut: restore the state before the last chunk.

        The remaining tokens of that chunk are replayed.
        """
        self.stepper.undo_ahead_of(seq)
        seq.leave_batch()
        seq.batch.restore(undo.state)
        seq.replay = list(undo.tokens[: n_tokens - undo.length])
        seq.length = n_tokens
        seq.place(seq.computed)

    @owner_only
    def drop(self, sequence: SequenceId) -> None:
        seq = self._seq(sequence)
        self.stepper.undo_ahead_of(seq)
        seq.clear()
        del self._seqs[sequence]
        if self._heads is not None:
            self._heads.close(sequence)
        if not self._seqs:
            self.stepper.ahead = self.stepper.last = None
        # While the server is idle, one sequence may remain for the next turn of a chat.
        if len(self._seqs) <= 1:
            mx.clear_cache()

    def length(self, sequence: SequenceId) -> int:
        return self._seq(sequence).length

    def cells_free(self) -> int:
        return self.stepper.free()

    def _seq(self, sequence: SequenceId) -> SequenceCache:
        seq = self._seqs.get(sequence)
        if seq is None:
            raise BackendFailure(f"there is no sequence {sequence}")
        return seq

    def _intact_seq(self, sequence: SequenceId) -> SequenceCache:
        seq = self._seq(sequence)
        if seq.broken:
            raise BackendFailure("this sequence was lost when a step failed")
        return seq

    # --- compute ----------------------------------------------------------------------------------

    @owner_only
    def step(self, chunks: Sequence[Chunk]) -> MlxStepResult:
        """Run one step in one graph: the decoding sequences as a batch, each prefill chunk
        separately."""
        return self._run_step(chunks, self._checked(chunks))

    def _run_step(self, chunks: Sequence[Chunk], seqs: list[SequenceCache]) -> MlxStepResult:
        """Run a step that was checked."""
        try:
            result = self.stepper.run(chunks, seqs)
        except BackendFailure:
            raise
        except Exception as e:
            for seq in self.stepper.affected_by_failure(seqs):
                seq.broken = True
            text = f"MLX failed inside a step: {e}"
            if memory.out_of_memory(e):
                raise OutOfMemoryError(text) from e
            raise StepError(text) from e
        if self._heads is not None:
            self._heads.follow(chunks, [part.hidden for part in result.parts])
        return result

    @owner_only
    def use_adapters(self, scales: Sequence[float]) -> None:
        self.stepper.use_adapters(scales)

    def _checked(self, chunks: Sequence[Chunk]) -> list[SequenceCache]:
        """Return the sequences of `chunks`. Raises BackendFailure if they can't be stepped."""
        seqs = [self._seq(c.sequence) for c in chunks]
        n_tokens = sum(len(c.tokens) for c in chunks)
        n_outputs = sum(min(c.outputs, len(c.tokens)) for c in chunks)
        if any(seq.broken for seq in seqs):
            raise StepError(
                "a sequence in this step was lost when an earlier step failed: it must be dropped"
            )
        n_vocab = self._shapes.n_vocab
        if any(min(c.tokens, default=-1) < 0 or max(c.tokens) >= n_vocab for c in chunks):
            raise BackendFailure(
                f"a chunk needs at least one token, and only token ids below {n_vocab}"
            )
        self._check_step(n_tokens, n_outputs)
        if n_tokens > WHOLE_TOKENS:
            token_bytes, _ = self._shapes.sizes()
            kv_bytes = (n_tokens + self.info.n_batch) * token_bytes
            logits_bytes = n_outputs * n_vocab * 4
            memory.require(kv_bytes + logits_bytes, f"a step of {n_tokens} tokens")
        return seqs

    # --- export and import of KV ------------------------------------------------------------------

    @owner_only
    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """Return the KV of tokens [start, stop) after a header (kv_export.py).

        For some models it is the full sequence's windows and state.
        """
        self._check_range(sequence, start, stop)
        seq = self._intact_seq(sequence)
        data = self._exports.export_range(seq, start, stop)
        if self._heads is None:
            return data
        return join_blocks(data, self._heads.export_range(sequence, start, stop))

    @owner_only
    def import_range(
        self, sequence: SequenceId, data: bytes | memoryview, start: int, stop: int
    ) -> None:
        seq = self._seq(sequence)
        self._check_follows(sequence, start, stop)
        self._require_cells(stop - start)
        if self._heads is None:
            self._exports.import_range(seq, data, start, stop)
            return
        model_data, heads = split_blocks(data, 2)
        self._exports.import_range(seq, model_data, start, stop)
        self._heads.import_range(sequence, heads, start, stop)

    def state_bytes(self, sequence: SequenceId) -> int:
        return self._exports.state_bytes(self._seq(sequence))

    @owner_only
    def export_state(self, sequence: SequenceId) -> bytes:
        return self._exports.export_state(self._intact_seq(sequence))

    @owner_only
    def import_state(self, sequence: SequenceId, data: bytes | memoryview, n_tokens: int) -> None:
        seq = self._seq(sequence)
        self._check_range(sequence, 0, n_tokens)
        self._exports.load_state(seq, self._exports.read_state(data, n_tokens))
        if self._heads is not None:
            self._heads.truncate(sequence, n_tokens)

    @owner_only
    def fork_state(self, source: SequenceId, data: bytes | memoryview, n_tokens: int) -> SequenceId:
        seq = self._seq(source)
        self._check_range(source, 0, n_tokens)
        state = self._exports.read_state(data, n_tokens)
        if not self._layout.shares:
            self._require_cells(n_tokens)
        self.stepper.undo_ahead_of(seq)
        self.stepper.recompute(seq)
        target = self._copied(source, n_tokens)
        self._exports.load_state(self._seqs[target], state)
        return target

    # --- facts ------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        seqs = list(self._seqs.values())
        if self._heads is not None:
            seqs += self._heads.caches.values()
        batches = {id(seq.batch.buffers): seq.batch for seq in seqs}
        kv_bytes = 0
        states: list[list[Any]] = []
        for leaf in chain.from_iterable(batch.leaves for batch in batches.values()):
            if isinstance(leaf, Attention):
                kv_bytes += leaf.nbytes
            else:
                states.append(leaf.cache)
        kv_bytes += segment_bytes(seqs)
        for seq in seqs:
            if seq.undo is not None:
                states += seq.undo.state
        arrays = [a for a in chain.from_iterable(states) if a is not None]
        return MemoryReport(
            weights_bytes=self.info.weights_bytes,
            kv_bytes=kv_bytes,
            recurrent_bytes=sum(int(a.nbytes) for a in arrays),
            compute_bytes=int(mx.get_cache_memory()),
            output_bytes=self.stepper.output_bytes,
        )

    def check_integrity(self) -> None:
        """Check that cells add up and that every sequence's position matches its length.

        Raises AssertionError otherwise.
        """
        assert 0 <= self.cells_free() <= self.info.n_ctx, "the sequences hold more cells than exist"
        ahead = self.stepper.ahead
        for seq in self._seqs.values():
            if seq.broken:
                continue
            moved = seq.batch.offsets[seq.row] - seq.computed
            if ahead is not None and seq in ahead.seqs:
                assert moved in (0, 1), "a sequence with an early step is at a wrong position"
            else:
                assert moved == 0, "a sequence is at a wrong position"

    @owner_only
    def compare_kv(
        self, pairs: Sequence[tuple[str, str]], tokens: Sequence[int]
    ) -> tuple[KvFidelity, ...]:
        model = self.stepper.model
        return compared(model, make_prompt_cache(model), self._own_shapes, pairs, tokens)

    def close(self) -> None:
        if self.stepper.model is None:
            return
        self._seqs.clear()
        self._heads = None
        self.stepper.close()
        self._shapes.leaves = []
        gc.collect()
        mx.clear_cache()


def _n_rewind(n_requested: int, heads: DraftModule | None) -> int:
    """Return how many tokens recurrent state can take back. The memory is that of one state."""
    if heads is None:
        return n_requested
    if heads.free_rewind:
        return max(n_requested, heads.longest)
    return n_requested or _DRAFT_REWIND


def _capabilities(loaded: Loaded, n_rewind: int) -> Capabilities:
    layout = loaded.shapes.layout
    heads = loaded.heads
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    # Without a layer that keeps every token, there is no KV to export separately from states.
    keeps_tokens = any(leaf.keeps_tokens for leaf in layout.leaves)
    separate_states = keeps_tokens and not layout.plain and loaded.n_shares == 1
    rewind: Literal["any", "bounded", "none"] = "bounded"
    if layout.plain:
        rewind = "any"
    elif layout.recurrent and not n_rewind:
        rewind = "none"
    drafts = 0
    draft_kind = ""
    if heads is not None:
        drafts = heads.longest
        draft_kind = heads.kind
    return Capabilities(
        rewind=rewind,
        rewind_tokens=n_rewind if layout.recurrent else layout.slack,
        shares_cells=layout.shares,
        segments=layout.plain or separate_states,
        states=separate_states,
        # On a CPU, sampling on the device takes longer than reading the logits. On a GPU, reading
        # them takes long.
        samples=on_gpu and loaded.n_shares == 1,
        kv_on_device=on_gpu,
        drafts=drafts,
        draft_kind=draft_kind,
        pads_drafts=not layout.recurrent,
    )


def _model_info(loaded: Loaded, vocabulary: MlxVocabulary) -> ModelInfo:
    spec = loaded.spec
    n_batch = loaded.n_batch
    identity = fingerprint(loaded.folder)
    if loaded.heads is not None:
        # KV that was stored with draft heads can't be used without them.
        identity += f"-{loaded.heads.mark}"
    kv_type = loaded.shapes.kv_type
    kv_layout = KV_LAYOUT
    if loaded.n_shares > 1:
        kv_layout += f"; shared by {loaded.n_shares}"
    # The libraries that compute exported KV, and its format.
    kv_meaning = f"mlx {version('mlx')}; mlx-lm {version('mlx-lm')}; {kv_layout}"
    notes = tuple(note for note in (loaded.unavailable_heads, loaded.kv_note) if note)
    of_vocabulary: dict[str, Any] = {
        "eog_tokens": vocabulary.eog_tokens,
        "bos_token": vocabulary.bos_token,
        "eos_token": vocabulary.eos_token,
        "adds_bos": vocabulary.adds_bos,
        "bos_text": vocabulary.text(vocabulary.bos_token),
        "eos_text": vocabulary.text(vocabulary.eos_token),
        "chat_template": vocabulary.chat_template,
        "fim_tokens": vocabulary.fim_tokens,
        "control_texts": vocabulary.control_texts,
    }
    info = ModelInfo(
        architecture=str(loaded.config.get("model_type", "")),
        description=loaded.folder.name,
        fingerprint=identity,
        n_vocab=vocabulary.n_vocab,
        n_ctx=loaded.n_ctx,
        n_ctx_train=loaded.n_ctx_train,
        n_seq_max=max(1, spec.n_seq_max),
        n_batch=n_batch,
        n_outputs=spec.outputs_of(n_batch),
        n_params=loaded.n_params,
        weights_bytes=loaded.weights_bytes,
        kv_type_k=kv_type,
        kv_type_v=kv_type,
        kv_meaning=kv_meaning,
        kv_layout=kv_layout,
        load_notes=notes,
        **of_vocabulary,
    )
    return replace(info, adapters=loaded_adapters(spec.adapters))
