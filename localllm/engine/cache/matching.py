"""What a waiting request's prompt has in common with the lines in the context and in the cache: compared once, then
remembered while it waits. Requests wait for many steps; what is O(context) must not be done in each of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Protocol
from weakref import WeakKeyDictionary

from localllm.engine.cache.restore import RestorePlan
from localllm.engine.cache.tree import as_tokens, common_prefix
from localllm.engine.tokens import Tokens


class Line(Protocol):
    """Tokens in the context: a running request's, or one's that stayed there. They may grow, but never change."""

    @property
    def tokens(self) -> Seq[int] | Tokens:
        """All of them, computed or not."""
        ...


class RunningLine(Protocol):
    """A running request as the cache sees it: `n_kv` of its tokens, of which `n_prompt` are its prompt, are in `sequence`;
    `known` tokens of the prompt followed some known line; `shares`: its KV may go to others, and come from them."""

    tokens: list[int]
    sequence: int | None
    n_kv: int
    n_prompt: int
    known: int

    @property
    def shares(self) -> bool:
        """May its KV go to others, and come from them?"""
        ...


class Matching:
    """One prompt's."""

    def __init__(self, prompt: Seq[int] | Tokens) -> None:
        self.tokens = as_tokens(prompt)
        # How many leading tokens are the same, and whether the next one is known to differ.
        self._lines: WeakKeyDictionary[Line, tuple[int, bool]] = WeakKeyDictionary()
        self._planned: tuple[Hashable, RestorePlan] | None = None

    def shared(self, line: Line) -> int:
        """How many leading tokens it shares with `line`."""
        same, parted = self._lines.get(line, (0, False))
        n = min(len(line.tokens), len(self.tokens))
        if same < n and not parted:
            new = common_prefix(as_tokens(line.tokens[same:n]), self.tokens[same:n])
            same, parted = same + new, new < n - same
            self._lines[line] = same, parted
        return same

    def plan(self, as_of: Hashable, make: Callable[[Tokens], RestorePlan]) -> RestorePlan:
        """What to take of the cache: what `make` said when the cache was last in the state `as_of`."""
        if self._planned is None or self._planned[0] != as_of:
            self._planned = as_of, make(self.tokens)
        return self._planned[1]
