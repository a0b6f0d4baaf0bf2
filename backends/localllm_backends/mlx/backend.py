"""MlxBackend: the contract's operations with one mlx-lm model and its sequences."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from localllm_backends.contract import (
    BackendFailure,
    CannotRewindError,
    Capabilities,
    Chunk,
    LoadSpec,
    MemoryReport,
    ModelInfo,
    NoCellsError,
    OutOfMemoryError,
    SequenceId,
    StepError,
)
from localllm_backends.draft_head_state import joined, parted
from localllm_backends.fingerprints import under_adapters
from localllm_backends.mlx import backend_type, memory
from localllm_backends.mlx.attention import Attention
from localllm_backends.mlx.files import fingerprint
from localllm_backends.mlx.kv_export import KvExport
from localllm_backends.mlx.mtp import MlxHeads, MtpModule
from localllm_backends.mlx.results import MlxStepResult
from localllm_backends.mlx.sequence_cache import SequenceCache, Undo
from localllm_backends.mlx.shapes import Shapes
from localllm_backends.mlx.stepping import WHOLE_TOKENS, Stepper
from localllm_backends.mlx.vocabulary import MlxVocabulary
from localllm_backends.shared_behaviour import OwnedBackend, owner_only

# Tokens that a recurrent model with draft heads can take back by default. Few drafts are longer.
_DRAFT_REWIND = 3


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded checkpoint and its facts: everything that a backend needs."""

    model: Any
    shapes: Shapes
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
    heads: MtpModule | None = None
    # Why optional draft heads were left out.
    left_out: str = ""


