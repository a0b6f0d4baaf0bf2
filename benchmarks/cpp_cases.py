"""Parse the cases of llama.cpp's tests/test-chat.cpp, with as much of C++ as that file needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/|^\#(?:[^\n]*\\\n)*[^\n]*)
    |(?P<raw>R"(?P<fence>[^(\s]*)\((?P<inside>.*?)\)(?P=fence)")
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<letter>'(?:[^'\\]|\\.)*')
    |(?P<number>\d[\w.]*)
    |(?P<name>[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)
    |(?P<sign>->|==|!=|<=|>=|&&|\|\||<<|>>|\+=|\+\+|--|.)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]+|u[0-9a-fA-F]{4}|[0-7]{1,3}|.)", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"0": b"\0", b"b": b"\b", b"f": b"\f"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_EMPTY: Mapping[str, Any] = {
    "role": "",
    "content": "",
    "reasoning_content": "",
    "tool_calls": [],
    "tool_call_id": "",
}
# The order of a message's members in an initializer list.
_MEMBERS = (
    "role",
    "content",
    "content_parts",
    "tool_calls",
    "reasoning_content",
    "tool_name",
    "tool_call_id",
)


class UnreadError(Exception):
    """A statement that needs more C++ than this parser supports."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case: template file, settings, text of the model, and the message that llama.cpp parses
    from it."""

    line: int
    template: str
    said: str
    settings: Mapping[str, Any]
    content: str
    reasoning: str
    calls: Sequence[tuple[str, str]]

    @property
    def name(self) -> str:
        """Return the line and the template."""
        return f"test-chat.cpp:{self.line} {Path(self.template).stem}"


@dataclass(slots=True)
class Found:
    """All cases of a file, and the line and reason for each that could not be parsed."""

    cases: list[Case] = field(default_factory=list)
    unread: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    said: Any
    line: int


@dataclass(slots=True)
class _Chain:
    """A case while its chained settings are parsed."""

    template: str
    said: str
    line: int
    settings: dict[str, Any] = field(default_factory=dict)


def read_cases(path: Path) -> Found:
    """Return the cases in the file at `path`, with loops and functions of cases expanded."""
    return _Reader(_tokens(path.read_text(encoding="utf-8"))).all()


def _tokens(source: str) -> list[_Token]:
    found, line = [], 1
    for match in _TOKEN.finditer(source):
        kind = str(match.lastgroup)
        if match["raw"] is not None:
            found.append(_Token("text", match["inside"], line))
        elif kind == "text":
            found.append(_Token("text", _unescaped(match["text"][1:-1]), line))
        elif kind != "space":
            found.append(_Token(kind, match.group(), line))
        line += match.group().count("\n")
    return found


def _unescaped(said: str) -> str:
    def letter(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code[:1] == b"x":
            return bytes([int(code[1:], 16)])
        if code[:1] == b"u" and len(code) > 1:
            return chr(int(code[1:], 16)).encode()
        return _LETTERS.get(code, code)

    return _ESCAPE.sub(letter, said.encode()).decode()


def message(
    content: str = "", reasoning: str = "", name: str = "", arguments: str = "", call_id: str = ""
) -> Any:
    """Return an assistant's message with at most one call, from the arguments of the file's
    function for this purpose."""
    calls = [[name, arguments, call_id]] if name or call_id else []
    return {
        **_EMPTY,
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }


# The file's functions that create messages.
_MAKERS: Mapping[str, Callable[..., Any]] = {
    "simple_assist_msg": message,
    "message_with_tool_calls": lambda name, arguments: message("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, why: message(
        "", why, name, arguments
    ),
    "message_with_content_and_tool_call": lambda text, name, arguments: message(
        text, "", name, arguments
    ),
    "message_with_reasoning_and_tool_call": lambda why, name, arguments: message(
        "", why, name, arguments
    ),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda why, text, calls: {
        **message(text, why),
        "tool_calls": [[*call, ""] for call in calls],
    },
    "std::string": lambda said="": said,
}


class _Reader:
    """Walks through the file's statements and records the values of names."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens, self._at = tokens, 0
        self._names: dict[str, Any] = {}
        self._functions: dict[str, tuple[int, list[str]]] = {}
        self._found = Found()

    def all(self) -> Found:
        """Parse constants first, then every function that contains a case."""
        while self._at < len(self._tokens):
            self._outside()
        for name, (at, parameters) in self._functions.items():
            if not parameters and name.startswith("test_"):
                self._at = at
                self._block()
        return self._found

    # Tokens.

    def _is(self, *said: str, ahead: int = 0) -> bool:
        at = self._at + ahead
        if at + len(said) > len(self._tokens):
            return False
        return all(
            t.said == s and t.kind != "text" for t, s in zip(self._tokens[at:], said, strict=False)
        )

    def _next(self) -> _Token:
        if self._at >= len(self._tokens):
            raise UnreadError("the file ends within a statement")
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, said: str) -> None:
        token = self._next()
        if token.said != said or token.kind == "text":
            raise UnreadError(f"{said!r} expected, not {str(token.said)[:40]!r}")

    def _skip(self) -> None:
        """Skip one token, or everything up to its closing bracket."""
        token = self._next()
        if token.kind != "sign" or token.said not in _CLOSING:
            return
        depth = 1
        while depth:
            token = self._next()
            if token.kind == "sign":
                depth += (token.said in _CLOSING) - (token.said in _CLOSING.values())

    def _skip_statement(self) -> None:
        while not self._is(";"):
            block = self._is("{")
            self._skip()
            if (
                block
                and not self._is(";")
                and not self._is(",")
                and not self._is(")")
                and not self._is(".")
            ):
                return
        self._next()

    # Statements.

    def _outside(self) -> None:
        """Parse a declaration outside of functions. Record it if it is a constant or a function of
        cases."""
        at, words = self._at, []
        while self._is("&") or (
            self._at < len(self._tokens) and self._tokens[self._at].kind == "name"
        ):
            words.append(str(self._next().said))
        if words and self._is("("):
            parameters_at = self._at + 1
            self._skip()
            if self._is("{"):
                inside = self._tokens[parameters_at : self._at - 1]
                behind = [t.said for t in inside[1:]] + [","]
                named = [
                    str(t.said)
                    for t, b in zip(inside, behind, strict=False)
                    if t.kind == "name" and b == ","
                ]
                # This parameter only controls the log and has no effect on a case.
                self._functions[words[-1]] = (self._at, [n for n in named if n != "detailed_debug"])
                self._skip()
                return
        self._at = at
        if words and self._declares():
            return
        self._at = at
        self._skip_statement()

    def _declares(self) -> bool:
        """Parse the declaration of a constant or variable, if there is one here."""
        words = 0
        while not (self._is("{") or self._is("=") or self._is(";")):
            if self._is("<"):
                while not self._is(">"):
                    self._next()
            elif not (self._tokens[self._at].kind == "name" or self._is("*") or self._is("&")):
                return False
            words += self._tokens[self._at].kind == "name"
            self._next()
        if words < 2:
            return False
        name = str(self._tokens[self._at - 1].said)
        told = [t.said for t in self._tokens[max(0, self._at - 4) : self._at - 1]]
        if self._is(";"):
            value: Any = dict(_EMPTY) if "common_chat_msg" in told else None
        else:
            if self._is("="):
                self._next()
            try:
                value = self._value()
            except UnreadError:
                return False
        if "common_chat_msg" in told and isinstance(value, list):
            value = {**_EMPTY, **dict(zip(_MEMBERS, value, strict=False))}
        self._names[name] = value
        self._take(";")
        return True

    def _block(self) -> None:
        self._take("{")
        kept = dict(self._names)
        while not self._is("}"):
            self._statement()
        self._next()
        self._names = kept

    def _statement(self) -> None:
        at, line = self._at, self._tokens[self._at].line
        if self._is("{"):
            self._block()
        elif self._is("for"):
            self._loop()
        elif self._is("if"):
            self._next()
            self._skip()
            self._skip() if self._is("{") else self._skip_statement()
        else:
            try:
                if self._tokens[at].kind == "name" and (
                    self._calls() or self._assigns() or self._declares()
                ):
                    return
            except UnreadError as e:
                if self._is_case(at):
                    self._found.unread.append((line, str(e)))
            self._at = at
            self._skip_statement()

    def _loop(self) -> None:
        """Run a loop over a list: its block once for each member."""
        self._next()
        at = self._at
        self._take("(")
        while not self._is(":"):
            if self._is(";") or self._is(")"):
                self._at = at
                self._skip()
                self._skip()
                return
            self._next()
        name = str(self._tokens[self._at - 1].said)
        self._next()
        members = self._value()
        self._take(")")
        body = self._at
        for member in members:
            self._at = body
            self._names[name] = member
            self._block()

    def _is_case(self, at: int) -> bool:
        name = self._names.get(str(self._tokens[at].said))
        return isinstance(name, _Tester) and [t.said for t in self._tokens[at + 1 : at + 4]] == [
            ".",
            "test",
            "(",
        ]

    def _calls(self) -> bool:
        """Parse a case, or a call of a function of cases."""
        name = str(self._tokens[self._at].said)
        if self._is_case(self._at):
            chain = self._value()
            self._take(";")
            self._found.cases.append(_case(chain))
            return True
        if name in self._functions and self._is("(", ahead=1):
            at, parameters = self._functions[name]
            self._next()
            given = self._arguments()
            self._take(";")
            back = self._at
            kept, self._names = (
                self._names,
                {**self._names, **dict(zip(parameters, given, strict=False))},
            )
            self._at = at
            self._block()
            self._at, self._names = back, kept
            return True
        return False

    def _assigns(self) -> bool:
        """`message.member = value;`"""
        name = str(self._tokens[self._at].said)
        if not (
            self._is(".", ahead=1)
            and self._is("=", ahead=3)
            and isinstance(self._names.get(name), dict)
        ):
            return False
        self._at += 2
        member = str(self._next().said)
        self._next()
        self._names[name] = {**self._names[name], member: self._value()}
        self._take(";")
        return True

    # Values.

    def _arguments(self) -> list[Any]:
        opening = str(self._next().said)
        values = []
        while not self._is(_CLOSING[opening]):
            values.append(self._value())
            if self._is(","):
                self._next()
        self._next()
        return values

    def _value(self) -> Any:
        value = self._part()
        while self._is("+"):
            self._next()
            value += self._part()
        return value

    def _part(self) -> Any:
        token = self._tokens[self._at]
        if token.kind == "text":
            said = ""
            while self._tokens[self._at].kind == "text":
                said += self._next().said
            value: Any = said
        elif self._is("{"):
            return self._arguments()
        elif token.kind == "number":
            value = float(self._next().said)
        elif token.kind == "name":
            value = self._named(str(self._next().said))
        else:
            raise UnreadError(f"{token.said!r} where a value is expected")
        while self._is("."):
            value = self._member(value)
        return value

    def _named(self, name: str) -> Any:
        if name in ("true", "false"):
            return name == "true"
        if self._is("("):
            given = self._arguments()
            if name == "peg_tester":
                return _Tester(given[0])
            if name not in _MAKERS:
                raise UnreadError(f"the function {name} is not known")
            return _MAKERS[name](*given)
        if name in self._names:
            return self._names[name]
        if name.startswith("COMMON_"):
            return name
        if name == "detailed_debug":
            return False
        raise UnreadError(f"the name {name} is not known")

    def _member(self, value: Any) -> Any:
        self._next()
        line = self._tokens[self._at].line
        name = str(self._next().said)
        if not self._is("("):
            raise UnreadError(f"the member {name} is not known")
        given = self._arguments()
        if isinstance(value, _Tester) and name == "test":
            return _Chain(value.template, given[0], line)
        if isinstance(value, _Chain):
            value.settings[name] = given[0] if given else True
            return value
        raise UnreadError(f"the function {name} of a value is not known")


@dataclass(frozen=True, slots=True)
class _Tester:
    template: str


def _case(chain: _Chain) -> Case:
    settings = chain.settings
    wanted = settings.get("expect", _EMPTY)
    calls = settings.get("expect_tool_calls", wanted["tool_calls"])
    return Case(
        line=chain.line,
        template=chain.template,
        said=chain.said,
        settings={k: v for k, v in settings.items() if not k.startswith("expect")},
        content=settings.get("expect_content", wanted["content"]),
        reasoning=settings.get("expect_reasoning", wanted["reasoning_content"]),
        calls=[(c[0], c[1]) for c in calls],
    )


def tool_of(said: Sequence[str]) -> dict[str, Any]:
    """Return a function tool as clients send it."""
    name, description, parameters = said[:3]
    described = {"name": name, "description": description, "parameters": json.loads(parameters)}
    return {"type": "function", "function": described}
