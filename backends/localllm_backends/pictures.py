"""Images as the contract hands them on: pixels, what a model makes of them, and what of that goes into a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Decoded pixels: `data` is width × height × 3 bytes, red, green, blue, row by row. `key` is their hash."""

    width: int
    height: int
    data: bytes
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class ImageRun:
    """Part number `part` of a picture as the model reads it: `n_tokens` cells of KV, which take `n_positions` positions.
    `grid`: where two-dimensional positions are used, int32 [3, n_tokens] of time, height and width, counted from the run's
    first position. `key` is the hash of the pixels, the part, and all that turns them into embeddings."""

    picture: Picture
    part: int
    key: bytes
    n_tokens: int
    n_positions: int
    grid: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """The tokens of an `ImageRun` from number `start` on that go into a step, with the embeddings [n_tokens, width] of the
    whole run."""

    run: ImageRun
    embeddings: NDArray[np.float32]
    start: int = 0
