"""Where a sequence's tokens stand: the model's positions of them, which images in two dimensions (M-RoPE) make fewer of.

An image of 20 tokens in 5 columns takes 5 positions, all its tokens stand at the first. Everywhere else token n of a
sequence has position n, and so it is in every sequence without images.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from localllm_backends.contract import BackendFailure, CannotRewindError

_PLACED = struct.Struct("<III")
_TAIL = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Placed:
    """An image from token `start` on: so many tokens, which take so many positions."""

    start: int
    n_tokens: int
    n_positions: int

    @property
    def stop(self) -> int:
        """The token behind it."""
        return self.start + self.n_tokens

    @property
    def saved(self) -> int:
        """How many positions fewer than tokens."""
        return self.n_tokens - self.n_positions


@dataclass(frozen=True, slots=True)
class Carried:
    """What exported KV says of its positions: its images, and the largest of all."""

    images: tuple[Placed, ...]
    last: int

    @classmethod
    def none(cls, _first: int, last: int) -> Carried:
        """KV of the tokens up to `last` that stand where they are counted."""
        return cls((), last - 1)


class Positions:
    """The images of every sequence that holds any, in order."""

    def __init__(self) -> None:
        self._images: dict[int, list[Placed]] = {}

    def at(self, sequence: int, token: int) -> int:
        """The position of token number `token`, which need not be there yet. CannotRewindError within an image."""
        position = token
        for image in self._images.get(sequence, ()):
            if image.stop <= token:
                position -= image.saved
            elif image.start < token:
                raise CannotRewindError("an image can't be cut in two")
        return position

    def last(self, sequence: int, n_tokens: int) -> int:
        """The largest position among the first `n_tokens`."""
        for image in self._images.get(sequence, ()):
            if image.stop == n_tokens:
                return self.at(sequence, image.start)
        return self.at(sequence, n_tokens) - 1

    def place(self, sequence: int, image: Placed) -> None:
        """An image begins at the end of the sequence."""
        held = self._images.setdefault(sequence, [])
        if image not in held:
            held.append(image)

    def adopt(self, sequence: int, start: int, stop: int, images: Seq[Placed]) -> tuple[int, int]:
        """Those of the `images` that lie in the tokens [start, stop) come behind `start` tokens; returns the positions of
        both ends."""
        for image in images:
            if start <= image.start and image.stop <= stop:
                self.place(sequence, image)
        return self.at(sequence, start), self.at(sequence, stop)

    def cut(self, sequence: int, n_tokens: int) -> None:
        """Only the first `n_tokens` stay."""
        held = self._images.get(sequence)
        if held is not None:
            self._images[sequence] = [i for i in held if i.stop <= n_tokens]

    def fork(self, source: int, target: int, n_tokens: int) -> None:
        """`target` has the first `n_tokens` of `source`."""
        self._images[target] = [i for i in self._images.get(source, ()) if i.stop <= n_tokens]

    def close(self, sequence: int) -> None:
        """The sequence is gone."""
        self._images.pop(sequence, None)

    def tail(self, sequence: int, start: int, stop: int) -> bytes:
        """What goes behind exported KV of the tokens [start, stop): the images among them."""
        within = [i for i in self._images.get(sequence, ()) if start <= i.start and i.stop <= stop]
        listed = b"".join(_PLACED.pack(i.start, i.n_tokens, i.n_positions) for i in within)
        return listed + _TAIL.pack(self.at(sequence, start), len(within))


def without_tail(data: bytes | memoryview, first: int, last: int) -> tuple[memoryview, Carried]:
    """Exported KV of the tokens [first, last) without its tail, and what that says."""
    view = memoryview(data)
    end = len(view) - _TAIL.size
    position, count = _TAIL.unpack(view[end:]) if end >= 0 else (0, 0)
    begin = end - count * _PLACED.size
    if begin < 0:
        raise BackendFailure("this is not an exported KV block: too short")
    images = tuple(Placed(*found) for found in _PLACED.iter_unpack(view[begin:end]))
    whole = position + last - first - sum(i.saved for i in images)
    ends = [i for i in images if i.stop == last]
    return view[:begin], Carried(images, whole - ends[0].n_positions if ends else whole - 1)
