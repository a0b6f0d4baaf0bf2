"""What a request changes of the logits, whatever they are: logit bias, then penalties on tokens that came before, then DRY.

How often each token came is counted as tokens come and go out of the window: what a token costs does not grow with
the window.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Sampling
from localllm.engine.sampling.dry import Recent, TokenBytes, penalty, repetitions
from localllm.engine.sampling.row import Row

# So many tokens are counted quicker together than one by one.
_AT_ONCE = 64


class Tallies:
    """How often each token stands among the last `window` of one growing line (< 0: in all of it)."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen = 0
        self._at: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        # By token: as long as the greatest that came needs, and never longer than a vocabulary.
        self.of = np.zeros(0, dtype=np.int32)

    def follow(self, line: Seq[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Ids and their counts in the window at the end of `line`, which goes on from that of the last call."""
        ids = self.read(line)
        return ids, self.of[ids]

    def read(self, line: Seq[int], n_vocab: int = 0) -> NDArray[np.int64]:
        """The ids alone, in no order; `of` has their counts by token, for `n_vocab` of them."""
        if len(self.of) < n_vocab:
            self._widen(n_vocab)
        first = self._first(len(line))
        for token in line[self._first(self._seen) : min(first, self._seen)]:
            if token >= 0:
                self._take(token)
        new = line[max(first, self._seen) :]
        if self._at or len(new) < _AT_ONCE:
            for token in new:
                if token >= 0:
                    self._add(token)
        else:
            ids = np.asarray(new, dtype=np.int64)
            # Below zero are images.
            found, counts = np.unique(ids[ids >= 0], return_counts=True)
            self._widen(int(found[-1]) + 1 if len(found) else 0)
            if len(found):
                self._ids, self.of[found] = found, counts
            self._at = {token: at for at, token in enumerate(found.tolist())}
        self._seen = len(line)
        return self._ids[: len(self._at)]

    def _first(self, length: int) -> int:
        return 0 if self._window < 0 else max(0, length - self._window)

    def _widen(self, n_vocab: int) -> None:
        if n_vocab > len(self.of):
            self.of = np.concatenate([self.of, np.zeros(n_vocab - len(self.of), dtype=np.int32)])

    def _add(self, token: int) -> None:
        if token not in self._at:
            n = self._at[token] = len(self._at)
            if n == len(self._ids):
                self._ids = np.concatenate([self._ids, self._ids])
            self._ids[n] = token
            self._widen(token + 1)
        self.of[token] += 1

    def _take(self, token: int) -> None:
        self.of[token] -= 1
        if self.of[token]:
            return
        # The last one moves into its place.
        at = self._at.pop(token)
        last = len(self._at)
        if at != last:
            self._ids[at] = self._ids[last]
            self._at[int(self._ids[at])] = at


def counted(sampling: Sampling) -> bool:
    """True where the tokens that came before change the logits."""
    return sampling.repeat_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)


def penalised(values: Row, counts: NDArray[np.int32], sampling: Sampling) -> Row:
    """Logits of tokens that came `counts` (> 0) times, after the repeat, presence and frequency penalties.

    repeat_penalty divides positive logits and multiplies negative ones (llama.cpp, after CTRL: arXiv 1909.05858); presence
    and frequency subtract as OpenAI documents them.
    """
    if sampling.repeat_penalty != 1.0:
        # The lesser of both is the one meant, or below 1 the greater, with nothing to guess for the processor.
        lower = np.minimum if sampling.repeat_penalty > 1.0 else np.maximum
        values = lower(values / sampling.repeat_penalty, values * sampling.repeat_penalty)
    if sampling.presence_penalty:
        values = values - sampling.presence_penalty
    if sampling.frequency_penalty:
        values = values - (counts * sampling.frequency_penalty).astype(np.float32)
    return values


class Penalties:
    """One request's bias, penalties and DRY, along one growing line of tokens. `text` spells a token (None: no DRY)."""

    def __init__(self, sampling: Sampling, text: TokenBytes | None) -> None:
        self._sampling = sampling
        self._tallies, self._recent = Tallies(sampling.repeat_last_n), Recent()
        self._biased = np.array(list(sampling.logit_bias), dtype=np.int64)
        bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self._bias = np.where(bias > -100, bias, np.float32(-np.inf))
        self._dry = text if sampling.dry_multiplier else None
        self.active = counted(sampling) or bool(sampling.logit_bias) or self._dry is not None

    def apply(self, row: Row, history: Seq[int]) -> None:
        """Change `row` in place, for the token behind `history`."""
        s = self._sampling
        if len(self._biased):
            known = (self._biased >= 0) & (self._biased < len(row))
            row[self._biased[known]] += self._bias[known]
        if counted(s):
            ids, counts = self._tallies.follow(history)
            row[ids] = penalised(row[ids], counts, s)
        if self._dry is not None:
            for token, length in repetitions(s, history, self._dry, self._recent).items():
                if token < len(row):
                    row[token] -= np.float32(penalty(s, length))
