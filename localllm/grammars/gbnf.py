"""llama.cpp's grammars (GBNF) in Lark, letter by letter, so that they mean what they mean there.

llguidance reads texts with a lexer that takes the longest match, llama.cpp takes every letter by
itself. A grammar without recursion is one regular expression, where that makes no difference. Of
one with recursion every letter is a terminal, but for parts that no other terminal begins like and
that end where they match (a string between quotes, say). Source of the notation: llama.cpp,
src/llama-grammar.cpp and grammars/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from localllm.grammars.reasons import check_schema

_MAX_LETTERS = 1 << 16
_MOST_REPEATS = 100_000
_MOST_NESTED = 200
_LAST = 0x10FFFF
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}
_NAME = re.compile(r"[\w-]+", re.ASCII)
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*:(?!:=))")
Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Letter:
    """One letter of some ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


@dataclass(frozen=True, slots=True)
class _Ways:
    """Alternatives, each one after another."""

    ways: tuple[tuple[_Node, ...], ...]


@dataclass(frozen=True, slots=True)
class _Times:
    node: _Node
    low: int
    high: int | None


_Node: TypeAlias = _Letter | _Named | _Ways | _Times


def lark_of(source: str) -> str:
    """`source` in Lark's notation; one that is in it already comes back as it is. Raises
    ValueError, which says what can't be read, and where."""
    if _LARK.search(source):
        return source
    rules = _GbnfReader(source).rules()
    return _LarkWriter(rules).lark()


