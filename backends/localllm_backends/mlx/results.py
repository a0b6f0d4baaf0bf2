"""What a step of MLX gives: logits that stay on the device until somebody asks, tokens sampled
there, and hidden rows."""

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

# A row of what the model knew at a token: an array [lines, tokens, width] and its place there.
HiddenRow = tuple[Any, int, int]


@dataclass
class LogitRows:
    """Rows of logits that came out of one call, and the best token of each. `begun_ahead`: of a
    step that nobody had asked for."""

    logits: Any
    begun_ahead: bool = False

    @cached_property
    def best(self) -> DeviceTokens:
        return DeviceTokens(mx.argmax(self.logits, axis=-1))


@dataclass(eq=False)
class ChunkOutput:
    """What a step does with one chunk: its rows [start, stop) of the logits `group` came out of,
    where it wanted any; the token that was `sampled`, and in which row; and its hidden rows."""

    chunk: Chunk
    line: SequenceCache
    group: LogitRows | None = None
    start: int = 0
    stop: int = 0
    sampled: tuple[DeviceTokens, int] | None = None
    hidden: list[HiddenRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._follows_best = self.line.follows_best
        self.line.follows_best = False

    def take(self, group: LogitRows, stop: int) -> None:
        """Its outputs are the rows of `group` that end before `stop`."""
        self.group = group
        self.stop = stop
        self.start = stop - min(self.chunk.outputs, len(self.chunk.tokens))

    @property
    def is_expected(self) -> bool:
        """Is it the token that most likely follows what its line holds?"""
        if len(self.chunk.tokens) != 1 or not self.chunk.outputs:
            return False
        return self.chunk.tokens[0] == self.line.predicted

    @property
    def known(self) -> bool:
        """Can its line go on unasked: is the next token sampled here, or, by the engine's habit, the
        best one?"""
        takes_best = self._follows_best and self.is_expected and self.chunk.sample is None
        return self.sampled is not None or takes_best

    @property
    def next(self) -> tuple[DeviceTokens, int] | None:
        """What most likely follows, and its row: what was sampled, else the best token."""
        if self.sampled is None and self.group is not None:
            return self.group.best, self.stop - 1
        return self.sampled


def on_host(place: tuple[DeviceTokens, int] | None) -> int | None:
    """The token at that place; None where there is none or the device was unsure of it."""
    if place is None:
        return None
    tokens, row = place
    token = tokens.on_host[row]
    if token == UNSURE:
        return None
    return token


@dataclass
class MlxStepResult(StepResult):
    """See StepResult. Logits stay in MLX's memory until somebody asks for them as numbers: on a
    stream of their own, since the next step may be under way."""

    n_vocab: int
    parts: Sequence[ChunkOutput]
    stream: Any
    # What must be computed for the step to be done, and is not under way.
    fresh: list[Any] = field(default_factory=list)

    def argmax(self, chunk: int) -> list[int]:
        part = self.parts[chunk]
        part.line.follows_best = True
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
            raise StepError(f"MLX could not give out the logits of this step: {e}") from e
        rows.flags.writeable = False
        return rows
