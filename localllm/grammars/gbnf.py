"""Translates llama.cpp's grammars (GBNF) into Lark character by character, to keep their meaning.

llguidance's lexer takes the longest match, llama.cpp takes each character by itself. A grammar
without recursion is one regular expression, so the difference does not matter. In a recursive
grammar every character becomes a terminal. Exceptions are parts that end at their first match and
that begin like no other terminal, e.g. a quoted string. They make it a hundred times faster. Source
of the syntax: llama.cpp, src/llama-grammar.cpp and grammars/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from localllm.grammars.expressions import Expressions, Piece, Rules
from localllm.grammars.reasons import UNSATISFIABLE, check_schema

_MAX_REPEATS = 100_000
_MAX_NESTED = 200
_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}
_CHARACTER = r'(?:\\[trn\\"\[\]]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|[^\\])'
_CHARACTER_RANGE = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?")
_TOKEN = re.compile(
    r"(?P<space>[ \t]+|\#[^\n]*)|(?P<line>\n)"
    r"|(?P<head>[a-zA-Z0-9_-]+)[ \t]*::=|(?P<name>[a-zA-Z0-9_-]+)"
    rf'|"(?P<text>(?:(?!"){_CHARACTER})*)"|\[(?P<letters>(?:(?!\]){_CHARACTER})+)\]'
    r"|(?P<times>[*+?]|\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\})|(?P<mark>[.()|])"
)
_LARK_START = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*:(?!:=))")
_OPEN: Piece = ("mark", "(?:")
_CLOSE: Piece = ("mark", ")")
_ALTERNATIVE: Piece = ("mark", "|")
_EMPTY: Piece = ("item", "")
_ANY_CHARACTER: Piece = ("item", "(?s:.)")


def lark_of(source: str) -> str:
    """`source` in Lark syntax; Lark is returned unchanged.

    Raises ValueError with the unreadable part and its position.
    """
    if _LARK_START.search(source):
        return source
    rules = _GbnfReader(source).rules()
    expressions = Expressions(rules)
    whole = expressions.rule("root")
    if whole is not None:
        return f"start: /{whole}/\n"
    terminals = _terminals(rules, expressions)
    numbers = {name: f"r{i}" for i, name in enumerate(rules)}
    lines = [f"start: {numbers['root']}"]
    for name, pieces in rules.items():
        items = [_in_lark(part, numbers) for part in _with_terminals(pieces, terminals)]
        lines.append(f"{numbers[name]}: {' '.join(items)}")
    return "\n".join(lines) + "\n"


class _GbnfReader:
    """Reads rules as llama.cpp does, into pieces in which every repeated item has brackets."""

    def __init__(self, source: str) -> None:
        self._text = source.replace("\r\n", "\n").replace("\r", "\n")
        self._position = 0
        self._rules: dict[str, Sequence[Piece]] = {}
        self._name = ""  # of the current rule
        self._pieces: list[Piece] = []
        self._referenced_rules: list[str] = []
        self._open_brackets: list[int] = []  # indexes of the open brackets
        self._last_item: int | None = None  # index of the item that a quantifier would repeat

    def rules(self) -> Rules:
        while self._position < len(self._text):
            match = _TOKEN.match(self._text, self._position)
            if match is None:
                raise self._syntax_error("this can't be parsed (tokens by name are not supported)")
            kind = match.lastgroup or ""
            if kind == "line":
                if self._pieces and not self._open_brackets and self._pieces[-1] != _ALTERNATIVE:
                    self._end_rule()
            elif kind != "space":
                self._add_token(kind, match)
            self._position = match.end()
        if self._open_brackets:
            raise self._syntax_error("expected )")
        self._end_rule()
        for name in ("root", *self._referenced_rules):
            if name not in self._rules:
                raise ValueError(f"it has no rule with the name {name}")
        return self._rules

    def _syntax_error(self, problem: str) -> ValueError:
        line = self._text.count("\n", 0, self._position) + 1
        return ValueError(
            f"{problem} in line {line}, at {self._text[self._position : self._position + 20]!r}"
        )

    def _end_rule(self) -> None:
        if self._name:
            self._end_alternative()
            self._rules[self._name] = tuple(self._pieces)
        self._name = ""
        self._pieces = []
        self._last_item = None

    def _end_alternative(self) -> None:
        if not self._pieces or self._pieces[-1] in (_OPEN, _ALTERNATIVE):
            self._pieces.append(_EMPTY)

    def _add_token(self, kind: str, match: re.Match[str]) -> None:
        if kind == "head" and self._name:
            raise self._syntax_error("expected the end of the line")
        if kind != "head" and not self._name:
            raise self._syntax_error("expected a rule")
        text = match[kind]
        if kind == "head":
            self._name = text
        elif kind == "times":
            self._repeat(match)
        elif kind == "mark" and text != ".":
            self._add_mark(text)
        else:
            self._last_item = len(self._pieces)
            self._pieces += self._pieces_of(kind, text)

    def _add_mark(self, mark: str) -> None:
        if mark == "(":
            self._open_brackets.append(len(self._pieces))
            if len(self._open_brackets) > _MAX_NESTED:
                raise self._syntax_error("it is nested too deeply")
            self._pieces.append(_OPEN)
            self._last_item = None
            return
        if mark == ")" and not self._open_brackets:
            raise self._syntax_error("expected no )")
        self._end_alternative()
        if mark == ")":
            self._pieces.append(_CLOSE)
            self._last_item = self._open_brackets.pop()
        else:
            self._pieces.append(_ALTERNATIVE)
            self._last_item = None

    def _pieces_of(self, kind: str, text: str) -> Sequence[Piece]:
        if kind == "text":
            code_classes = [
                f"[{self._hex_code(letter)}]" for letter in re.findall(_CHARACTER, text)
            ]
            return [("item", letter) for letter in code_classes] or [_EMPTY]
        if kind == "name":
            self._referenced_rules.append(text)
            return [("rule", text)]
        if kind == "mark":
            return [_ANY_CHARACTER]
        return [self._character_class(text)]

    def _hex_code(self, letter: str) -> str:
        """A character as a hexadecimal code, because signs have a meaning between brackets."""
        if len(letter) > 2:
            code = int(letter[2:], 16)
        elif len(letter) == 2:
            code = ord(_ESCAPES.get(letter[1], letter[1]))
        else:
            code = ord(letter)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._syntax_error("no character has this code")
        return f"\\x{{{code:06X}}}"

    def _character_class(self, class_text: str) -> Piece:
        negation = "^" if class_text.startswith("^") else ""
        ranges = ""
        for match in _CHARACTER_RANGE.finditer(class_text, len(negation)):
            low = self._hex_code(match[1])
            high = self._hex_code(match[2] or match[1])
            if low <= high:  # llama.cpp treats reversed ranges as empty
                ranges += f"{low}-{high}"
        if class_text == "^" or not (ranges or negation):  # matches no character in llama.cpp
            raise self._syntax_error("[] contains no character")
        if ranges:
            return ("item", f"[{negation}{ranges}]")
        return _ANY_CHARACTER

    def _repeat(self, match: re.Match[str]) -> None:
        if self._last_item is None:
            raise self._syntax_error("nothing to repeat")
        minimum, comma, maximum = match.groups()[-4:-1]
        low, high = _QUANTIFIERS.get(match[0], (0, None))
        if minimum is not None:
            low = int(minimum)
            high = None
            if maximum or not comma:
                high = int(maximum or minimum)
        if max(low, high or 0) > _MAX_REPEATS or (high is not None and high < low):
            raise self._syntax_error("too many repetitions, or the maximum is below the minimum")
        if high == 0:
            self._pieces[self._last_item :] = [_EMPTY]
            return
        times = f"{{{low},}}" if high is None else f"{{{low},{high}}}"
        self._pieces[self._last_item :] = [
            _OPEN,
            *self._pieces[self._last_item :],
            _CLOSE,
            ("mark", times),
        ]


# --- rules ----------------------------------------------------------------------------------------


def _in_lark(piece: Piece, numbers: dict[str, str]) -> str:
    kind, text = piece
    if kind == "rule":
        return numbers[text]
    if kind == "item":
        if text:
            return f"/{text}/"
        return '""'
    if piece == _OPEN:
        return "("
    return text


def _with_terminals(pieces: Sequence[Piece], terminals: dict[Sequence[Piece], str]) -> list[Piece]:
    """`pieces`, with each run that is a terminal as one item."""
    parts: list[Piece] = []
    position = 0
    while position < len(pieces):
        run = next((r for r in terminals if pieces[position : position + len(r)] == r), None)
        if run is None:
            parts.append(pieces[position])
            position += 1
        else:
            parts.append(("item", terminals[run]))
            position += len(run)
    return parts


def _terminals(rules: Rules, expressions: Expressions) -> dict[Sequence[Piece], str]:
    """Runs of pieces that may be terminals, with their expressions."""
    terminals: dict[Sequence[Piece], str] = {}
    for pieces in rules.values():
        for run in _runs_with_repetition(pieces):
            expression = expressions.of(run)
            if expression is None or run in terminals:
                continue
            if _may_be_terminal(run, expression, rules):
                terminals[run] = expression
    return terminals


def _may_be_terminal(run: Sequence[Piece], expression: str, rules: Rules) -> bool:
    """True if no other terminal begins like this run, and the run ends at its first match."""
    other_items: set[str] = set()
    for pieces in rules.values():
        for kind, text in _with_terminals(pieces, {run: ""}):
            if kind == "item" and text:
                other_items.add(text)
    first = run[0][1]
    if first in other_items or not _are_disjoint(expression, f"{expression}(?s:.)+"):
        return False
    return not other_items or _are_disjoint(first, "|".join(other_items))


def _runs_with_repetition(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Runs from one character to a later one at the same level, with a repetition between them."""
    for first, (kind, text) in enumerate(pieces):
        if kind != "item" or not text:
            continue
        depth = 0
        repeats = False
        for last in range(first + 1, len(pieces)):
            kind_of, mark = pieces[last]
            repeats |= kind_of == "mark" and mark.startswith("{")
            depth += (pieces[last] == _OPEN) - (pieces[last] == _CLOSE)
            if depth < 0 or (depth == 0 and pieces[last] == _ALTERNATIVE):
                break
            if depth == 0 and repeats and kind_of == "item":
                yield pieces[first : last + 1]


def _are_disjoint(first: str, second: str) -> bool:
    """True if no text matches both expressions."""
    patterns = [{"pattern": f"^(?:{expression})$"} for expression in (first, second)]
    schema = {"type": "string", "allOf": patterns}
    return UNSATISFIABLE in check_schema(json.dumps(schema)).error
