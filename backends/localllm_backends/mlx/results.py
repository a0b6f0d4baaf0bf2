"""Results of an MLX step: logits that stay on the device until they are read, tokens sampled there,
and hidden rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import Chunk, StepError, StepResult
from localllm_backends.mlx.sampling import UNSURE, DeviceTokens
from localllm_backends.mlx.sequence_cache import SequenceCache

# The model's hidden row of a token: an array [sequences, tokens, width] and the indices of the row.
HiddenRow = tuple[Any, int, int]


@dataclass
class LogitRows:
    """Logit rows of one model call, and the best token of each.

    `started_early`: the step was started before it was requested.
    """

    logits: Any
    started_early: bool = False

    @cached_property
    def best(self) -> DeviceTokens:
        return DeviceTokens(mx.argmax(self.logits, axis=-1))


@dataclass(eq=False)
class ChunkOutput:
    """The outputs of one chunk in a step.

    These are: its rows [start, stop) of the logits in `group`, if it has any; the `sampled` token
    and its row; and its hidden rows.
    """

    chunk: Chunk
    seq: SequenceCache
    group: LogitRows | None = None
    start: int = 0
    stop: int = 0
    sampled: tuple[DeviceTokens, int] | None = None
    hidden: list[HiddenRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._follows_best = self.seq.follows_best
        self.seq.follows_best = False

    def take(self, group: LogitRows, stop: int) -> None:
        """Set its outputs to the rows of `group` that end before `stop`."""
        self.group = group
        self.stop = stop
        self.start = stop - min(self.chunk.outputs, len(self.chunk.tokens))

    @property
    def is_expected(self) -> bool:
        """True if its token is the predicted next token of its sequence."""
        if len(self.chunk.tokens) != 1 or not self.chunk.outputs:
            return False
        return self.chunk.tokens[0] == self.seq.predicted

    @property
    def extends_expected(self) -> bool:
        """True if it begins with the predicted next token, and the engine chooses from all rows."""
        chunk = self.chunk
        chosen_here = chunk.sample is None and chunk.outputs >= len(chunk.tokens)
        return chosen_here and chunk.tokens[0] == self.seq.predicted

    @property
    def known(self) -> bool:
        """True if the sequence's next step can start early.

        Either the next token is sampled on the device, or the engine has been taking the best
        token.
        """
        takes_best = self._follows_best and self.is_expected and self.chunk.sample is None
        return self.sampled is not None or takes_best

    @property
    def next(self) -> tuple[DeviceTokens, int] | None:
        """The most likely next token and its row: the sampled token, else the best one."""
        if self.sampled is None and self.group is not None:
            return self.group.best, self.stop - 1
        return self.sampled


def on_host(place: tuple[DeviceTokens, int] | None) -> int | None:
    """Return the token at that place; None if there is no place or the device could not decide."""
    if place is None:
        return None
    tokens, row = place
    token = tokens.on_host[row]
    if token == UNSURE:
        return None
    return token


@dataclass
class MlxStepResult(StepResult):
    """See StepResult. Logits stay in MLX's memory until they are read as numbers.

    They are read on a stream of their own, since the next step may already be running.
    """

    n_vocab: int
    parts: Sequence[ChunkOutput]
    stream: Any
    # Arrays that the step must compute and that are not being computed yet.
    fresh: list[Any] = field(default_factory=list)

    def argmax(self, chunk: int) -> list[int]:
        part = self.parts[chunk]
        part.seq.follows_best = True
        if part.group is None:
            return []
        return part.group.best.on_host[part.start : part.stop]

    def sampled(self, chunk: int) -> int | None:
        return on_host(self.parts[chunk].sampled)

    def logits(self, chunk: int) -> NDArray[np.float32]:
        part = self.parts[chunk]
        if part.group is None:
            return np.empty((0, self.n_vocab), dtype=np.float32)
        try:
            with mx.stream(self.stream):
                values = part.group.logits[part.start : part.stop].astype(mx.float32)
                rows: NDArray[np.float32] = np.array(values, copy=False)
        except Exception as e:
            raise StepError(f"MLX could not return the logits of this step: {e}") from e
        rows.flags.writeable = False
        return rows
