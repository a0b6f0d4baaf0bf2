"""A mapping that keeps the most recently used entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """Entries by key: at most `most` entries, with a total `size_of` of at most `max_size`.

    The least recently used entry is dropped first. The newest entry stays, whatever its size."""

    def __init__(
        self, max_entries: int, max_size: int = 0, size_of: Callable[[Value], int] | None = None
    ) -> None:
        self._max_entries = max_entries
        self._max_size = max_size
        self._size_of = size_of
        self._entries: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        """Return the entry and mark it as used now, or return None if it is absent."""
        if key not in self._entries:
            return None
        return self._entries.setdefault(key, self._entries.pop(key))

    def put(self, key: Key, value: Value) -> Value:
        """Store `value` and return it."""
        self._entries.pop(key, None)
        self._entries[key] = value
        while len(self._entries) > 1 and self._too_much():
            self.pop(next(iter(self._entries)))
        return value

    def _too_much(self) -> bool:
        if len(self._entries) > self._max_entries:
            return True
        if self._size_of is None:
            return False
        return sum(map(self._size_of, self._entries.values())) > self._max_size

    def pop(self, key: Key) -> None:
        """Remove the entry, which must exist."""
        del self._entries[key]

    def values(self) -> list[Value]:
        """Return all entries, least recently used first."""
        return [*self._entries.values()]
