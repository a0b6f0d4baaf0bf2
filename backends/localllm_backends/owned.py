"""What our backends do alike, whatever computes: whose thread it is, how much an operation may ask
for, and drafting."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from localllm_backends.contract import Backend, BackendFailure, Chunk, NoCellsError, SequenceId
from localllm_backends.following import FollowingHeads
from localllm_backends.reasons import first_reason


class OwnedBackend(Backend):
    """A backend of the thread that loaded it, which may have draft heads beside its sequences."""

    _heads: FollowingHeads[Any] | None

    def _take_ownership(self) -> None:
        self._owner = threading.get_ident()

    def _check_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise BackendFailure("a backend belongs to the thread that loaded it")

    def _require_cells(self, n: int) -> None:
        if n > self.cells_free():
            raise NoCellsError(
                f"{n} KV cells needed, {self.cells_free()} of {self.info.n_ctx} free"
            )

    def _check_step(self, n_tokens: int, n_outputs: int) -> None:
        """May a step have so many tokens, and so many of them want logits?"""
        self._check_owner()
        most = self.info.n_batch
        most_outputs = self.info.n_outputs
        reason = first_reason(
            [
                (not n_tokens, "a step needs at least one token"),
                (n_tokens > most, f"a step of {n_tokens} tokens is over the batch of {most}"),
                (
                    n_outputs > most_outputs,
                    f"a step with {n_outputs} outputs is over the {most_outputs} a step may have",
                ),
            ]
        )
        if reason:
            raise BackendFailure(reason)
        self._require_cells(n_tokens)

    def _check_range(self, sequence: SequenceId, start: int, stop: int) -> None:
        """Does `sequence` hold the tokens [start, stop)?"""
        self._check_owner()
        length = self.length(sequence)
        if not 0 <= start < stop <= length:
            raise BackendFailure(f"can't take tokens {start} to {stop} of {length}")

    def _check_follows(self, sequence: SequenceId, start: int, stop: int) -> None:
        """Do the tokens [start, stop) come next?"""
        self._check_owner()
        length = self.length(sequence)
        if length != start:
            raise BackendFailure(f"tokens {start} to {stop} don't follow the {length} held")

    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        if self._heads is None:
            raise BackendFailure("this model was loaded without its draft heads")
        return self._heads.draft(wanted)

    def _warm_up(self, *lengths: int) -> SequenceId:
        """Steps of so many tokens, so that the first request does not pay for what they set up; the
        sequence that they made."""
        sequence = self.new_sequence()
        if self.info.bos_token is not None:
            token = self.info.bos_token
        else:
            token = 0
        for n in lengths:
            self.step([Chunk(sequence, [token] * n)])
        if self._heads is not None:
            self._heads.draft([(sequence, token, 1)])
        return sequence
