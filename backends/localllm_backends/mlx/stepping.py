"""One step over several lines: a batch of those that decode, each prefill by itself, and the next step begun early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import Chunk, StepError, StepResult
from localllm_backends.mlx.sampling import UNSURE, DeviceSamples, sample
from localllm_backends.mlx.sequence_cache import Layout, SequenceBatch, SequenceCache, Undo, arrays_of

# A chunk up to this long computes all its rows of logits; a longer one is cut, so that the vocabulary is multiplied
# only where logits are wanted (mlx-lm computes a prompt's last token by itself for the same reason).
WHOLE_TOKENS = 16
# New tokens times all tokens that one call of the model attends with, mlx-lm's 2,048 at a depth of 65,536: beyond that a chunk is
# computed in pieces. Where every score is held, a quarter of it: heads of 256 took 11 GB more in steps of 2,048 than of 512 at a
# depth of 131,072, and were no faster (github.com/ml-explore/mlx-lm/pull/1781).
SCORES_AT_ONCE = 2048 * 65_536
_PIECE = 64

# A row of what the model knew at a token: an array [lines, tokens, width] and its place there.
HiddenRow = tuple[Any, int, int]


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
    """See StepResult. Logits stay in MLX's memory until somebody asks for them as numbers: on a stream of their own, since the next
    step may be under way."""

    n_vocab: int
    lines: list[SequenceCache]
    stream: Any
    pieces: list[tuple[_Group, int, int] | None] = field(default_factory=list)
    samples: list[tuple[DeviceSamples, int] | None] = field(default_factory=list)
    hidden: list[list[HiddenRow]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pieces = [None] * len(self.lines)
        self.hidden = [[] for _ in self.lines]
        self.samples = [None] * len(self.lines)
        for line in self.lines:
            line.follows_best = False

    def argmax(self, chunk: int) -> list[int]:
        self.lines[chunk].follows_best = True
        piece = self.pieces[chunk]
        return [] if piece is None else piece[0].best_tokens()[piece[1] : piece[2]]

    def sampled(self, chunk: int) -> int | None:
        piece = self.samples[chunk]
        token = UNSURE if piece is None else piece[0].on_host()[piece[1]]
        return None if token == UNSURE else token

    def next_token(self, chunk: int) -> int | None:
        """What most likely follows the chunk: what was sampled, else its best token; None where nothing was asked for."""
        if self.samples[chunk] is not None:
            return self.sampled(chunk)
        piece = self.pieces[chunk]
        return None if piece is None else piece[0].best_tokens()[piece[2] - 1]

    def chosen(self) -> list[Any]:
        """The arrays that say what follows the chunks."""
        found = [
            s[0].tokens if s is not None else p[0].best for s, p in zip(self.samples, self.pieces, strict=True) if p
        ]
        return list({id(a): a for a in found}.values())

    def logits(self, chunk: int) -> NDArray[np.float32]:
        piece = self.pieces[chunk]
        if piece is None:
            return np.empty((0, self.n_vocab), dtype=np.float32)
        group, start, stop = piece
        try:
            with mx.stream(self.stream):
                rows: NDArray[np.float32] = np.array(group.logits[start:stop].astype(mx.float32), copy=False)
        except Exception as e:
            raise StepError(f"MLX could not give out the logits of this step: {e}") from e
        rows.flags.writeable = False
        return rows


@dataclass
class _Ahead:
    """The next decode step, started before anybody asked for it, with the best token of each of `lines` or the one sampled for
    it, what was sampled from it by the `id()` of its line, and what the model knew."""

    lines: list[SequenceCache]
    group: _Group
    batch: SequenceBatch | None
    state: list[list[Any]]
    samples: dict[int, tuple[DeviceSamples, int]]
    hidden: list[Any]


class Stepper:
    """Runs steps over `lines` (those alive, by id) and owns what outlives one: the batch, and the step begun early."""

    def __init__(
        self, model: Any, layout: Layout, lines: Mapping[int, SequenceCache], *,
        n_vocab: int, n_ctx: int, n_rewind: int, looks_ahead: bool = True, fused: bool = True,
    ) -> None:  # fmt: skip
        self.model = model
        self._layout, self._lines = layout, lines
        self._n_vocab, self._n_ctx, self._n_rewind = n_vocab, n_ctx, n_rewind
        self._looks_ahead, self._fused = looks_ahead, fused
        self._stream = mx.new_stream(mx.default_device())
        self.batch = SequenceBatch(layout)
        self.ahead: _Ahead | None = None
        self.last: MlxStepResult | None = None
        # What the model knew in its calls since this was taken, where somebody taps it.
        self.hidden: list[Any] = []

    def _take_hidden(self) -> list[Any]:
        taken = list(self.hidden)
        self.hidden.clear()
        return taken

    def free(self) -> int:
        return self._n_ctx - sum(line.length for line in self._lines.values())

    def run(self, chunks: Sequence[Chunk], lines: list[SequenceCache]) -> MlxStepResult:
        """Append every chunk to its line; on any exception no line is longer, but what they hold can't be trusted."""
        # Whose next token is known here, sampled or by the engine's habit of taking the best one, can go on unasked.
        followed = [line.follows_best and c.tokens[0] == line.predicted for c, line in zip(chunks, lines, strict=True)]
        result = MlxStepResult(self._n_vocab, lines, self._stream)
        fresh: list[Any] = []
        taken = self._take_ahead(chunks, lines, result)
        rest = [i for i in range(len(chunks)) if i not in taken]
        together = [i for i in rest if self._batchable(chunks[i], lines[i])] if not taken else []
        if len(together) > 1:
            self._call_batch(together, chunks, lines, result, fresh)
            rest = [i for i in rest if i not in together]
        for i in rest:
            self._call_line(i, chunks[i], lines[i], result, fresh)
        late = self._sample(chunks, result, taken, fresh)
        if fresh:
            # Apart from what is begun unasked, so that nobody waits for that. First what decides on the stream of the whole.
            mx.async_eval(*fresh, *late)
            late = []
        for chunk, line in zip(chunks, lines, strict=True):
            line.length += len(chunk.tokens)
        try:
            known = [s is not None or (f and len(c.tokens) == 1 and c.sample is None)
                     for s, f, c in zip(result.samples, followed, chunks, strict=True)]  # fmt: skip
            going_on = [i for i, c in enumerate(chunks) if c.outputs and (len(c.tokens) == 1 or known[i])]
            begun = []
            if self._looks_ahead and going_on and all(known[i] for i in going_on):
                begun = self._look_ahead(going_on, chunks, lines, result)
            if begun or late:
                mx.async_eval(*begun, *late)
            mx.eval(result.chosen(), fresh)
        except Exception:
            for chunk, line in zip(chunks, lines, strict=True):
                line.length -= len(chunk.tokens)
            raise
        for i, line in enumerate(lines):
            line.predicted = result.next_token(i)
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
        chunks: Sequence[Chunk],
        lines: list[SequenceCache],
        result: MlxStepResult,
        fresh: list[Any],
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
        self.hidden.clear()
        logits = self.model(mx.array([t + [0] * (longest - len(t)) for t in tokens]), cache=batch.caches)
        hidden = self._take_hidden()
        fresh.extend(hidden)
        batch.moved([len(t) for t in tokens])
        rows = logits.reshape(-1, self._n_vocab)
        group = _Group(rows, mx.argmax(rows, axis=-1))
        for i in which:
            row = batch.row_of(lines[i])
            result.pieces[i] = (group, row * longest, row * longest + len(chunks[i].tokens))
            result.hidden[i] = [(rows, row, at) for rows in hidden for at in range(len(chunks[i].tokens))]
        if any(chunks[i].sample is None for i in which):
            fresh.append(group.best)
        if self._layout.recurrent:
            fresh.extend(arrays_of(batch.leaves))

    def _call_line(self, i: int, chunk: Chunk, line: SequenceCache, result: MlxStepResult, fresh: list[Any]) -> None:
        line.alone()
        tokens = [*line.replay, *chunk.tokens]
        if self._n_rewind:
            line.undo = Undo(line.computed, tokens, line.snapshot())
        line.replay = []
        outputs = min(chunk.outputs, len(chunk.tokens))
        line.buffers = object()
        self.hidden.clear()
        ids = mx.array([tokens])
        if outputs and outputs < len(tokens) > WHOLE_TOKENS:
            self.model(self._read(ids[:, :-outputs], line), cache=line.caches)
            ids = ids[:, -outputs:]
        elif not outputs:
            ids = self._read(ids, line)
        logits = self.model(ids, cache=line.caches)
        if outputs:
            rows = logits[0, -outputs:]
            group = _Group(rows, mx.argmax(rows, axis=-1))
            result.pieces[i] = (group, 0, outputs)
            if chunk.sample is None:
                fresh.append(group.best)
        if not outputs or self._layout.recurrent:
            fresh.extend(arrays_of(line.leaves))
        hidden = self._take_hidden()
        fresh.extend(hidden)
        known = [(rows, 0, at) for rows in hidden for at in range(int(rows.shape[1]))]
        result.hidden[i] = known[-len(chunk.tokens) :]

    def _read(self, ids: Any, line: SequenceCache) -> Any:
        """Compute as much of `ids` behind `line` as takes calls of its own, piece by piece; returns the rest."""
        scores = SCORES_AT_ONCE if self._fused else SCORES_AT_ONCE // 4
        most = max(_PIECE, scores // (line.length + int(ids.shape[1])) // _PIECE * _PIECE)
        while int(ids.shape[1]) > most:
            self.model(ids[:, :most], cache=line.caches)
            mx.eval(arrays_of(line.leaves), self.hidden)
            ids = ids[:, most:]
        return ids

    def _sample(self, chunks: Sequence[Chunk], result: MlxStepResult, taken: set[int], fresh: list[Any]) -> list[Any]:
        """Begin sampling what the chunks ask for and is not under way: all rows of one group together. What comes from logits of
        this step goes with them into `fresh`. The rest is returned: it is sampled on a stream of its own, which is done before the
        next step is, though that is begun in the same call."""
        groups: dict[int, list[int]] = {}
        for i, (chunk, piece) in enumerate(zip(chunks, result.pieces, strict=True)):
            if chunk.sample is not None and piece is not None and result.samples[i] is None:
                groups.setdefault(id(piece[0]), []).append(i)
        late: list[Any] = []
        for which in groups.values():
            pieces = [p for i in which if (p := result.pieces[i]) is not None]
            asked = [d for i in which if (d := chunks[i].sample) is not None]
            begun = which[0] in taken
            with mx.stream(self._stream if begun else mx.default_stream(mx.default_device())):
                rows = _gathered([(p[0].logits, p[2] - 1) for p in pieces])
                sampled = sample(rows, asked, stream=self._stream if begun else None)
            for at, i in enumerate(which):
                result.samples[i] = (sampled, at)
            (late if begun else fresh).append(sampled.tokens)
        return late

    # --- one step ahead ------------------------------------------------------------------------------------------

    def _look_ahead(
        self, going_on: list[int], chunks: Sequence[Chunk], all_lines: list[SequenceCache], result: MlxStepResult
    ) -> list[Any]:
        """Build the next decode step with the best tokens of this one, or those sampled from it, before anybody has seen them:
        that then costs no time. Returns what is to be computed. If something else is asked for, positions are set back and it is
        forgotten. A batch that has yet to form waits for the next step: its copies would keep this one's tokens from whoever waits."""
        lines = [all_lines[i] for i in going_on]
        if self.free() < len(lines) or any(line.replay for line in lines):
            return []
        if len(lines) > 1 and not self.batch.is_of(lines):
            return []
        chunk_of = {id(line): i for i, line in zip(going_on, lines, strict=True)}
        batch = self.batch if len(lines) > 1 else None
        lines = list(batch.lines) if batch is not None else lines
        order = [chunk_of[id(line)] for line in lines]
        self.hidden.clear()
        given = _gathered([self._chosen(result, i) for i in order])
        if batch is None:
            (line,) = lines
            line.alone()
            state = line.snapshot()
            logits = self.model(given[:, None], cache=line.caches)[:, -1]
            held = line.leaves
        else:
            state = batch.snapshot()
            batch.make_room(1)
            logits = self.model(given[:, None], cache=batch.caches)[:, -1]
            batch.moved([1] * len(lines))
            held = batch.leaves
        group = _Group(logits, mx.argmax(logits, axis=-1))
        asked = [chunks[i].sample for i in order]
        # A row whose sampling depends on this token is only computed; the next step brings how it is sampled.
        behind = [
            (row, following) for row, d in enumerate(asked) if d is not None and (following := d.next()) is not None
        ]
        begun: dict[int, tuple[DeviceSamples, int]] = {}
        what = [group.best] if None in asked else [] if len(behind) == len(asked) else [logits]
        if behind:
            rows = _gathered([(logits, row) for row, _ in behind])
            ahead = sample(rows, [d for _, d in behind], drawn=_gathered([(given, row) for row, _ in behind]))
            begun = {id(lines[row]): (ahead, at) for at, (row, _) in enumerate(behind)}
            what.append(ahead.tokens)
        self.ahead = _Ahead(lines, group, batch, state if self._layout.recurrent else [], begun, self._take_hidden())
        return [*what, *self.ahead.hidden, *(arrays_of(held) if self._layout.recurrent else ())]

    @staticmethod
    def _chosen(result: MlxStepResult, i: int) -> tuple[Any, int]:
        """The array, and the place in it, of the token that follows chunk `i`."""
        sampled, piece = result.samples[i], result.pieces[i]
        if sampled is not None:
            return sampled[0].readable, sampled[1]
        assert piece is not None
        return piece[0].best, piece[2] - 1

    def _take_ahead(self, chunks: Sequence[Chunk], lines: list[SequenceCache], result: MlxStepResult) -> set[int]:
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
            result.hidden[i] = [(rows, row, 0) for rows in ahead.hidden]
            begun, wanted = ahead.samples.get(id(lines[i])), chunks[i].sample
            if begun is not None and wanted == begun[0].asked[begun[1]]:
                result.samples[i] = begun
            if self._n_rewind:
                lines[i].undo = Undo(
                    lines[i].length, list(chunks[i].tokens), [[a[row : row + 1] for a in s] for s in ahead.state]
                )
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

    def recurrent_state(self, line: SequenceCache) -> list[list[Any]]:
        """The arrays behind all tokens of `line`, whatever was started for it unasked."""
        ahead = self.ahead if self.ahead is not None and any(x is line for x in self.ahead.lines) else None
        held = (line.batch or line).snapshot() if ahead is None else ahead.state
        if line.batch is None:
            return held
        row = line.batch.row_of(line)
        return [[a[row : row + 1] for a in arrays] for arrays in held]

    def lost(self, lines: Sequence[SequenceCache]) -> list[SequenceCache]:
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
            self.hidden.clear()

    def close(self) -> None:
        self.ahead = self.last = self.model = None
        self.batch = SequenceBatch(self._layout)

    @property
    def output_bytes(self) -> int:
        pieces = [] if self.last is None else self.last.pieces
        return sum(int(g.logits.nbytes) for g in {id(p[0]): p[0] for p in pieces if p is not None}.values())


def _gathered(parts: list[tuple[Any, int]]) -> Any:
    """One array of the (array, row) given; the array itself where that is what they are."""
    array, rows = parts[0][0], [row for _, row in parts]
    if any(a is not array for a, _ in parts):
        return mx.stack([a[row] for a, row in parts])
    return array if rows == list(range(int(array.shape[0]))) else array[mx.array(rows)]
