"""One step over several lines: a batch of those that decode, each prefill by itself, and the next step begun early."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import Chunk, SampleSpec, StepError, StepResult
from localllm_backends.mlx.sampling import UNSURE, DeviceSamples, sample
from localllm_backends.mlx.sequence_cache import Layout, SequenceBatch, SequenceCache, Undo, arrays_of

# A chunk up to this long computes all its rows of logits; a longer one is cut, so that the vocabulary is multiplied
# only where logits are wanted (mlx-lm computes a prompt's last token by itself for the same reason).
WHOLE_TOKENS = 16


@dataclass
class _Group:
    """Rows of logits that came out of one call."""

    logits: Any
    best: Any
    host: list[int] | None = None

    def best_tokens(self) -> list[int]:
        if self.host is None:
            self.host = [int(t) for t in np.array(self.best)]
        return self.host


@dataclass
class MlxStepResult(StepResult):
    """See StepResult. Logits stay in MLX's memory until somebody asks for them as numbers."""

    n_vocab: int
    pieces: list[tuple[_Group, int, int] | None] = field(default_factory=list)
    samples: list[tuple[DeviceSamples, int] | None] = field(default_factory=list)
    asked_best: bool = False
    asked_logits: bool = False

    def argmax(self, chunk: int) -> list[int]:
        self.asked_best = True
        piece = self.pieces[chunk]
        return [] if piece is None else piece[0].best_tokens()[piece[1] : piece[2]]

    def sampled(self, chunk: int) -> int | None:
        self.asked_best = True
        piece = self.samples[chunk]
        token = UNSURE if piece is None else piece[0].on_host()[piece[1]]
        return None if token == UNSURE else token

    def next_token(self, chunk: int) -> int | None:
        """What most likely follows the chunk: what was sampled, else its best token; None where nothing was asked for."""
        if self.samples[chunk] is not None:
            return self.sampled(chunk)
        piece = self.pieces[chunk]
        return None if piece is None else piece[0].best_tokens()[piece[2] - 1]

    def logits(self, chunk: int) -> NDArray[np.float32]:
        self.asked_logits = True
        piece = self.pieces[chunk]
        if piece is None:
            return np.empty((0, self.n_vocab), dtype=np.float32)
        group, start, stop = piece
        try:
            rows: NDArray[np.float32] = np.array(group.logits[start:stop].astype(mx.float32), copy=False)
        except Exception as e:
            raise StepError(f"MLX could not give out the logits of this step: {e}") from e
        rows.flags.writeable = False
        return rows


@dataclass
class _Ahead:
    """The next decode step, started before anybody asked for it, with the best token of each of `lines` or the one sampled for
    it, and what was sampled from it by the `id()` of its line."""

    lines: list[SequenceCache]
    group: _Group
    batch: SequenceBatch | None
    state: list[list[Any]]
    samples: dict[int, tuple[DeviceSamples, int]]


