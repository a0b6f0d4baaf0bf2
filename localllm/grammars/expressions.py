"""Rules as one regular expression, each inside those that name it, where none leads to itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

_MAX_CHARS = 1 << 16
Piece: TypeAlias = tuple[Literal["rule", "item", "mark"], str]
"""A part of a rule: the name of another one, an expression, or how an expression writes a bracket,
a bar or how often something is repeated."""
Rules: TypeAlias = Mapping[str, Sequence[Piece]]


class Expressions:
    """The expressions of `rules`; None for what leads to itself, or is too long."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[str, str | None] = {}

    def rule(self, name: str) -> str | None:
        """That of a rule. Raises KeyError where there is none of that name."""
        if name not in self._known:
            self._known[name] = None  # as long as it is being written
            self._known[name] = self.of(self._rules[name])
        return self._known[name]

    def of(self, pieces: Iterable[Piece]) -> str | None:
        written = ""
        for kind, said in pieces:
            part = self.rule(said) if kind == "rule" else said
            if part is None or len(written) + len(part) > _MAX_CHARS:
                return None
            written += part
        return f"(?:{written})"
