"""The tokens of a LaTeX formula: macros, braces, spaces and single signs."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|\s+|.", re.DOTALL)


class LatexTokens:
    """The tokens of a formula, and the place of the next one."""

    def __init__(self, latex: str) -> None:
        self._tokens = _TOKEN.findall(latex)
        self._at = 0

    @property
    def _next(self) -> str:
        """The next token; "" at the end."""
        if self._at < len(self._tokens):
            return str(self._tokens[self._at])
        return ""

    def _take(self) -> str:
        token = self._next
        self._at += 1
        return token

    def _skip_space(self) -> None:
        while self._next.isspace():
            self._at += 1

    def _raw(self) -> str:
        """The argument as written, without its braces."""
        self._skip_space()
        token = self._take()
        if token != "{":
            return token
        depth = 1
        start = self._at
        while depth:
            token = self._take()
            if not token:
                raise ValueError("a brace is not closed")
            depth += (token == "{") - (token == "}")
        return "".join(self._tokens[start : self._at - 1])

    def _number(self) -> str:
        """A number with all its digits, which one script belongs to."""
        digits = ""
        while self._next.isdecimal() or (self._next == "." and self._digit_follows()):
            digits += self._take()
        return digits

    def _digit_follows(self) -> bool:
        following = self._tokens[self._at + 1 : self._at + 2]
        return bool(following) and following[0].isdecimal()

    def _delimiter_before(self) -> str:
        """The sign after \\left if an environment begins right after it; "" without one."""
        at = self._at - 2
        while at >= 0 and self._tokens[at].isspace():
            at -= 1
        if at >= 1 and self._tokens[at - 1] == "\\left":
            return str(self._tokens[at])
        return ""