class Stepper:
    """Runs steps over `lines` (those alive, by id) and owns what outlives one: the batch, and the step begun early."""

    def __init__(
        self, model: Any, layout: Layout, lines: Mapping[int, SequenceCache], *,
        n_vocab: int, n_ctx: int, n_rewind: int, looks_ahead: bool = True,
    ) -> None:  # fmt: skip
        self.model = model
        self._layout, self._lines = layout, lines
        self._n_vocab, self._n_ctx, self._n_rewind = n_vocab, n_ctx, n_rewind
        self._looks_ahead = looks_ahead
        self.batch = SequenceBatch(layout)
        self.ahead: _Ahead | None = None
        self.last: MlxStepResult | None = None

    def free(self) -> int:
        return self._n_ctx - sum(line.length for line in self._lines.values())

    def run(self, chunks: Seq[Chunk], lines: list[SequenceCache]) -> MlxStepResult:
        """Append every chunk to its line; on any exception no line is longer, but what they hold can't be trusted."""
        expected = [line.predicted for line in lines]
        result = MlxStepResult(self._n_vocab, [None] * len(chunks), [None] * len(chunks))
        waiting: list[Any] = []
        taken = self._take_ahead(chunks, lines, result, waiting)
        rest = [i for i in range(len(chunks)) if i not in taken]
        together = [i for i in rest if self._batchable(chunks[i], lines[i])] if not taken else []
        if len(together) > 1:
            self._call_batch(together, chunks, lines, result, waiting)
            rest = [i for i in rest if i not in together]
        for i in rest:
            self._call_line(i, chunks[i], lines[i], result, waiting)
        self._sample(chunks, result, waiting)
        mx.async_eval(waiting)
        for chunk, line in zip(chunks, lines, strict=True):
            line.length += len(chunk.tokens)
        try:
            decoding = [i for i, c in enumerate(chunks) if len(c.tokens) == 1 and c.outputs]
            guessed = self._looks_ahead and bool(decoding) and all(chunks[i].tokens[0] == expected[i] for i in decoding)
            if guessed and self.last is not None and self.last.asked_best and not self.last.asked_logits:
                self._look_ahead(decoding, chunks, lines, result)
            mx.eval(waiting)
        except Exception:
            for chunk, line in zip(chunks, lines, strict=True):
                line.length -= len(chunk.tokens)
            raise
        for i, line in enumerate(lines):
            line.predicted = result.next_token(i)
        result.asked_best = False
        self.last = result
        return result

    def _batchable(self, chunk: Chunk, line: SequenceCache) -> bool:
        """A decoding line: every token wants logits. Recurrent state would also read the padding of uneven chunks."""
        n = len(chunk.tokens)
        if chunk.outputs < n or n > WHOLE_TOKENS or line.replay or not line.length:
            return False
        return n == 1 or not self._layout.recurrent

    def _call_batch(
        self,
        which: list[int],
        chunks: Seq[Chunk],
        lines: list[SequenceCache],
        result: MlxStepResult,
        waiting: list[Any],
    ) -> None:
        batch = self.batch
        batch.become([lines[i] for i in which])
        chunk_of = {id(lines[i]): chunks[i] for i in which}
        tokens = [list(chunk_of[id(line)].tokens) for line in batch.lines]
        longest = max(map(len, tokens))
        state = batch.snapshot() if self._layout.recurrent else []
        if self._n_rewind:
            for row, line in enumerate(batch.lines):
                line.undo = Undo(line.length, tokens[row], [[a[row : row + 1] for a in s] for s in state])
        batch.make_room(longest)
        logits = self.model(mx.array([t + [0] * (longest - len(t)) for t in tokens]), cache=batch.caches)
        batch.moved([len(t) for t in tokens])
        rows = logits.reshape(-1, self._n_vocab)
        group = _Group(rows, mx.argmax(rows, axis=-1))
        for i in which:
            row = batch.row_of(lines[i])
            result.pieces[i] = (group, row * longest, row * longest + len(chunks[i].tokens))
        waiting.append(group.best)
        if self._layout.recurrent:
            waiting.extend(arrays_of(batch.leaves))

    def _call_line(self, i: int, chunk: Chunk, line: SequenceCache, result: MlxStepResult, waiting: list[Any]) -> None:
        line.alone()
        tokens = [*line.replay, *chunk.tokens]
        if self._n_rewind:
            line.undo = Undo(line.computed, tokens, line.snapshot())
        line.replay = []
        outputs = min(chunk.outputs, len(chunk.tokens))
        line.buffers = object()
        ids = mx.array([tokens])
        if outputs and outputs < len(tokens) > WHOLE_TOKENS:
            self.model(ids[:, :-outputs], cache=line.caches)
            ids = ids[:, -outputs:]
        logits = self.model(ids, cache=line.caches)
        if outputs:
            rows = logits[0, -outputs:]
            group = _Group(rows, mx.argmax(rows, axis=-1))
            result.pieces[i] = (group, 0, outputs)
            waiting.append(group.best)
        if not outputs or self._layout.recurrent:
            waiting.extend(arrays_of(line.leaves))

    def _sample(self, chunks: Seq[Chunk], result: MlxStepResult, waiting: list[Any]) -> None:
        """Begin sampling what the chunks ask for and is not under way: all rows of one group together."""
        groups: dict[int, list[int]] = {}
        for i, (chunk, piece) in enumerate(zip(chunks, result.pieces, strict=True)):
            if chunk.sample is not None and piece is not None and result.samples[i] is None:
                groups.setdefault(id(piece[0]), []).append(i)
        for which in groups.values():
            pieces = [p for i in which if (p := result.pieces[i]) is not None]
            rows = _gathered([(p[0].logits, p[2] - 1) for p in pieces])
            sampled = sample(rows, [d for i in which if (d := chunks[i].sample) is not None])
            for at, i in enumerate(which):
                result.samples[i] = (sampled, at)
            waiting.append(sampled.tokens)

    # --- one step ahead ------------------------------------------------------------------------------------------

    def _look_ahead(
        self, decoding: list[int], chunks: Seq[Chunk], all_lines: list[SequenceCache], result: MlxStepResult
    ) -> None:
        """Start the next decode step with the best tokens of this one, or those sampled from it, before anybody has seen them:
        building its graph then costs no time. If something else is asked for, positions are set back and it is forgotten. A
        batch that has yet to form waits for the next step: its copies would keep this one's tokens from whoever waits."""
        lines = [all_lines[i] for i in decoding]
        if self.free() < len(lines) or any(line.replay for line in lines):
            return
        if len(lines) > 1 and not self.batch.is_of(lines):
            return
        tokens: dict[int, tuple[Any, int]] = {}
        behind: dict[int, SampleSpec] = {}
        for i, line in zip(decoding, lines, strict=True):
            piece, sampled, asked = result.pieces[i], result.samples[i], chunks[i].sample
            if piece is not None:
                tokens[id(line)] = (piece[0].best, piece[1])
            if sampled is not None:
                tokens[id(line)] = (sampled[0].readable, sampled[1])
            if asked is not None and (following := asked.next()) is not None:
                behind[id(line)] = following
        state: list[list[Any]] = []
        batch: SequenceBatch | None = None
        if len(lines) == 1:
            (line,) = lines
            line.alone()
            array, row = tokens[id(line)]
            state = line.snapshot()
            logits = self.model(array[row : row + 1][None], cache=line.caches)[:, -1]
            held = line.leaves
        else:
            batch = self.batch
            state = batch.snapshot()
            batch.make_room(1)
            given = _gathered([tokens[id(line)] for line in batch.lines])
            logits = self.model(given[:, None], cache=batch.caches)[:, -1]
            batch.moved([1] * len(lines))
            lines = list(batch.lines)
            held = batch.leaves
        group = _Group(logits, mx.argmax(logits, axis=-1))
        sampling = [row for row, line in enumerate(lines) if id(line) in behind]
        begun: dict[int, tuple[DeviceSamples, int]] = {}
        if sampling:
            rows = _gathered([(logits, row) for row in sampling])
            ahead = sample(rows, [behind[id(lines[row])] for row in sampling])
            begun = {id(lines[row]): (ahead, at) for at, row in enumerate(sampling)}
        self.ahead = _Ahead(lines, group, batch, state if self._layout.recurrent else [], begun)
        what = [group.best] if len(sampling) < len(lines) else []
        what += [ahead.tokens] if sampling else []
        mx.async_eval(*what, *(arrays_of(held) if self._layout.recurrent else ()))

    def _take_ahead(
        self, chunks: Seq[Chunk], lines: list[SequenceCache], result: MlxStepResult, waiting: list[Any]
    ) -> set[int]:
        """The chunks whose outputs are already under way; whatever else was started is set back."""
        ahead = self.ahead
        if ahead is None:
            return set()
        rows = {id(line): row for row, line in enumerate(ahead.lines)}
        asked = [i for i, line in enumerate(lines) if id(line) in rows]
        fits = bool(asked) and all(
            len(chunks[i].tokens) == 1 and chunks[i].outputs and chunks[i].tokens[0] == lines[i].predicted
            for i in asked
        )
        if not fits or (self._layout.recurrent and len(asked) < len(ahead.lines)):
            self.undo_ahead()
            return set()
        self.ahead = None
        for i in asked:
            row = rows[id(lines[i])]
            result.pieces[i] = (ahead.group, row, row + 1)
            begun, wanted = ahead.samples.get(id(lines[i])), chunks[i].sample
            if begun is not None and wanted is not None and wanted.same(begun[0].asked[begun[1]]):
                result.samples[i] = begun
                waiting.append(begun[0].tokens)
            if self._n_rewind:
                lines[i].undo = Undo(
                    lines[i].length, list(chunks[i].tokens), [[a[row : row + 1] for a in s] for s in ahead.state]
                )
        if any(result.samples[i] is None for i in asked):
            waiting.append(ahead.group.best)
        taken = {id(lines[i]) for i in asked}
        for line in ahead.lines:
            if id(line) not in taken and line.id in self._lines:
                line.place(line.computed)
        return set(asked)

    def undo_ahead(self) -> None:
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return
        for line in ahead.lines:
            if line.id in self._lines:
                line.place(line.computed)
        if ahead.state:
            (ahead.batch or ahead.lines[0]).restore(ahead.state)

    def settle(self, line: SequenceCache) -> None:
        """Set back what was started for `line` unasked, where its memory could not be read otherwise."""
        if self.ahead is not None and self._layout.recurrent and any(x is line for x in self.ahead.lines):
            self.undo_ahead()

    def lost(self, lines: Seq[SequenceCache]) -> list[SequenceCache]:
        """A step over `lines` failed: every line whose buffers it may have touched. Forgets what was begun."""
        ahead, self.ahead = self.ahead, None
        touched = {id(x): x for x in [*lines, *(ahead.lines if ahead else ())]}
        if any(x.batch is self.batch for x in touched.values()):
            touched.update({id(x): x for x in self.batch.lines})
        return list(touched.values())

    def forget_dropped(self) -> None:
        """A line was dropped: what was begun for others stays begun, unless nobody is left."""
        if self.ahead is not None and not any(x.id in self._lines for x in self.ahead.lines):
            self.ahead = None
        if not self._lines:
            self.last = None

    def read_again(self, line: SequenceCache) -> None:
        """Compute what a rewind left to be read again."""
        if line.replay:
            tokens, line.replay = line.replay, []
            self.model(mx.array([tokens]), cache=line.caches)
            mx.eval(arrays_of(line.leaves))

    def close(self) -> None:
        self.ahead = self.last = self.model = None
        self.batch = SequenceBatch(self._layout)

    @property
    def output_bytes(self) -> int:
        pieces = [] if self.last is None else self.last.pieces
        return sum(int(g.logits.nbytes) for g in {id(p[0]): p[0] for p in pieces if p is not None}.values())


def _gathered(parts: list[tuple[Any, int]]) -> Any:
    """One array of the (array, row) given; the array itself where that is what they are."""
    array = parts[0][0]
    if all(a is array for a, _ in parts) and [row for _, row in parts] == list(range(int(array.shape[0]))):
        return array
    return mx.stack([a[row] for a, row in parts])
