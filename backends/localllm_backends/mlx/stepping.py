"""One step over several sequences: a batch of those that decode, each prefill separately, and an
early start of the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import mlx.core as mx

from localllm_backends.contract import Chunk, SampleSpec
from localllm_backends.mlx.adapters import AdapterLayers
from localllm_backends.mlx.layout import Layout, arrays_of
from localllm_backends.mlx.results import ChunkOutput, HiddenRow, LogitRows, MlxStepResult, on_host
from localllm_backends.mlx.sampling import DeviceTokens, sample
from localllm_backends.mlx.sequence_cache import (
    SequenceBatch,
    SequenceCache,
    Undo,
    row_of_state,
)
from localllm_backends.mlx.shared_prefix import cells_used

# Longest chunk for which all logit rows are computed. A longer one is split, so that logits are
# computed only for the outputs. (mlx-lm computes a prompt's last token separately for the same
# reason.)
WHOLE_TOKENS = 16
# Limit for one model call: new tokens times all tokens they attend to, mlx-lm's 2,048 at a depth of
# 65,536. Larger chunks are computed in pieces. With a full score matrix the limit is a quarter of
# it. At a depth of 131,072, heads of 256 took 11 GB more in steps of 2,048 tokens than in steps of
# 512, and were no faster (github.com/ml-explore/mlx-lm/pull/1781).
SCORES_AT_ONCE = 2048 * 65_536
_PIECE = 64


@dataclass
class _Ahead:
    """The next decode step, started before it was requested.

    Its input for each of `seqs` is the best or the sampled token. `batch`: its buffers. `state`:
    the recurrent state before it. `hidden`: the model's hidden rows. `samples`: tokens sampled from
    it, with their rows.
    """

    seqs: list[SequenceCache]
    batch: SequenceBatch
    state: list[list[Any]]
    group: LogitRows
    hidden: list[Any]
    samples: dict[SequenceCache, tuple[DeviceTokens, int]] = field(default_factory=dict)


class Stepper:
    """Runs steps over `seqs` (the existing sequences, by id).

    It owns what persists between steps: the batch, and the step that was started early.
    """

    def __init__(
        self, adapted: AdapterLayers, layout: Layout, seqs: Mapping[int, SequenceCache], *,
        n_vocab: int, n_ctx: int, n_rewind: int, starts_steps_early: bool = True, fused: bool = True,
    ) -> None:  # fmt: skip
        self.model = adapted.model
        self._adapters = adapted
        self._layout = layout
        self._seqs = seqs
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx
        self._n_rewind = n_rewind
        self._starts_steps_early = starts_steps_early
        self._fused = fused
        # Tokens that must go into one call, since the tokens of an image may attend to each other.
        self.undivided = WHOLE_TOKENS
        self._stream = mx.new_stream(mx.default_device())
        self.batch = SequenceBatch(layout)
        self.ahead: _Ahead | None = None
        self.last: MlxStepResult | None = None
        # Hidden rows of the model calls since they were last taken, if draft heads tap them.
        self.hidden: list[Any] = []
        self.keeps_hidden = True

    def keep_hidden(self, parts: list[Any]) -> None:
        """Store the hidden rows of the running call, joined from these `parts` of them, unless the
        heads rest.

        Those of a decode step are computed with its logits, and joined only if heads read them.
        """
        if self.keeps_hidden:
            self.hidden.append(mx.concatenate(parts, axis=-1))

    def _take_hidden(self) -> list[Any]:
        taken = self.hidden
        self.hidden = []
        return taken

    def _forward(self, batch: SequenceBatch, ids: Any, counts: Sequence[int] = ()) -> Any:
        """Run the model over `ids` [rows, n] after the rows of `batch`, and return logits.

        `counts` tokens of each row are kept (empty: all).
        """
        n = int(ids.shape[1])
        batch.make_room(n)
        logits = self.model(ids, cache=batch.caches)
        batch.advance(counts or [n] * len(batch.seqs))
        return logits

    def free(self) -> int:
        return self._n_ctx - cells_used(self._seqs.values())

    def run(self, chunks: Sequence[Chunk], seqs: list[SequenceCache]) -> MlxStepResult:
        """Append every chunk to its sequence.

        After an exception no sequence is longer, but their contents are invalid.
        """
        parts = [ChunkOutput(chunk, seq) for chunk, seq in zip(chunks, seqs, strict=True)]
        self.hidden.clear()
        for seq in seqs:
            seq.scales = self._adapters.scales
        result = MlxStepResult(self._n_vocab, parts, self._stream)
        if not self._extend_ahead(result):
            self._take_ahead(parts)
        self._compute(result)
        late_arrays = self._sample(result)
        if result.fresh:
            # Compute this separately from the early step, so that it need not wait for that one.
            # `fresh` comes first, because the first array determines the stream of the evaluation.
            mx.async_eval(*result.fresh, *late_arrays)
            late_arrays = []
        for part in parts:
            part.seq.length += len(part.chunk.tokens)
        try:
            begun = self._look_ahead(parts)
            if begun or late_arrays:
                mx.async_eval(*begun, *late_arrays)
            places = [part.next for part in parts]
            mx.eval([place[0].tokens for place in places if place is not None], result.fresh)
        except Exception:
            for part in parts:
                part.seq.length -= len(part.chunk.tokens)
            raise
        for seq, place in zip(seqs, places, strict=True):
            seq.predicted = on_host(place)
        self.last = result
        return result

    def _compute(self, result: MlxStepResult) -> None:
        """Call the model with all chunks, except those whose outputs are already being computed."""
        rest = [part for part in result.parts if part.group is None]
        together = [part for part in rest if self._batchable(part)]
        if len(together) > 1 and len(rest) == len(result.parts):
            self._call(together, result)
            rest = [part for part in rest if part not in together]
        for part in rest:
            self._call([part], result)

    def _batchable(self, part: ChunkOutput) -> bool:
        """Return whether the chunk is from a decoding sequence: every token wants logits.

        With recurrent state, chunks must have one token, since the state would include padding.
        """
        chunk = part.chunk
        seq = part.seq
        n = len(part.chunk.tokens)
        if chunk.outputs < n or n > WHOLE_TOKENS or seq.replay or not seq.length:
            return False
        return n == 1 or not self._layout.recurrent

    def _call(self, parts: Sequence[ChunkOutput], result: MlxStepResult) -> None:
        """Compute the chunks of `parts`, or a single one of any kind, in one model call."""
        new_tokens = [[*part.seq.replay, *part.chunk.tokens] for part in parts]
        batch, order, ids = self.batch.gather([part.seq for part in parts], new_tokens)
        parts = [parts[i] for i in order]
        tokens = [new_tokens[i] for i in order]
        state = batch.snapshot() if self._n_rewind else []
        if len(parts) == 1:
            ids = self._read_before(ids, parts[0])
        longest = int(ids.shape[1])
        counts = [min(len(each), longest) for each in tokens]
        logits = self._forward(batch, ids, counts).reshape(-1, self._n_vocab)
        hidden = self._take_hidden()
        group = LogitRows(logits)
        result.fresh.extend(_read_apart(hidden, parts[0]))
        takes_best = False
        for row, part in enumerate(parts):
            seq = part.seq
            if self._n_rewind:
                seq.undo = Undo(seq.computed, tokens[row], row_of_state(state, row))
            seq.replay = []
            # A long chunk is computed in several calls, together with replayed tokens.
            known = _hidden_rows(hidden, row, len(tokens[row]))
            part.hidden = known[-len(part.chunk.tokens) :]
            if part.chunk.outputs:
                part.take(group, row * longest + counts[row])
                takes_best |= part.chunk.sample is None
        if takes_best:
            result.fresh.append(group.best.tokens)
        if self._layout.recurrent or parts[0].group is None:
            result.fresh.extend(arrays_of(batch.leaves))

    def _read_before(self, ids: Any, part: ChunkOutput) -> Any:
        """Compute the part of a single chunk `ids` that needs separate calls, and return the
        rest."""
        seq = part.seq
        outputs = min(part.chunk.outputs, len(part.chunk.tokens))
        if not outputs:
            return self._read(ids, seq)
        if outputs < int(ids.shape[1]) > self.undivided:
            self._forward(seq.batch, self._read(ids[:, :-outputs], seq))
            return ids[:, -outputs:]
        return ids

    def _read(self, ids: Any, seq: SequenceCache) -> Any:
        """Compute the first part of `ids` in pieces of limited size, and return the rest."""
        scores = SCORES_AT_ONCE if self._fused else SCORES_AT_ONCE // 4
        attended = seq.length + int(ids.shape[1])
        n_pieces = scores // attended // _PIECE
        piece_tokens = max(n_pieces * _PIECE, _PIECE, self.undivided)
        while int(ids.shape[1]) > piece_tokens:
            self._forward(seq.batch, ids[:, :piece_tokens])
            mx.eval(arrays_of(seq.leaves), self.hidden)
            ids = ids[:, piece_tokens:]
        return ids

    def _sample(self, result: MlxStepResult) -> list[Any]:
        """Start sampling the chunks' tokens that are not being computed yet.

        All rows of a group are sampled together. Arrays from logits of this step are added to
        `fresh`. The others are returned. They are sampled on a separate stream, which finishes
        before the next step although both start in the same call.
        """
        late_arrays: list[Any] = []
        for group, parts in _sampled_groups(result.parts):
            stream = mx.default_stream(mx.default_device())
            begun = result.fresh
            if group.started_early:
                stream = self._stream
                begun = late_arrays
            asked = [part.chunk.sample for part in parts if part.chunk.sample is not None]
            with mx.stream(stream):
                rows = _gathered([(group.logits, part.stop - 1) for part in parts])
                sampled = sample(rows, asked)
            for at, part in enumerate(parts):
                part.sampled = sampled, at
            begun.append(sampled.tokens)
        return late_arrays

    # --- the early step ---------------------------------------------------------------------------

    def _look_ahead(self, parts: Sequence[ChunkOutput]) -> list[Any]:
        """Build the next decode step from the best or sampled tokens, before the host has seen
        them.

        That hides the host's time. Returns the arrays to compute. If the engine then requests
        another step, positions are set back and this step is discarded. It is not started if its
        batch must still be formed: the copies would delay this step's tokens.
        """
        continuing = self._continuing(parts)
        seqs = [part.seq for part in continuing]
        if len(seqs) == 1:
            seqs[0].leave_batch()
        elif not seqs or not self.batch.contains_exactly(seqs):
            return []
        batch = seqs[0].batch
        continuing.sort(key=_row_of_seq)
        following = []
        for part in continuing:
            if part.next is not None:
                tokens, row = part.next
                following.append((tokens.tokens, row))
        # Any valid token if the device was unsure.
        drawn = mx.maximum(_gathered(following), 0)
        state = batch.snapshot() if self._layout.recurrent else []
        logits = self._forward(batch, drawn[:, None])[:, -1]
        group = LogitRows(logits, started_early=True)
        self.ahead = _Ahead([*batch.seqs], batch, state, group, self._take_hidden())
        arrays = self._sample_ahead(self.ahead, [part.chunk.sample for part in continuing], drawn)
        states = arrays_of(batch.leaves) if self._layout.recurrent else []
        return [*arrays, *states]

    def _continuing(self, parts: Sequence[ChunkOutput]) -> list[ChunkOutput]:
        """Return the chunks of sequences that keep decoding.

        Returns an empty list unless the next token of all of them is known.
        """
        if not self._starts_steps_early:
            return []
        continuing = []
        for part in parts:
            if not part.chunk.outputs:
                continue
            if part.known:
                continuing.append(part)
            elif len(part.chunk.tokens) == 1:
                return []
        if self.free() < len(continuing):
            return []
        return continuing

    @staticmethod
    def _sample_ahead(ahead: _Ahead, asked: Sequence[SampleSpec | None], given: Any) -> list[Any]:
        """Start sampling from the early step with the specs of the next one; returns arrays to
        compute.

        If the sampling of a row depends on its `given` token, only the logits are computed. The
        next step then brings the spec.
        """
        arrays = [ahead.group.best.tokens if None in asked else ahead.group.logits]
        specs: dict[int, SampleSpec] = {}
        for row, spec in enumerate(asked):
            following = spec.next() if spec is not None else None
            if following is not None:
                specs[row] = following
        if specs:
            rows = _gathered([(ahead.group.logits, row) for row in specs])
            drawn = _gathered([(given, row) for row in specs])
            sampled = sample(rows, list(specs.values()), drawn)
            ahead.samples = {ahead.seqs[row]: (sampled, at) for at, row in enumerate(specs)}
            arrays.append(sampled.tokens)
        return arrays

    def _take_ahead(self, parts: Sequence[ChunkOutput]) -> None:
        """Give the chunks the outputs of the early step. If it does not match the chunks, undo
        it."""
        ahead = self.ahead
        if ahead is None:
            return
        asked = {part.seq: part for part in parts if part.seq in ahead.seqs}
        fits = asked and all(part.is_expected for part in asked.values())
        if not fits or (self._layout.recurrent and len(asked) < len(ahead.seqs)):
            self.undo_ahead()
            return
        self.ahead = None
        for row, seq in enumerate(ahead.seqs):
            part = asked.get(seq)
            if part is None:
                seq.place(seq.computed)
                continue
            part.take(ahead.group, row + 1)
            part.hidden = _hidden_rows(ahead.hidden, row, 1)
            if self._n_rewind:
                seq.undo = Undo(seq.length, [*part.chunk.tokens], row_of_state(ahead.state, row))
            begun = ahead.samples.get(seq)
            if begun is not None:
                sampled, at = begun
                if part.chunk.sample == sampled.specs[at]:
                    part.sampled = begun

    def _extend_ahead(self, result: MlxStepResult) -> bool:
        """Compute drafts after the early step, which has computed the token before them.

        Returns False, without any change, unless the chunks are those of the early step and some have
        drafts.
        """
        ahead = self.ahead
        if ahead is None or not self._continues(ahead, result.parts):
            return False
        self.ahead = None
        asked = {part.seq: part for part in result.parts}
        parts = [asked[seq] for seq in ahead.seqs]
        drafts = [list(part.chunk.tokens[1:]) for part in parts]
        longest = max(map(len, drafts))
        ids = mx.array([[*draft, *[0] * (longest - len(draft))] for draft in drafts])
        further = self._forward(ahead.batch, ids, [len(draft) for draft in drafts])
        hidden = self._take_hidden()
        logits = mx.concatenate([ahead.group.logits[:, None], further], axis=1)
        group = LogitRows(logits.reshape(-1, self._n_vocab))
        result.fresh.append(group.best.tokens)
        for row, part in enumerate(parts):
            n_drafts = len(drafts[row])
            part.take(group, row * (1 + longest) + 1 + n_drafts)
            known = _hidden_rows(ahead.hidden, row, 1)
            part.hidden = known + _hidden_rows(hidden, row, n_drafts)
        return True

    def _continues(self, ahead: _Ahead, parts: Sequence[ChunkOutput]) -> bool:
        """Return whether the chunks are those of the early step, and some have drafts."""
        if self._layout.recurrent or {part.seq for part in parts} != set(ahead.seqs):
            return False
        longest = max(len(part.chunk.tokens) for part in parts)
        return 1 < longest <= WHOLE_TOKENS and all(part.extends_expected for part in parts)

    def use_adapters(self, scales: Sequence[float]) -> None:
        """Compute the next steps with these scales of the adapters."""
        if tuple(scales) == self._adapters.scales:
            return
        # The early step was computed with the other ones.
        self.undo_ahead()
        self._adapters.use(scales)

    def undo_ahead(self) -> None:
        """Set every sequence back to its length before the early step."""
        ahead = self.ahead
        if ahead is None:
            return
        self.ahead = None
        for seq in ahead.seqs:
            seq.place(seq.computed)
        if ahead.state:
            ahead.batch.restore(ahead.state)

    def undo_ahead_of(self, seq: SequenceCache) -> None:
        """Undo the early step for `seq`, if its memory could not be read otherwise."""
        if self.ahead is not None and self._layout.recurrent and seq in self.ahead.seqs:
            self.undo_ahead()

    def recurrent_state(self, seq: SequenceCache) -> list[list[Any]]:
        """Return the recurrent arrays after all tokens of `seq`, without the early step."""
        if self.ahead is not None and seq in self.ahead.seqs:
            return row_of_state(self.ahead.state, seq.row)
        return row_of_state(seq.batch.snapshot(), seq.row)

    def affected_by_failure(self, seqs: Sequence[SequenceCache]) -> list[SequenceCache]:
        """Return every sequence whose buffers a failed step over `seqs` may have changed.

        Discards the early step.
        """
        touched = set(seqs)
        if self.ahead is not None:
            touched.update(self.ahead.seqs)
            self.ahead = None
        return list(chain.from_iterable(seq.batch.seqs for seq in touched))

    def recompute(self, seq: SequenceCache) -> None:
        """Compute the tokens that must be read again after a rewind."""
        if seq.replay:
            tokens = seq.replay
            seq.replay = []
            with self._adapters.used(seq.scales):
                self._forward(seq.batch, mx.array([tokens]))
            mx.eval(arrays_of(seq.leaves))
            self.hidden.clear()

    def close(self) -> None:
        self.ahead = None
        self.last = None
        self.model = None
        self._adapters.close()
        self.batch = SequenceBatch(self._layout)

    @property
    def output_bytes(self) -> int:
        if self.last is None:
            return 0
        groups = {id(part.group): part.group for part in self.last.parts}
        return sum(int(group.logits.nbytes) for group in groups.values() if group is not None)


def _row_of_seq(part: ChunkOutput) -> int:
    return part.seq.row


def _sampled_groups(
    parts: Sequence[ChunkOutput],
) -> Iterable[tuple[LogitRows, list[ChunkOutput]]]:
    """Return the chunks whose token must still be sampled, grouped by their logits."""
    groups: dict[int, tuple[LogitRows, list[ChunkOutput]]] = {}
    for part in parts:
        group = part.group
        if part.chunk.sample is not None and group is not None and part.sampled is None:
            _, members = groups.setdefault(id(group), (group, []))
            members.append(part)
    return groups.values()


def _hidden_rows(arrays: Sequence[Any], row: int, n: int) -> list[HiddenRow]:
    """Return the hidden rows of at most the first `n` tokens in that row of each array."""
    known: list[HiddenRow] = []
    for array in arrays:
        known += [(array, row, at) for at in range(min(n, int(array.shape[1])))]
    return known


def _read_apart(hidden: list[Any], part: ChunkOutput) -> list[Any]:
    """Return those hidden rows that are not computed with the logits of `part`."""
    chunk = part.chunk
    if chunk.outputs and len(chunk.tokens) <= WHOLE_TOKENS:
        return []
    return hidden


def _gathered(parts: Sequence[tuple[Any, int]]) -> Any:
    """Return one array of these (array, row) pairs; the array itself if they are all of its
    rows."""
    array = parts[0][0]
    rows = [row for _, row in parts]
    if any(a is not array for a, _ in parts):
        return mx.stack([a[row] for a, row in parts])
    if rows == list(range(int(array.shape[0]))):
        return array
    return array[mx.array(rows)]