class _GbnfReader:
    """Reads rules as llama.cpp does."""

    def __init__(self, source: str) -> None:
        self._text, self._at = source.replace("\r\n", "\n").replace("\r", "\n"), 0
        self._depth = 0

    def rules(self) -> dict[str, _Ways]:
        found: dict[str, _Ways] = {}
        self._space(lines=True)
        while self._at < len(self._text):
            name = self._name()
            self._space()
            if not self._text.startswith("::=", self._at):
                raise self._wrong("expected ::=")
            self._at += 3
            self._space(lines=True)
            found[name] = self._ways(nested=False)
            if self._at < len(self._text) and self._text[self._at] != "\n":
                raise self._wrong("expected the end of the line")
            self._space(lines=True)
        if "root" not in found:
            raise ValueError("it has no rule called root")
        for rule in found.values():
            for name in _names(rule):
                if name not in found:
                    raise ValueError(f"it has no rule called {name}")
        return found

    def _wrong(self, what: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        return ValueError(f"{what} in line {line}, at {self._text[self._at : self._at + 20]!r}")

    def _space(self, *, lines: bool = False) -> None:
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif letter in " \t" or (lines and letter == "\n"):
                self._at += 1
            else:
                return

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._wrong("expected a name")
        self._at = found.end()
        return found[0]

    def _ways(self, *, nested: bool) -> _Ways:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise self._wrong("it is nested too deeply")
        ways = [self._sequence(nested)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._space(lines=True)
            ways.append(self._sequence(nested))
        self._depth -= 1
        return _Ways(tuple(ways))

    def _sequence(self, nested: bool) -> tuple[_Node, ...]:
        items: list[tuple[_Node, ...]] = []  # a text's letters are repeated together
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == '"':
                items.append(tuple(_Letter(((code, code),)) for code in self._literal()))
            elif letter == "[":
                items.append((self._letters(),))
            elif letter == "(":
                items.append((self._group(),))
            elif letter == ".":
                self._at += 1
                items.append((_Letter(((0, _LAST),)),))
            elif letter in "*+?{":
                if not items:
                    raise self._wrong("nothing to repeat")
                low, high = self._times()
                last = items[-1]
                items[-1] = (_Times(last[0] if len(last) == 1 else _Ways((last,)), low, high),)
            elif _NAME.match(letter):
                items.append((_Named(self._name()),))
            elif letter in "<!":
                raise self._wrong("tokens by name are not supported")
            else:
                break
            self._space(lines=nested)
        return tuple(chain.from_iterable(items))

    def _group(self) -> _Ways:
        """What stands between ( and )."""
        self._at += 1
        self._space(lines=True)
        ways = self._ways(nested=True)
        if not self._text.startswith(")", self._at):
            raise self._wrong("expected )")
        self._at += 1
        return ways

    def _literal(self) -> list[int]:
        self._at += 1
        codes: list[int] = []
        while not self._text.startswith('"', self._at):
            codes.append(self._code())
        self._at += 1
        return codes

    def _code(self) -> int:
        if self._at >= len(self._text):
            raise self._wrong("unexpected end")
        letter = self._text[self._at]
        self._at += 1
        if letter != "\\":
            return ord(letter)
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        digits = self._text[self._at : self._at + _HEX.get(kind, 0)]
        if kind not in _HEX or not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
            self._at -= 2
            raise self._wrong("unknown escape")
        self._at += len(digits)
        code = int(digits, 16)
        if code > _LAST or 0xD800 <= code < 0xE000:
            raise self._wrong("no letter has this code")
        return code

    def _letters(self) -> _Letter:
        self._at += 1
        other = self._text.startswith("^", self._at)
        self._at += other
        if self._text.startswith("]", self._at):  # to llama.cpp no letter at all
            raise self._wrong("no letter is in []")
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            low = high = self._code()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._code()
            if low <= high:  # llama.cpp takes the others for empty
                ranges.append((low, high))
        self._at += 1
        if not ranges and not other:
            raise self._wrong("no letter is in []")
        return _Letter(_outside(ranges) if other else tuple(ranges))

    def _times(self) -> tuple[int, int | None]:
        mark = self._text[self._at]
        self._at += 1
        if mark != "{":
            return (1 if mark == "+" else 0), (1 if mark == "?" else None)
        found = re.compile(r"\s*(\d+)\s*(,?)\s*(\d*)\s*\}").match(self._text, self._at)
        if found is None or (found[3] and not found[2]):
            raise self._wrong("expected {m}, {m,} or {m,n}")
        low = int(found[1])
        high = low if not found[2] else int(found[3]) if found[3] else None
        if max(low, high or 0) > _MOST_REPEATS or (high is not None and high < low):
            raise self._wrong("too many repetitions, or fewer at most than at least")
        self._at = found.end()
        return low, high


def _outside(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The code points that are in none of `ranges`."""
    left: list[tuple[int, int]] = []
    at = 0
    for low, high in sorted(ranges):
        if low > at:
            left.append((at, low - 1))
        at = max(at, high + 1)
    return tuple([*left, (at, _LAST)] if at <= _LAST else left)


def _names(node: _Node) -> Iterator[str]:
    if isinstance(node, _Named):
        yield node.name
    elif isinstance(node, _Times):
        yield from _names(node.node)
    elif isinstance(node, _Ways):
        for way in node.ways:
            for inner in way:
                yield from _names(inner)


class _LarkWriter:
    """Writes rules as one expression, or as rules of Lark's."""

    def __init__(self, rules: dict[str, _Ways]) -> None:
        self._rules = rules
        self._numbers = {name: f"r{i}" for i, name in enumerate(rules)}
        self._regular: dict[str, str | None] = {}
        self._open: set[str] = set()
        self._whole: set[str] = set()

    def lark(self) -> str:
        whole = self._expression(_Named("root"))
        if whole is not None:
            return f"start: /{whole}/\n"
        self._whole = self._terminals()
        lines = [
            f"{self._numbers[name]}: {self._written(rule)}" for name, rule in self._rules.items()
        ]
        return "\n".join([f"start: {self._numbers['root']}", *lines]) + "\n"

    # --- expressions

    def _expression(self, node: _Node) -> str | None:
        """The expression of a node; None where it leads to itself, or is too long."""
        if isinstance(node, _Letter):
            return _class(node.ranges)
        if isinstance(node, _Named):
            name = node.name
            if name not in self._regular:
                if name in self._open:
                    return None
                self._open.add(name)
                self._regular[name] = self._expression(self._rules[name])
                self._open.discard(name)
            return self._regular[name]
        if isinstance(node, _Times):
            inner = self._expression(node.node)
            high = "" if node.high is None else node.high
            return (
                None
                if inner is None
                else f"(?:{inner}){{{node.low},{high}}}"
                if node.high != 0
                else "(?:)"
            )
        ways = [self._joined(way) for way in node.ways]
        if None in ways:
            return None
        found = f"(?:{'|'.join(way for way in ways if way is not None)})"
        return found if len(found) <= _MAX_LETTERS else None

    def _joined(self, nodes: Sequence[_Node]) -> str | None:
        parts = [self._expression(node) for node in nodes]
        return None if None in parts else "".join(part for part in parts if part is not None)

    # --- rules

    def _terminals(self) -> set[str]:
        """Expressions of runs that may be terminals as a whole."""
        runs = {
            run
            for rule in self._rules.values()
            for way in _all_ways(rule)
            for run in self._runs(way)
        }
        ends = {
            run: expression
            for run in runs
            if (expression := self._joined(run)) and _ends_where_it_matches(expression)
        }
        good: set[str] = set()
        for run, expression in ends.items():
            first = self._first(run)
            others = [r for r in self._letters_beside(run) if _meet(first, r)]
            if not others:
                good.add(expression)
        return good

    def _runs(self, way: Sequence[_Node]) -> Iterator[tuple[_Node, ...]]:
        """Neighbours that are regular together, from the first to the last that may end them."""
        for i, node in enumerate(way):
            if not isinstance(node, _Letter):
                continue
            for j in range(len(way), i + 2, -1):
                if (
                    any(isinstance(n, _Times) for n in way[i:j])
                    and self._joined(way[i:j]) is not None
                ):
                    yield tuple(way[i:j])

    def _first(self, run: Sequence[_Node]) -> Ranges:
        first = run[0]
        assert isinstance(first, _Letter)
        return first.ranges

    def _letters_beside(self, run: tuple[_Node, ...]) -> Iterator[Ranges]:
        """What else in the grammar a terminal may begin with."""
        expression = self._joined(run)

        def letters_in(way: Sequence[_Node]) -> Iterator[Ranges]:
            i = 0
            while i < len(way):
                if self._joined(way[i : i + len(run)]) == expression:
                    i += len(run)
                    continue
                node = way[i]
                if isinstance(node, _Letter):
                    yield node.ranges
                elif isinstance(node, _Times):
                    yield from letters_in([node.node])
                elif isinstance(node, _Ways):
                    for inner in node.ways:
                        yield from letters_in(inner)
                i += 1

        for rule in self._rules.values():
            for way in rule.ways:
                yield from letters_in(way)

    def _written(self, node: _Node) -> str:
        if isinstance(node, _Letter):
            return f"/{_class(node.ranges)}/"
        if isinstance(node, _Named):
            return self._numbers[node.name]
        if isinstance(node, _Times):
            if node.high == 0:
                return '""'
            high = "" if node.high is None else node.high
            return f"({self._written(node.node)}){{{node.low},{high}}}"
        return f"({' | '.join(self._sequence(way) for way in node.ways)})"

    def _sequence(self, way: Sequence[_Node]) -> str:
        parts: list[str] = []
        i = 0
        while i < len(way):
            for j in range(len(way), i + 2, -1):
                expression = self._joined(way[i:j])
                if expression in self._whole:
                    parts.append(f"/{expression}/")
                    i = j
                    break
            else:
                parts.append(self._written(way[i]))
                i += 1
        return " ".join(parts) or '""'


def _all_ways(node: _Node) -> Iterator[tuple[_Node, ...]]:
    if isinstance(node, _Times):
        yield from _all_ways(node.node)
    elif isinstance(node, _Ways):
        for way in node.ways:
            yield way
            for inner in way:
                yield from _all_ways(inner)


def _class(ranges: Ranges) -> str:
    """The expression of one letter. Every code is spelled out: signs between brackets mean
    something there."""
    if ranges == ((0, _LAST),):
        return "(?s:.)"
    codes = ((max(low, 0xE000) if 0xD800 <= low < 0xE000 else low, high) for low, high in ranges)
    said = (
        f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}"
        for low, high in codes
    )
    return f"[{''.join(said)}]" if ranges else "[^\\x{0}-\\x{10FFFF}]"


def _meet(one: Ranges, other: Ranges) -> bool:
    return any(low <= b and a <= high for low, high in one for a, b in other)


def _ends_where_it_matches(expression: str) -> bool:
    """True where nothing that matches goes on as something else that does."""
    parts = [f"^(?:{expression})$", f"^(?:{expression}(?s:.)+)$"]
    schema = {"type": "string", "allOf": [{"pattern": part} for part in parts]}
    return check_schema(json.dumps(schema)).matches_nothing
