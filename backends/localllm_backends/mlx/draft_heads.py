"""Draft heads on MLX: their memory for each sequence (`HeadMemory`), and heads that draft token by
token (`LockstepHeads`).

The heads are a model's own (mtp.py) or come from a separate folder (eagle3.py, dflash.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import mlx.core as mx
import numpy as np

from localllm_backends.contract import SequenceId
from localllm_backends.draft_head_state import (
    CANDIDATES,
    MIN_PROBABILITY,
    StatefulDraftHeads,
)
from localllm_backends.mlx.kv_export import KvExport
from localllm_backends.mlx.kv_format import KvFormat
from localllm_backends.mlx.layout import Layout, arrays_of
from localllm_backends.mlx.results import HiddenRow
from localllm_backends.mlx.sequence_cache import SequenceBatch, SequenceCache
from localllm_backends.mlx.shapes import Shapes
from localllm_backends.mlx.stepping import WHOLE_TOKENS, Stepper


class DraftModule(Protocol):
    """The weights of draft heads.

    `kind`: see `Capabilities.draft_kind`. `mark`: identity of the heads for stored KV.
    `first`: first position that they read. `longest`: longest draft, in tokens. `width`: numbers in
    the model's row of a token. `caches`: an mlx-lm cache for each layer. `arrays`: the weights,
    without those that belong to the model. `free_rewind`: drafts may be as long as on a model that
    can take back any token.
    """

    kind: ClassVar[str]
    first: ClassVar[int]
    free_rewind: ClassVar[bool]
    mark: str
    longest: int
    width: int

    @property
    def caches(self) -> list[Any]: ...

    @property
    def arrays(self) -> list[Any]: ...

    def tap(self, callback: Callable[[list[Any]], None]) -> None:
        """Pass the model's rows of every call to `callback`: arrays [sequences, n, …] that have
        `width` numbers together."""

    def __call__(self, tokens: Any, rows: Any, caches: Sequence[Any]) -> Any:
        """Read `tokens` [sequences, n], given the model's rows before them; return hidden rows."""

    def open(self, stepper: Stepper, identity: str, n_batch: int) -> HeadMemory: ...


def shapes(module: DraftModule) -> Shapes:
    """Return the shapes of the heads' memory, without computing: keys and values of every token."""
    rows = mx.zeros((1, 2, module.width))

    def call(ids: Any, cache: Any) -> Any:
        return module(ids, rows, cache)

    return Shapes.of(call, Layout(module.caches, KvFormat(), 0))


