"""What was used last, within limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """Entries by their keys: at most `most` of them, and by `size_of` at most `most_size` together.
    The least recently used entry is dropped first; the newest stays, however large."""

    def __init__(
        self, most: int, most_size: int = 0, size_of: Callable[[Value], int] | None = None
    ) -> None:
        self._most = most
        self._most_size = most_size
        self._size_of = size_of
        self._entries: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        """The entry, used now; None where there is none."""
        if key not in self._entries:
            return None
        return self._entries.setdefault(key, self._entries.pop(key))

    def put(self, key: Key, value: Value) -> Value:
        """Keep `value`; returns it."""
        self._entries.pop(key, None)
        self._entries[key] = value
        while len(self._entries) > 1 and self._too_much():
            self.pop(next(iter(self._entries)))
        return value

    def _too_much(self) -> bool:
        if len(self._entries) > self._most:
            return True
        if self._size_of is None:
            return False
        return sum(map(self._size_of, self._entries.values())) > self._most_size

    def pop(self, key: Key) -> None:
        """Forget the entry, which is there."""
        del self._entries[key]

    def values(self) -> list[Value]:
        """Every entry, that which was not used the longest first."""
        return [*self._entries.values()]