class MlxBackend(MlxVocabulary, OwnedBackend):
    """One mlx-lm checkpoint. See sequence_cache.py for the layout of its memory."""

    _heads: MlxHeads | None

    def __init__(self, loaded: Loaded) -> None:
        spec = loaded.spec
        shapes = loaded.shapes
        n_batch = loaded.n_batch
        MlxVocabulary.__init__(self, loaded.folder, loaded.config, shapes.n_vocab)
        self._shapes = shapes
        self._layout = layout = shapes.layout
        self._take_ownership()
        self._lines: dict[SequenceId, SequenceCache] = {}
        self._next = 0
        self._n_rewind = 0
        if layout.recurrent:
            usual = _DRAFT_REWIND if loaded.heads is not None else 0
            self._n_rewind = min(spec.n_rewind or usual, n_batch)
        self.stepper = Stepper(
            loaded.model,
            layout,
            self._lines,
            n_vocab=shapes.n_vocab,
            n_ctx=loaded.n_ctx,
            n_rewind=self._n_rewind,
            # Other machines can only repeat requested steps, so there is no early step with them.
            looks_ahead=spec.looks_ahead and loaded.n_shares == 1,
            fused=shapes.widths <= set(backend_type.declaration.fused_heads),
        )
        mx.set_cache_limit(memory.CACHE_HIGH_BYTES)
        memory.wire(wanted=spec.wired)
        self.capabilities = _capabilities(loaded, self._n_rewind)
        self.info = _model_info(loaded, self)
        identity = f"{self.info.fingerprint} {shapes.kv_type}"
        self._heads = None
        if loaded.heads is not None:
            self._heads = MlxHeads(loaded.heads, self.stepper, identity, n_batch=n_batch)
        self._exports = KvExport(identity, shapes, self.stepper, self.capabilities.states)
        # The first step compiles what steps need; the second one has the size of a decode step.
        self.drop(self._warm_up(2, 1))

    # --- sequences --------------------------------------------------------------------------------

    @owner_only
    def new_sequence(self) -> SequenceId:
        return self._open_sequence()

    def _open_sequence(self) -> SequenceId:
        if len(self._lines) >= self.info.n_seq_max:
            raise NoCellsError(f"all {self.info.n_seq_max} sequences are in use")
        self._next += 1
        self._lines[self._next] = SequenceCache(self._next, self._layout)
        if self._heads is not None:
            self._heads.open(self._next)
        return self._next

    @owner_only
    def fork(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """Create a sequence with the first `n_tokens` of `source`.

        It takes that many cells at once. Their contents are copied only when one of the two
        sequences writes.
        """
        line = self._line(source)
        if not n_tokens:
            return self._open_sequence()
        self._check_range(source, 0, n_tokens)
        if n_tokens < line.length and (self._layout.recurrent or not line.holds(n_tokens)):
            raise CannotRewindError(
                f"this model's memory can't be split at {n_tokens} of {line.length} tokens"
            )
        self._require_cells(n_tokens)
        return self._copied(source, n_tokens)

    def _copied(self, source: SequenceId, n_tokens: int) -> SequenceId:
        """Create a sequence that shares the memory of `source`."""
        target = self._open_sequence()
        line = self._line(source)
        self.stepper.undo_ahead_of(line)
        line.fork_into(self._lines[target], n_tokens)
        if self._heads is not None:
            self._heads.fork(source, target, n_tokens)
        return target

    @owner_only
    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        line = self._line(sequence)
        if n_tokens >= line.length:
            return
        if not self.can_rewind(sequence, n_tokens):
            raise CannotRewindError(
                f"this model's memory can't go back from {line.length} to {n_tokens} tokens"
            )
        if n_tokens == 0:
            self.stepper.undo_ahead_of(line)
            line.clear()
        elif self._layout.recurrent and line.undo is not None:
            self._rewind_state(line, line.undo, n_tokens)
        else:
            line.length = n_tokens
            line.place(n_tokens)
        line.predicted = None
        line.cut_images(n_tokens)
        if self._heads is not None:
            self._heads.truncate(sequence, n_tokens)

    def can_rewind(self, sequence: SequenceId, n_tokens: int) -> bool:
        line = self._line(sequence)
        if n_tokens >= line.length or not n_tokens:
            return True
        if self._layout.recurrent:
            return self._can_undo(line, n_tokens)
        return line.holds(n_tokens)

    def _can_undo(self, line: SequenceCache, n_tokens: int) -> bool:
        undo = line.undo
        if undo is None or n_tokens < undo.length or line.length - n_tokens > self._n_rewind:
            return False
        return line.holds(undo.length)

    def _rewind_state(self, line: SequenceCache, undo: Undo, n_tokens: int) -> None:
        """Truncate recurrent state, which can't be cut: restore the state before the last chunk.

        The remaining tokens of that chunk are replayed.
        """
        self.stepper.undo_ahead_of(line)
        line.leave_batch()
        line.batch.restore(undo.state)
        line.replay = list(undo.tokens[: n_tokens - undo.length])
        line.length = n_tokens
        line.place(line.computed)

    @owner_only
    def drop(self, sequence: SequenceId) -> None:
        line = self._line(sequence)
        self.stepper.undo_ahead_of(line)
        line.clear()
        del self._lines[sequence]
        if self._heads is not None:
            self._heads.close(sequence)
        if not self._lines:
            self.stepper.ahead = self.stepper.last = None
        # While the server is idle, one sequence may remain for the next turn of a chat.
        if len(self._lines) <= 1:
            mx.clear_cache()

    def length(self, sequence: SequenceId) -> int:
        return self._line(sequence).length

    def cells_free(self) -> int:
        return self.stepper.free()

    def _line(self, sequence: SequenceId) -> SequenceCache:
        line = self._lines.get(sequence)
        if line is None:
            raise BackendFailure(f"there is no sequence {sequence}")
        return line

    def _intact_line(self, sequence: SequenceId) -> SequenceCache:
        line = self._line(sequence)
        if line.broken:
            raise BackendFailure("this sequence was lost when a step failed")
        return line

    # --- compute ----------------------------------------------------------------------------------

    @owner_only
    def step(self, chunks: Sequence[Chunk]) -> MlxStepResult:
        """Run one step in one graph: the decoding sequences as a batch, each prefill chunk
        separately."""
        return self._sweep(chunks, self._checked(chunks))

    def _sweep(self, chunks: Sequence[Chunk], lines: list[SequenceCache]) -> MlxStepResult:
        """Run a step that was checked."""
        try:
            result = self.stepper.run(chunks, lines)
        except BackendFailure:
            raise
        except Exception as e:
            for line in self.stepper.touched_by_failure(lines):
                line.broken = True
            text = f"MLX failed inside a step: {e}"
            if memory.out_of_memory(e):
                raise OutOfMemoryError(text) from e
            raise StepError(text) from e
        if self._heads is not None:
            self._heads.follow(chunks, [part.hidden for part in result.parts])
        return result

    def _checked(self, chunks: Sequence[Chunk]) -> list[SequenceCache]:
        """Return the sequences of `chunks`. Raises BackendFailure if they can't be stepped."""
        lines = [self._line(c.sequence) for c in chunks]
        n_tokens = sum(len(c.tokens) for c in chunks)
        n_outputs = sum(min(c.outputs, len(c.tokens)) for c in chunks)
        if any(line.broken for line in lines):
            raise StepError(
                "a sequence in this step was lost when an earlier step failed: it must be dropped"
            )
        n_vocab = self._shapes.n_vocab
        if any(min(c.tokens, default=-1) < 0 or max(c.tokens) >= n_vocab for c in chunks):
            raise BackendFailure(
                f"a chunk needs tokens, all of them of the vocabulary of {n_vocab}"
            )
        self._check_step(n_tokens, n_outputs)
        if n_tokens > WHOLE_TOKENS:
            token_bytes, _ = self._shapes.sizes()
            kv_bytes = (n_tokens + self.info.n_batch) * token_bytes
            logits_bytes = n_outputs * n_vocab * 4
            memory.require(kv_bytes + logits_bytes, f"a step of {n_tokens} tokens")
        return lines

    # --- export and import of KV ------------------------------------------------------------------

    @owner_only
    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """Return the KV of tokens [start, stop) after a header (kv_export.py).

        For some models it is the full sequence's windows and state.
        """
        self._check_range(sequence, start, stop)
        line = self._intact_line(sequence)
        data = self._exports.export_range(line, start, stop)
        if self._heads is None:
            return data
        return joined(data, self._heads.export_range(sequence, start, stop))

    @owner_only
    def import_range(
        self, sequence: SequenceId, data: bytes | memoryview, start: int, stop: int
    ) -> None:
        line = self._line(sequence)
        self._check_follows(sequence, start, stop)
        self._require_cells(stop - start)
        if self._heads is None:
            self._exports.import_range(line, data, start, stop)
            return
        own, heads = parted(data, 2)
        self._exports.import_range(line, own, start, stop)
        self._heads.import_range(sequence, heads, start, stop)

    def state_bytes(self, sequence: SequenceId) -> int:
        return self._exports.state_bytes(self._line(sequence))

    @owner_only
    def export_state(self, sequence: SequenceId) -> bytes:
        return self._exports.export_state(self._intact_line(sequence))

    @owner_only
    def import_state(self, sequence: SequenceId, data: bytes | memoryview, n_tokens: int) -> None:
        line = self._line(sequence)
        self._check_range(sequence, 0, n_tokens)
        self._exports.load_state(line, self._exports.read_state(data, n_tokens))
        if self._heads is not None:
            self._heads.truncate(sequence, n_tokens)

    @owner_only
    def fork_state(self, source: SequenceId, data: bytes | memoryview, n_tokens: int) -> SequenceId:
        line = self._line(source)
        self._check_range(source, 0, n_tokens)
        state = self._exports.read_state(data, n_tokens)
        self._require_cells(n_tokens)
        self.stepper.undo_ahead_of(line)
        self.stepper.recompute(line)
        target = self._copied(source, n_tokens)
        self._exports.load_state(self._lines[target], state)
        return target

    # --- facts ------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        lines = list(self._lines.values())
        if self._heads is not None:
            lines += self._heads.caches.values()
        batches = {id(line.batch.buffers): line.batch for line in lines}
        kv_bytes = 0
        states: list[list[Any]] = []
        for leaf in chain.from_iterable(batch.leaves for batch in batches.values()):
            if isinstance(leaf, Attention):
                kv_bytes += leaf.nbytes
            else:
                states.append(leaf.cache)
        for line in lines:
            if line.undo is not None:
                states += line.undo.state
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
        assert 0 <= self.cells_free() <= self.info.n_ctx, "more cells are held than there are"
        ahead = self.stepper.ahead
        for line in self._lines.values():
            if line.broken:
                continue
            moved = line.batch.offsets[line.row] - line.computed
            if ahead is not None and line in ahead.lines:
                assert moved in (0, 1), "a line moved"
            else:
                assert moved == 0, "a line moved"

    def close(self) -> None:
        if self.stepper.model is None:
            return
        self._lines.clear()
        self._heads = None
        self.stepper.close()
        self._shapes.leaves = []
        gc.collect()
        mx.clear_cache()


def _capabilities(loaded: Loaded, n_rewind: int) -> Capabilities:
    layout = loaded.shapes.layout
    heads = loaded.heads
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    # Without a layer that keeps every token, there is no KV to export separately from states.
    keeps_tokens = any(leaf.keeps_tokens for leaf in layout.leaves)
    apart = keeps_tokens and not layout.plain and loaded.n_shares == 1
    rewind: Literal["any", "bounded", "none"] = "bounded"
    if layout.plain:
        rewind = "any"
    elif layout.recurrent and not n_rewind:
        rewind = "none"
    drafts = 0
    draft_kind = ""
    if heads is not None:
        drafts = MlxHeads.longest
        draft_kind = MlxHeads.kind
    return Capabilities(
        rewind=rewind,
        rewind_tokens=n_rewind if layout.recurrent else layout.slack,
        # The first write after a fork copies the buffers, so a fork takes its cells at once.
        shares_cells=False,
        segments=layout.plain or apart,
        states=apart,
        # On a CPU, sampling on the device takes longer than reading the logits. On a GPU, reading
        # them takes long.
        samples=on_gpu and loaded.n_shares == 1,
        kv_on_device=on_gpu,
        drafts=drafts,
        draft_kind=draft_kind,
    )


def _model_info(loaded: Loaded, words: MlxVocabulary) -> ModelInfo:
    spec = loaded.spec
    n_batch = loaded.n_batch
    mark = under_adapters(fingerprint(loaded.folder), spec.adapters)
    if loaded.heads is not None:
        # KV that was stored with draft heads can't be used without them.
        mark += "-mtp"
    kv_type = loaded.shapes.kv_type
    # The libraries that compute exported KV and define its format.
    kv_meaning = f"mlx {version('mlx')}; mlx-lm {version('mlx-lm')}"
    if loaded.n_shares > 1:
        kv_meaning += f"; shared by {loaded.n_shares}"
    notes = (loaded.left_out,) if loaded.left_out else ()
    of_vocabulary: dict[str, Any] = {
        "eog_tokens": words.eog_tokens,
        "bos_token": words.bos_token,
        "eos_token": words.eos_token,
        "adds_bos": words.adds_bos,
        "bos_text": words.text(words.bos_token),
        "eos_text": words.text(words.eos_token),
        "chat_template": words.chat_template,
        "fim_tokens": words.fim_tokens,
        "control_texts": words.control_texts,
    }
    return ModelInfo(
        architecture=str(loaded.config.get("model_type", "")),
        description=loaded.folder.name,
        fingerprint=mark,
        n_vocab=words.n_vocab,
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
        load_notes=notes,
        **of_vocabulary,
    )
