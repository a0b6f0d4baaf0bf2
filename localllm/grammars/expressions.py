"""Combines rules into one regular expression by inlining, if no rule is recursive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

_MAX_CHARS = 1 << 16
Piece: TypeAlias = tuple[Literal["rule", "item", "mark"], str]
"""A part of a rule: ("rule", name of another rule), ("item", regular expression), or ("mark", sign of
a regular expression: a bracket, a bar or a repetition)."""
Rules: TypeAlias = Mapping[str, Sequence[Piece]]


class Expressions:
    """The expressions of `rules`. A recursive or too long rule gives None."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._expression_by_rule: dict[str, str | None] = {}

    def rule(self, name: str) -> str | None:
        """The expression of a rule. Raises KeyError if there is no such rule."""
        if name not in self._expression_by_rule:
            # While it is being built, so recursion gives None.
            self._expression_by_rule[name] = None
            self._expression_by_rule[name] = self.of(self._rules[name])
        return self._expression_by_rule[name]

    def of(self, pieces: Iterable[Piece]) -> str | None:
        expression = ""
        for kind, text in pieces:
            part = self.rule(text) if kind == "rule" else text
            if part is None or len(expression) + len(part) > _MAX_CHARS:
                return None
            expression += part
        return f"(?:{expression})"
