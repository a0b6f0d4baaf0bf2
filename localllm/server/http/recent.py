"""What was used last, within limits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """Entries by their keys: at most `most` of them, which are at most `most_size` together by
    `size_of`. The one that was not used the longest goes first; the newest stays, however large."""

    def __init__(
        self, most: int, most_size: int = 0, size_of: Callable[[Value], int] = lambda _: 0
    ) -> None:
        self._most, self._most_size, self._size_of = most, most_size, size_of
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._size = 0

    def get(self, key: Key) -> Value | None:
        """The entry, used now; None where there is none."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: Key, value: Value) -> Value:
        """Keep `value`; returns it."""
        if key in self._entries:
            self.pop(key)
        self._entries[key] = value
        self._size += self._size_of(value)
        while len(self._entries) > 1 and (
            len(self._entries) > self._most or self._size > self._most_size
        ):
            self._size -= self._size_of(self._entries.popitem(last=False)[1])
        return value

    def pop(self, key: Key) -> None:
        """Forget the entry, which is there."""
        self._size -= self._size_of(self._entries.pop(key))

    def values(self) -> list[Value]:
        """Every entry, that which was not used the longest first."""
        return [*self._entries.values()]