class HeadMemory(StatefulDraftHeads[HiddenRow]):
    """The heads' KV for each sequence. It is read, cut, copied and exported with the model's."""

    def __init__(
        self, module: DraftModule, stepper: Stepper, identity: str, *, n_batch: int
    ) -> None:
        super().__init__(n_batch)
        self._stepper = stepper
        self.rest(False)
        module.tap(stepper.keep_hidden)
        kv_shapes = shapes(module)
        self.kind = module.kind  # type: ignore[misc]
        self.first = module.first  # type: ignore[misc]
        self.longest = module.longest
        self._module: Any = module
        self._layout = kv_shapes.layout
        # The heads' KV of each sequence.
        self.caches: dict[SequenceId, SequenceCache] = {}
        self._batch = SequenceBatch(self._layout)
        self._zeros = mx.zeros((1, 1, module.width))
        self._exports = KvExport(f"{identity} heads", kv_shapes, stepper, separate_states=False)

    def rest(self, resting: bool) -> None:
        super().rest(resting)
        self._stepper.keeps_hidden = not resting

    def open(self, sequence: SequenceId) -> None:
        super().open(sequence)
        self.caches[sequence] = SequenceCache(sequence, self._layout)
        self._restart(sequence, 0)

    def close(self, sequence: SequenceId) -> None:
        super().close(sequence)
        del self.caches[sequence]

    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        sequences = [sequence for sequence, _, _ in wanted]
        self.catch_up(sequences)
        try:
            self._guess(wanted, drafts)
        except Exception:
            for sequence in sequences:
                self._restart(sequence, self._states[sequence].read)
        self.forget_drafts(sequences)
        return drafts

    def _guess(
        self, wanted: Sequence[tuple[SequenceId, int, int]], drafts: list[list[int]]
    ) -> None:
        """Append likely tokens to `drafts` until all of them have stopped."""
        raise NotImplementedError

    def _newest_rows(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[HiddenRow]]:
        """Return the model's row before the newest token of each sequence."""
        return [[self._states[sequence].rows[-1]] for sequence, _, _ in wanted]

    # --- reading ----------------------------------------------------------------------------------

    def together(self, seqs: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> bool:
        """Return whether these sequences can read these tokens in one call.

        They can if each has a past and few new tokens.
        """
        short_enough = [
            seq.start_of(0) < seq.length and len(new) <= WHOLE_TOKENS
            for seq, new in zip(seqs, tokens, strict=True)
        ]
        return len(seqs) == 1 or all(short_enough)

    def _call(
        self,
        seqs: Sequence[SequenceCache],
        tokens: Sequence[list[int]],
        rows: Sequence[list[HiddenRow]],
    ) -> list[list[HiddenRow]]:
        """Run the heads over these tokens of each sequence; returns hidden rows, not computed
        yet."""
        if not self.together(seqs, tokens):
            separate_states: list[list[HiddenRow]] = []
            for seq, new, seq_rows in zip(seqs, tokens, rows, strict=True):
                separate_states += self._call([seq], [new], [seq_rows])
            return separate_states
        batch, order, ids = self._batch.gather(seqs, tokens)
        batch.make_room(int(ids.shape[1]))
        hidden = self._module(ids, joined([rows[i] for i in order]), batch.caches)
        batch.advance([len(tokens[i]) for i in order])
        for seq, new in zip(seqs, tokens, strict=True):
            seq.length += len(new)
        own_rows: list[list[HiddenRow]] = []
        for i, new in enumerate(tokens):
            own_rows.append([(hidden, order.index(i), at) for at in range(len(new))])
        return own_rows

    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        tokens: dict[SequenceId, list[int]] = {}
        rows: dict[SequenceId, list[HiddenRow]] = {}
        for sequence, i in places:
            state = self._states[sequence]
            tokens.setdefault(sequence, []).append(state.unread[i])
            rows.setdefault(sequence, []).append(state.rows[i])
        seqs = [self.caches[sequence] for sequence in tokens]
        try:
            self._call(seqs, list(tokens.values()), list(rows.values()))
            mx.async_eval([arrays_of(seq.leaves) for seq in seqs])
        except Exception:
            return False
        return True

    # --- the heads' memory ------------------------------------------------------------------------

    def _cut(self, sequence: SequenceId, n_tokens: int) -> None:
        seq = self.caches[sequence]
        if n_tokens <= seq.start_of(0):
            self._restart(sequence, n_tokens)
        else:
            seq.length = n_tokens
            seq.place(n_tokens)

    def _restart(self, sequence: SequenceId, n_tokens: int) -> None:
        self.caches[sequence].clear(max(n_tokens, self.first))

    def _copy(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        seq = self.caches[source]
        if n_tokens <= seq.start_of(0):
            self._restart(target, n_tokens)
        else:
            seq.fork_into(self.caches[target], n_tokens)

    def _zero_row(self) -> HiddenRow:
        return self._zeros, 0, 0

    def _detached(self, row: HiddenRow) -> HiddenRow:
        row_copy = mx.contiguous(stacked([row])[None])
        mx.async_eval(row_copy)
        return row_copy, 0, 0

    # --- export and import ------------------------------------------------------------------------

    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """Return the heads' KV of tokens [start, stop); empty if they have not read all of them."""
        self.catch_up([sequence])
        seq = self.caches[sequence]
        begin = max(start, self.first)
        if seq.start_of(0) > begin or begin >= stop:
            return b""
        return self._exports.export_range(seq, begin, stop)

    def import_range(self, sequence: SequenceId, data: memoryview, start: int, stop: int) -> None:
        """Append tokens [start, stop) from the data of `export_range`."""
        self.catch_up([sequence])
        begin = max(start, self.first)
        with self._importing(sequence, stop):
            if begin < stop:
                self._exports.import_range(self.caches[sequence], data, begin, stop)


class LockstepHeads(HeadMemory):
    """Heads that draft one token after another, each from the hidden row of the previous one.

    All sequences draft in lockstep.
    """

    def _guess(
        self, wanted: Sequence[tuple[SequenceId, int, int]], drafts: list[list[int]]
    ) -> None:
        caches = [self.caches[sequence] for sequence, _, _ in wanted]
        rows = self._newest_rows(wanted)
        tokens = [[newest] for _, newest, _ in wanted]
        limits = [min(most, self.longest) for _, _, most in wanted]
        for step in range(max(limits, default=0)):
            rows = self._call(caches, tokens, rows)
            guesses = self._best(joined(rows))
            # Sequences that have stopped stay in the batch, because leaving it costs more.
            tokens = [[token] for token, _ in guesses]
            for draft, limit, (token, probability) in zip(drafts, limits, guesses, strict=True):
                if step == len(draft) < limit and probability >= MIN_PROBABILITY:
                    draft.append(token)
            if all(len(draft) <= step for draft in drafts):
                return

    def _best(self, hidden: Any) -> list[tuple[int, float]]:
        """Return for each row [sequences, 1, width] the best token and its probability among the
        ten best."""
        logits = self._module.logits(hidden)[:, -1]
        best = self._module.token_ids(mx.argmax(logits, axis=-1))
        share = share_of_best(logits)
        mx.eval(best, share)
        tokens = np.array(best).tolist()
        return list(zip(tokens, np.array(share).tolist(), strict=True))


def share_of_best(logits: Any, candidates: int = CANDIDATES) -> Any:
    """Return the probability of the best token among so many `candidates`: [...] for [..., n]."""
    values = logits.astype(mx.float32)
    top = mx.topk(values, min(candidates, int(values.shape[-1])), axis=-1)
    difference = top - top.max(axis=-1, keepdims=True)
    return 1 / mx.exp(difference).sum(axis=-1)


def joined(rows: Sequence[Sequence[HiddenRow]]) -> Any:
    """Return these rows of each sequence as one array [sequences, longest, width], padded with
    zeros.

    If the sequences decoded together, the arrays of their steps are joined as they are.
    """
    first = rows[0]
    if all(_same_steps(first, seq_rows) for seq_rows in rows):
        parts = []
        for array, _, begin, end in _runs(first):
            whole = end - begin == int(array.shape[1])
            parts.append(array if whole else array[:, begin:end])
        every = _concatenated(parts, axis=1)
        places = [seq_rows[0][1] for seq_rows in rows]
        if places == list(range(int(every.shape[0]))):
            return every
        return every[mx.array(places)]
    longest = max(len(seq_rows) for seq_rows in rows)
    padded = []
    for seq_rows in rows:
        padded.append(mx.pad(stacked(seq_rows), [(0, longest - len(seq_rows)), (0, 0)]))
    return mx.stack(padded)


def _same_steps(first: Sequence[HiddenRow], seq_rows: Sequence[HiddenRow]) -> bool:
    """Return whether `seq_rows` has the arrays and tokens of `first`, and one place in all of them."""
    if len(first) != len(seq_rows):
        return False
    n_rows = int(first[0][0].shape[0])
    place = seq_rows[0][1]
    for (array, _, at), (own_array, row, own_at) in zip(first, seq_rows, strict=True):
        if own_array is not array or own_at != at or row != place:
            return False
        if int(array.shape[0]) != n_rows:
            return False
    return True


def stacked(rows: Sequence[HiddenRow]) -> Any:
    """Return these rows as one array [n, width]."""
    return _concatenated([array[row, begin:end] for array, row, begin, end in _runs(rows)], axis=0)


def _runs(rows: Sequence[HiddenRow]) -> list[tuple[Any, int, int, int]]:
    """Return (array, row, begin, end) for each run of adjacent rows."""
    runs: list[tuple[Any, int, int, int]] = []
    for array, row, at in rows:
        if runs:
            last, its_row, begin, end = runs[-1]
            if last is array and (its_row, end) == (row, at):
                runs[-1] = (array, row, begin, at + 1)
                continue
        runs.append((array, row, at, at + 1))
    return runs


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    last = parts[-1]
    if len(parts) == 1:
        return last
    return mx.concatenate([part.astype(last.dtype) for part in parts], axis=axis)
