"""One step over several lines: a batch of those that decode, each prefill by itself, and the next
step begun early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

import mlx.core as mx

from localllm_backends.contract import Chunk, SampleSpec
from localllm_backends.mlx.results import HiddenRow, LogitRows, MlxStepResult
from localllm_backends.mlx.sampling import DeviceSamples, sample
from localllm_backends.mlx.sequence_cache import (
    Layout,
    SequenceBatch,
    SequenceCache,
    Undo,
    arrays_of,
    row_of_state,
)

# A chunk up to this long computes all its rows of logits; a longer one is cut, so that the
# vocabulary is multiplied only where logits are wanted (mlx-lm computes a prompt's last token by
# itself for the same reason).
WHOLE_TOKENS = 16
# New tokens times all tokens that one call of the model attends with, mlx-lm's 2,048 at a depth of
# 65,536: beyond that a chunk is computed in pieces. Where every score is held, a quarter of it:
# heads of 256 took 11 GB more in steps of 2,048 than of 512 at a depth of 131,072, and were no
# faster (github.com/ml-explore/mlx-lm/pull/1781).
SCORES_AT_ONCE = 2048 * 65_536
_PIECE = 64


@dataclass
class _Ahead:
    """The next decode step, started before anybody asked for it, with the best token of each of
    `lines` or the one sampled for it; the `batch` it was made in, the recurrent state before it,
    and what the model knew. `samples`: what was sampled from it."""

    lines: list[SequenceCache]
    batch: SequenceBatch
    state: list[list[Any]]
    group: LogitRows
    hidden: list[Any]
    samples: dict[SequenceCache, tuple[DeviceSamples, int]] = field(default_factory=dict)


class Stepper:
    """Runs steps over `lines` (those alive, by id) and owns what outlives one: the batch, and the
    step begun early."""

    def __init__(
        self, model: Any, layout: Layout, lines: Mapping[int, SequenceCache], *,
        n_vocab: int, n_ctx: int, n_rewind: int, looks_ahead: bool = True, fused: bool = True,
    ) -> None:  # fmt: skip
        self.model = model
        self._layout, self._lines = layout, lines
        self._n_vocab, self._n_ctx, self._n_rewind = n_vocab, n_ctx, n_rewind
        self._looks_ahead, self._fused = looks_ahead, fused
        # Tokens that go into one call whatever else holds: those of an image may see each other.
        self.undivided = WHOLE_TOKENS
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

    def _forward(self, batch: SequenceBatch, ids: Any, counts: Sequence[int] | None = None) -> Any:
        """Logits of the model over `ids` [rows, n] behind the rows of `batch`, of which `counts`
        stay (None: all)."""
        n = int(ids.shape[1])
        batch.make_room(n)
        logits = self.model(ids, cache=batch.caches)
        batch.advance(counts or [n] * len(batch.lines))
        return logits

    def free(self) -> int:
        return self._n_ctx - sum(line.length for line in self._lines.values())

    def run(self, chunks: Sequence[Chunk], lines: list[SequenceCache]) -> MlxStepResult:
        """Append every chunk to its line; on any exception no line is longer, but what they hold
        can't be trusted."""
        # Whose next token is known here, sampled or by the engine's habit of taking the best one,
        # can go on unasked.
        followed = [
            line.follows_best and c.tokens[0] == line.predicted
            for c, line in zip(chunks, lines, strict=True)
        ]
        self.hidden.clear()
        result = MlxStepResult(self._n_vocab, chunks, lines, self._stream)
        taken = self._take_ahead(result)
        self._compute(result, taken)
        late = self._sample(result, taken)
        if result.fresh:
            # Apart from what is begun unasked, so that nobody waits for that. First what decides on
            # the stream of the whole.
            mx.async_eval(*result.fresh, *late)
            late = []
        for chunk, line in zip(chunks, lines, strict=True):
            line.length += len(chunk.tokens)
        try:
            begun = self._look_ahead(result, self._continuing(result, followed))
            if begun or late:
                mx.async_eval(*begun, *late)
            mx.eval(result.chosen(), result.fresh)
        except Exception:
            for chunk, line in zip(chunks, lines, strict=True):
                line.length -= len(chunk.tokens)
            raise
        for i, line in enumerate(lines):
            line.predicted = result.next_token(i)
        self.last = result
        return result

    def _compute(self, result: MlxStepResult, taken: set[int]) -> None:
        """Call the model with all chunks but those `taken`, whose outputs are under way."""
        rest = [i for i in range(len(result.chunks)) if i not in taken]
        together = (
            [i for i in rest if self._batchable(result.chunks[i], result.lines[i])]
            if not taken
            else []
        )
        if len(together) > 1:
            self._call_batch(together, result)
            rest = [i for i in rest if i not in together]
        for i in rest:
            self._call_line(i, result)

    def _batchable(self, chunk: Chunk, line: SequenceCache) -> bool:
        """A decoding line: every token wants logits. Recurrent state would also read the padding of
        uneven chunks."""
        n = len(chunk.tokens)
        if chunk.outputs < n or n > WHOLE_TOKENS or line.replay or not line.length:
            return False
        return n == 1 or not self._layout.recurrent

    def _call_batch(self, which: list[int], result: MlxStepResult) -> None:
        """All chunks of these numbers in one call of the model."""
        batch = self.batch
        order, ids = batch.gather(
            [result.lines[i] for i in which], [result.chunks[i].tokens for i in which]
        )
        rows = [which[at] for at in order]
        state = batch.snapshot() if self._layout.recurrent else []
        counts = [len(result.chunks[i].tokens) for i in rows]
        logits, hidden = self._forward(batch, ids, counts), self._take_hidden()
        result.fresh.extend(hidden)
        flat = logits.reshape(-1, self._n_vocab)
        group = LogitRows(flat, mx.argmax(flat, axis=-1))
        longest = int(ids.shape[1])
        for row, i in enumerate(rows):
            tokens = result.chunks[i].tokens
            self._remember(result.lines[i], tokens, state, row)
            result.pieces[i] = (group, row * longest, row * longest + len(tokens))
            result.hidden[i] = _hidden_rows(hidden, row, len(tokens))
        if any(result.chunks[i].sample is None for i in which):
            result.fresh.append(group.best)
        if self._layout.recurrent:
            result.fresh.extend(arrays_of(batch.leaves))

    def _remember(
        self, line: SequenceCache, tokens: Sequence[int], state: list[list[Any]], row: int
    ) -> None:
        """Row `row` of `state` is what was before `tokens`, which may be taken back."""
        if self._n_rewind:
            line.undo = Undo(line.length, list(tokens), row_of_state(state, row))

    def _call_line(self, i: int, result: MlxStepResult) -> None:
        """Chunk number `i` in a call of its own."""
        chunk, line = result.chunks[i], result.lines[i]
        line.leave_batch()
        tokens = [*line.replay, *chunk.tokens]
        if self._n_rewind:
            line.undo = Undo(line.computed, tokens, line.batch.snapshot())
        line.replay = []
        outputs = min(chunk.outputs, len(chunk.tokens))
        ids = mx.array([tokens])
        if outputs and outputs < len(tokens) > self.undivided:
            self._forward(line.batch, self._read(ids[:, :-outputs], line))
            ids = ids[:, -outputs:]
        elif not outputs:
            ids = self._read(ids, line)
        logits = self._forward(line.batch, ids)
        if outputs:
            rows = logits[0, -outputs:]
            group = LogitRows(rows, mx.argmax(rows, axis=-1))
            result.pieces[i] = (group, 0, outputs)
            if chunk.sample is None:
                result.fresh.append(group.best)
        if not outputs or self._layout.recurrent:
            result.fresh.extend(arrays_of(line.leaves))
        hidden = self._take_hidden()
        result.fresh.extend(hidden)
        # A long chunk is computed in several calls, and with what is read again.
        known = list(
            chain.from_iterable(_hidden_rows([rows], 0, int(rows.shape[1])) for rows in hidden)
        )
        result.hidden[i] = known[-len(chunk.tokens) :]

    def _read(self, ids: Any, line: SequenceCache) -> Any:
        """Compute as much of `ids` behind `line` as takes calls of its own, piece by piece; returns
        the rest."""
        scores = SCORES_AT_ONCE if self._fused else SCORES_AT_ONCE // 4
        least = max(_PIECE, self.undivided)
        most = max(least, scores // (line.length + int(ids.shape[1])) // _PIECE * _PIECE)
        while int(ids.shape[1]) > most:
            self._forward(line.batch, ids[:, :most])
            mx.eval(arrays_of(line.leaves), self.hidden)
            ids = ids[:, most:]
        return ids

    def _sample(self, result: MlxStepResult, taken: set[int]) -> list[Any]:
        """Begin sampling what the chunks ask for and is not under way: all rows of one group
        together. What comes from logits of this step is `fresh` with them. The rest is returned: it
        is sampled on a stream of its own, which is done before the next step is, though that is
        begun in the same call."""
        groups: dict[int, list[tuple[int, tuple[Any, int], SampleSpec]]] = {}
        for i, (chunk, piece) in enumerate(zip(result.chunks, result.pieces, strict=True)):
            if chunk.sample is not None and piece is not None and result.samples[i] is None:
                wanted = (i, (piece[0].logits, piece[2] - 1), chunk.sample)
                groups.setdefault(id(piece[0]), []).append(wanted)
        late: list[Any] = []
        for group in groups.values():
            which, places, asked = zip(*group, strict=True)
            begun = which[0] in taken
            with mx.stream(self._stream if begun else mx.default_stream(mx.default_device())):
                sampled = sample(_gathered(places), asked, stream=self._stream if begun else None)
            for at, i in enumerate(which):
                result.samples[i] = (sampled, at)
            (late if begun else result.fresh).append(sampled.tokens)
        return late

    # --- one step ahead ---------------------------------------------------------------------------

    def _continuing(self, result: MlxStepResult, followed: Sequence[bool]) -> list[int]:
        """The chunks whose lines decode on, where what follows all of them is known; none where it
        isn't."""
        known = []
        for chunk, sampled, follows in zip(result.chunks, result.samples, followed, strict=True):
            takes_best = follows and len(chunk.tokens) == 1 and chunk.sample is None
            known.append(sampled is not None or takes_best)
        which = [
            i for i, c in enumerate(result.chunks) if c.outputs and (len(c.tokens) == 1 or known[i])
        ]
        return which if self._looks_ahead and all(known[i] for i in which) else []

    def _look_ahead(self, result: MlxStepResult, which: list[int]) -> list[Any]:
        """Build the next decode step with the best tokens of this one, or those sampled from it,
        before anybody has seen them: that then costs no time. Returns what is to be computed. If
        something else is asked for, positions are set back and it is forgotten. A batch that has
        yet to form waits for the next step: its copies would keep this one's tokens from whoever
        waits."""
        lines = [result.lines[i] for i in which]
        if not lines or self.free() < len(lines) or any(line.replay for line in lines):
            return []
        if len(lines) > 1:
            if not self.batch.is_of(lines):
                return []
            chunk_of = dict(zip(lines, which, strict=True))
            lines = list(self.batch.lines)
            which = [chunk_of[line] for line in lines]
        given = _gathered([self._chosen(result, i) for i in which])
        self.ahead = self._call_ahead(lines, given)
        arrays = self._sample_ahead(self.ahead, [result.chunks[i].sample for i in which], given)
        held = arrays_of(self.ahead.batch.leaves) if self._layout.recurrent else []
        return [*arrays, *self.ahead.hidden, *held]

    def _call_ahead(self, lines: list[SequenceCache], given: Any) -> _Ahead:
        """The model over one more token of each of `lines`, the rows of the batch or the only
        one."""
        if len(lines) == 1:
            lines[0].leave_batch()
        batch = lines[0].batch
        state = batch.snapshot() if self._layout.recurrent else []
        logits = self._forward(batch, given[:, None])[:, -1]
        group = LogitRows(logits, mx.argmax(logits, axis=-1))
        return _Ahead(lines, batch, state, group, self._take_hidden())

    @staticmethod
    def _sample_ahead(ahead: _Ahead, asked: Sequence[SampleSpec | None], given: Any) -> list[Any]:
        """Begin sampling from the step ahead as the next one will ask; what is to be computed of
        its rows. A row whose sampling depends on the token `given` is only computed; the next step
        brings how it is sampled."""
        following = [None if spec is None else spec.next() for spec in asked]
        specs = {row: spec for row, spec in enumerate(following) if spec is not None}
        arrays: list[Any] = []
        if None in asked:
            arrays.append(ahead.group.best)
        elif len(specs) < len(asked):
            arrays.append(ahead.group.logits)
        if specs:
            rows = _gathered([(ahead.group.logits, row) for row in specs])
            sampled = sample(
                rows, list(specs.values()), drawn=_gathered([(given, row) for row in specs])
            )
            ahead.samples = {ahead.lines[row]: (sampled, at) for at, row in enumerate(specs)}
            arrays.append(sampled.tokens)
        return arrays

    @staticmethod
    def _chosen(result: MlxStepResult, i: int) -> tuple[Any, int]:
        """The array, and the place in it, of the token that follows chunk `i`."""
        sampled, piece = result.samples[i], result.pieces[i]
        if sampled is not None:
            return sampled[0].readable, sampled[1]
        assert piece is not None
        return piece[0].best, piece[2] - 1

    def _take_ahead(self, result: MlxStepResult) -> set[int]:
        """The chunks whose outputs are already under way; whatever else was started is set back."""
        ahead = self.ahead
        if ahead is None:
            return set()
        rows = {line: row for row, line in enumerate(ahead.lines)}
        asked = {i: rows[line] for i, line in enumerate(result.lines) if line in rows}
        fits = bool(asked) and all(
            self._is_expected(result.chunks[i], result.lines[i]) for i in asked
        )
        if not fits or (self._layout.recurrent and len(asked) < len(ahead.lines)):
            self.undo_ahead()
            return set()
        self.ahead = None
        for i, row in asked.items():
            chunk, line = result.chunks[i], result.lines[i]
            result.pieces[i] = (ahead.group, row, row + 1)
            result.hidden[i] = _hidden_rows(ahead.hidden, row, 1)
            begun = ahead.samples.get(line)
            if begun is not None and chunk.sample == begun[0].asked[begun[1]]:
                result.samples[i] = begun
            self._remember(line, chunk.tokens, ahead.state, row)
        self._set_back(line for line in ahead.lines if line not in result.lines)
        return set(asked)

    @staticmethod
    def _is_expected(chunk: Chunk, line: SequenceCache) -> bool:
        """Is it the token that the step ahead was begun with?"""
        return len(chunk.tokens) == 1 and bool(chunk.outputs) and chunk.tokens[0] == line.predicted

    def _set_back(self, lines: Iterable[SequenceCache]) -> None:
        """Those of `lines` that are still alive stand where they stood before they were stepped
        unasked."""
        for line in lines:
            if line.id in self._lines:
                line.place(line.computed)

    def undo_ahead(self) -> None:
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            self._set_back(ahead.lines)
            if ahead.state:
                ahead.batch.restore(ahead.state)

    def undo_ahead_of(self, line: SequenceCache) -> None:
        """Set back what was started for `line` unasked, where its memory could not be read
        otherwise."""
        if self.ahead is not None and self._layout.recurrent and line in self.ahead.lines:
            self.undo_ahead()

    def recurrent_state(self, line: SequenceCache) -> list[list[Any]]:
        """The arrays behind all tokens of `line`, whatever was started for it unasked."""
        begun = self.ahead is not None and line in self.ahead.lines
        held = self.ahead.state if self.ahead is not None and begun else line.batch.snapshot()
        return row_of_state(held, line.row)

    def touched_by_failure(self, lines: Sequence[SequenceCache]) -> list[SequenceCache]:
        """A step over `lines` failed: every line whose buffers it may have touched. Forgets what
        was begun."""
        ahead, self.ahead = self.ahead, None
        touched = {*lines, *(ahead.lines if ahead else ())}
        return list(chain.from_iterable(line.batch.lines for line in touched))

    def forget_dropped(self) -> None:
        """A line was dropped: what was begun for others stays begun, unless nobody is left."""
        if self.ahead is not None and not any(x.id in self._lines for x in self.ahead.lines):
            self.ahead = None
        if not self._lines:
            self.last = None

    def recompute(self, line: SequenceCache) -> None:
        """Compute what a rewind left to be read again."""
        if line.replay:
            tokens, line.replay = line.replay, []
            self._forward(line.batch, mx.array([tokens]))
            mx.eval(arrays_of(line.leaves))
            self.hidden.clear()

    def close(self) -> None:
        self.ahead = self.last = self.model = None
        self.batch = SequenceBatch(self._layout)

    @property
    def output_bytes(self) -> int:
        pieces = [] if self.last is None else self.last.pieces
        groups = {id(p[0]): p[0] for p in pieces if p is not None}
        return sum(int(group.logits.nbytes) for group in groups.values())


def _hidden_rows(arrays: Sequence[Any], row: int, n: int) -> list[HiddenRow]:
    """Of the first `n` tokens in that row of each array."""
    return list(product(arrays, [row], range(n)))


def _gathered(parts: Sequence[tuple[Any, int]]) -> Any:
    """One array of the (array, row) given; the array itself where that is what they are."""
    array, rows = parts[0][0], [row for _, row in parts]
    if any(a is not array for a, _ in parts):
        return mx.stack([a[row] for a, row in parts])
    return array if rows == list(range(int(array.shape[0]))) else array[mx.array(rows)]
