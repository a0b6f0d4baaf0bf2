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

from localllm.grammars.reasons import UNSATISFIABLE, check_schema

_MAX_LETTERS = 1 << 16
_MOST_REPEATS = 100_000
_MOST_NESTED = 200
_LAST = 0x10FFFF
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}
_LETTER = r'(?:\\[trn\\"\[\]]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|[^\\])'
_LETTERS = re.compile(f"({_LETTER})(?:-({_LETTER}))?")
_PIECE = re.compile(
    r"(?P<space>[ \t]+|\#[^\n]*)|(?P<line>\n)|(?P<is>::=)|(?P<name>[a-zA-Z0-9_-]+)"
    rf'|"(?P<text>(?:(?!"){_LETTER})*)"|\[(?P<letters>(?:(?!\]){_LETTER})+)\]'
    r"|(?P<times>[*+?]|\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\})|(?P<mark>[.()|])"
)
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
        self._text = source.replace("\r\n", "\n").replace("\r", "\n")
        self._at = self._depth = 0
        self._piece: re.Match[str] | None = None
        self._kind = ""
        self._go_on()

    def rules(self) -> dict[str, _Ways]:
        found: dict[str, _Ways] = {}
        self._skip_lines()
        while self._kind:
            name = self._expect("name", "a name")
            self._expect("is", "::=")
            self._skip_lines()
            found[name] = self._ways(nested=False)
            if self._kind:
                self._expect("line", "the end of the line")
            self._skip_lines()
        if "root" not in found:
            raise ValueError("it has no rule called root")
        for node in chain.from_iterable(map(_parts, found.values())):
            if isinstance(node, _Named) and node.name not in found:
                raise ValueError(f"it has no rule called {node.name}")
        return found

    def _wrong(self, what: str) -> ValueError:
        at = self._piece.start() if self._piece is not None else self._at
        line = self._text.count("\n", 0, at) + 1
        return ValueError(f"{what} in line {line}, at {self._text[at : at + 20]!r}")

    def _go_on(self) -> None:
        """To the next piece that is no space; none is left where its kind is empty."""
        self._kind, self._piece = "space", None
        while self._kind == "space":
            if self._at == len(self._text):
                self._kind = ""
                return
            found = _PIECE.match(self._text, self._at)
            if found is None:
                raise self._wrong("this can't be read (nor are tokens by name)")
            self._at, self._kind = found.end(), found.lastgroup or ""
            self._piece = found

    def _skip_lines(self) -> None:
        while self._kind == "line":
            self._go_on()

    def _expect(self, kind: str, called: str) -> str:
        """What the piece says, which must be of this kind; goes on behind it."""
        if self._piece is None or self._kind != kind:
            raise self._wrong(f"expected {called}")
        said = self._piece[kind]
        self._go_on()
        return said

    def _ways(self, *, nested: bool) -> _Ways:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise self._wrong("it is nested too deeply")
        ways = [self._sequence(nested)]
        while self._piece is not None and self._piece[0] == "|":
            self._go_on()
            self._skip_lines()
            ways.append(self._sequence(nested))
        self._depth -= 1
        return _Ways(tuple(ways))

    def _sequence(self, nested: bool) -> tuple[_Node, ...]:
        items: list[tuple[_Node, ...]] = []  # a text's letters are repeated together
        while self._piece is not None and self._piece[0] not in ("|", ")", "::="):
            kind, said = self._kind, self._piece[self._kind]
            if kind == "line" and not nested:
                break
            if kind == "times":
                items[-1:] = [(self._repeated(items[-1:], self._piece),)]
            elif kind != "line":
                items.append(self._item(kind, said))
            self._go_on()
        return tuple(chain.from_iterable(items))

    def _item(self, kind: str, inside: str) -> tuple[_Node, ...]:
        if kind == "text":
            codes = map(self._code, re.findall(_LETTER, inside))
            return tuple(_Letter(((code, code),)) for code in codes)
        if kind == "letters":
            return (self._letters(inside),)
        if kind == "name":
            return (_Named(inside),)
        if inside == ".":
            return (_Letter(((0, _LAST),)),)
        self._go_on()
        ways = self._ways(nested=True)
        if self._piece is None or self._piece[0] != ")":
            raise self._wrong("expected )")
        return (ways,)

    def _code(self, letter: str) -> int:
        if letter[2:]:
            code = int(letter[2:], 16)
            if code > _LAST or 0xD800 <= code < 0xE000:
                raise self._wrong("no letter has this code")
            return code
        return ord(_ESCAPES.get(letter[-1], letter[-1]) if letter[1:] else letter)

    def _letters(self, inside: str) -> _Letter:
        is_other = inside.startswith("^")
        ranges: list[tuple[int, int]] = []
        for found in _LETTERS.finditer(inside, int(is_other)):
            low, high = self._code(found[1]), self._code(found[2] or found[1])
            if low <= high:  # llama.cpp takes the others for empty
                ranges.append((low, high))
        if inside == "^" or not (ranges or is_other):  # to llama.cpp no letter at all
            raise self._wrong("no letter is in []")
        return _Letter(_outside(ranges) if is_other else tuple(ranges))

    def _repeated(self, last: list[tuple[_Node, ...]], found: re.Match[str]) -> _Times:
        if not last:
            raise self._wrong("nothing to repeat")
        node = last[0][0] if len(last[0]) == 1 else _Ways((last[0],))
        least, comma, most = found.groups()[-4:-1]
        if least is None:
            return _Times(node, int(found[0] == "+"), 1 if found[0] == "?" else None)
        low, high = int(least), int(most or least) if most or not comma else None
        if max(low, high or 0) > _MOST_REPEATS or (high is not None and high < low):
            raise self._wrong("too many repetitions, or fewer at most than at least")
        return _Times(node, low, high)


def _outside(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The code points that are in none of `ranges`."""
    left: list[tuple[int, int]] = []
    at = 0
    for low, high in sorted(ranges):
        if low > at:
            left.append((at, low - 1))
        at = max(at, high + 1)
    return tuple([*left, (at, _LAST)] if at <= _LAST else left)


def _parts(node: _Node) -> Iterator[_Node]:
    """`node`, and all that it is made of."""
    yield node
    if isinstance(node, _Times):
        yield from _parts(node.node)
    elif isinstance(node, _Ways):
        for inner in chain.from_iterable(node.ways):
            yield from _parts(inner)


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
            for node in _parts(rule)
            if isinstance(node, _Ways)
            for way in node.ways
            for run in self._runs(way)
        }
        ends = {
            run: expression
            for run in runs
            if (expression := self._joined(run)) and _ends_where_it_matches(expression)
        }
        good: set[str] = set()
        for run, expression in ends.items():
            first = run[0]
            assert isinstance(first, _Letter)
            if not any(_meet(first.ranges, other) for other in self._letters_beside(run)):
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
    return UNSATISFIABLE in check_schema(json.dumps(schema)).error
