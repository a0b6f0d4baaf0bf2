"""Parts that our backends share: thread ownership, limits on operations, and drafting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from localllm_backends.contract import (
    Backend,
    BackendFailure,
    Chunk,
    MediaPart,
    NoCellsError,
    SequenceId,
)
from localllm_backends.draft_head_state import StatefulDraftHeads

Owned = TypeVar("Owned", bound="OwnedBackend")
Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def owner_only(
    operation: Callable[Concatenate[Owned, Given], Returned],
) -> Callable[Concatenate[Owned, Given], Returned]:
    """Make `operation` raise BackendFailure on any thread but the one that loaded the backend."""

    @wraps(operation)
    def checked(self: Owned, /, *args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if threading.get_ident() != self._owner:
            raise BackendFailure(
                f"`{operation.__name__}` was called from another thread: "
                "a backend belongs to the thread that loaded it"
            )
        return operation(self, *args, **kwargs)

    return checked


def media_of(chunks: Sequence[Chunk]) -> MediaPart | None:
    """Return the image that a step of `chunks` reads; None if there is no image.

    Raises BackendFailure if the step has other chunks too.
    """
    if all(chunk.media is None for chunk in chunks):
        return None
    if len(chunks) != 1:
        raise BackendFailure("an image needs a step without other chunks")
    return chunks[0].media


class OwnedBackend(Backend):
    """A backend that belongs to the thread that loaded it. It may have draft heads."""

    _heads: StatefulDraftHeads[Any] | None

    def _take_ownership(self) -> None:
        self._owner = threading.get_ident()

    def _require_cells(self, n: int) -> None:
        if n > self.cells_free():
            raise NoCellsError(
                f"{n} KV cells are needed, but only {self.cells_free()} of {self.info.n_ctx} are free"
            )

    def _check_step(self, n_tokens: int, n_outputs: int) -> None:
        """Raise BackendFailure if a step can't have `n_tokens` tokens, `n_outputs` of them with
        logits."""
        limit = self.info.n_batch
        max_outputs = self.info.n_outputs
        if not n_tokens:
            raise BackendFailure("a step needs at least one token")
        if n_tokens > limit:
            raise BackendFailure(f"a step of {n_tokens} tokens exceeds the batch size of {limit}")
        if n_outputs > max_outputs:
            raise BackendFailure(
                f"a step with {n_outputs} outputs exceeds the limit of {max_outputs}"
            )
        self._require_cells(n_tokens)

    def _check_range(self, sequence: SequenceId, start: int, stop: int) -> None:
        """Raise BackendFailure unless `sequence` contains the tokens [start, stop)."""
        length = self.length(sequence)
        if not 0 <= start < stop <= length:
            raise BackendFailure(
                f"the sequence does not contain tokens {start} to {stop} of {length}"
            )

    def _check_follows(self, sequence: SequenceId, start: int, stop: int) -> None:
        """Raise BackendFailure unless [start, stop) are the next tokens of `sequence`."""
        length = self.length(sequence)
        if length != start:
            raise BackendFailure(
                f"tokens {start} to {stop} do not continue a sequence of {length} tokens"
            )

    @owner_only
    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        if self._heads is None:
            raise BackendFailure("this model was loaded without its draft heads")
        return self._heads.draft(wanted)

    @owner_only
    def rest_heads(self, resting: bool) -> None:
        if self._heads is not None:
            self._heads.rest(resting)

    def _warm_up(self, *lengths: int) -> SequenceId:
        """Run steps of these lengths, so that the first request is not slowed by their set-up.

        Returns the sequence used for them.
        """
        sequence = self.new_sequence()
        token = self.info.bos_token or 0
        for n in lengths:
            self.step([Chunk(sequence, [token] * n)])
        if self._heads is not None:
            self._heads.draft([(sequence, token, 1)])
        return sequence
