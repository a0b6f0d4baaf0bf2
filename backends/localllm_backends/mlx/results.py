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
from localllm_backends.mlx.sampling import UNSURE, DeviceSamples
from localllm_backends.mlx.sequence_cache import SequenceCache

# A row of what the model knew at a token: an array [lines, tokens, width] and its place there.
HiddenRow = tuple[Any, int, int]


@dataclass
class LogitRows:
    """Rows of logits that came out of one call."""

    logits: Any
    best: Any

    @cached_property
    def best_tokens(self) -> list[int]:
        return [int(t) for t in np.array(self.best)]


@dataclass
class MlxStepResult(StepResult):
    """See StepResult. Logits stay in MLX's memory until somebody asks for them as numbers: on a
    stream of their own, since the next step may be under way."""

    n_vocab: int
    chunks: Sequence[Chunk]
    lines: list[SequenceCache]
    stream: Any
    # What must be computed for the step to be done, and is not under way.
    fresh: list[Any] = field(default_factory=list)
    pieces: list[tuple[LogitRows, int, int] | None] = field(default_factory=list)
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
        return [] if piece is None else piece[0].best_tokens[piece[1] : piece[2]]

    def sampled(self, chunk: int) -> int | None:
        piece = self.samples[chunk]
        token = UNSURE if piece is None else piece[0].on_host[piece[1]]
        return None if token == UNSURE else token

    def next_token(self, chunk: int) -> int | None:
        """What most likely follows the chunk: what was sampled, else its best token; None where
        nothing was asked for."""
        if self.samples[chunk] is not None:
            return self.sampled(chunk)
        piece = self.pieces[chunk]
        return None if piece is None else piece[0].best_tokens[piece[2] - 1]

    def chosen(self) -> list[Any]:
        """The arrays that say what follows the chunks."""
        found = [
            s[0].tokens if s is not None else p[0].best
            for s, p in zip(self.samples, self.pieces, strict=True)
            if p
        ]
        return list({id(a): a for a in found}.values())

    def logits(self, chunk: int) -> NDArray[np.float32]:
        piece = self.pieces[chunk]
        if piece is None:
            return np.empty((0, self.n_vocab), dtype=np.float32)
        group, start, stop = piece
        try:
            with mx.stream(self.stream):
                rows: NDArray[np.float32] = np.array(
                    group.logits[start:stop].astype(mx.float32), copy=False
                )
        except Exception as e:
            raise StepError(f"MLX could not give out the logits of this step: {e}") from e
        rows.flags.writeable = False
        return rows
