"""Lark rules for nested values in notations that are not JSON: one class for each spelling."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from localllm.conversation.tools.lark import any_value, in_any_order, in_order, json_value, text
from localllm.conversation.tools.schemas import options_of, parameters

# A schema that refers to itself has no end here: deeper than this, any value will do.
_MOST_NESTED = 8
# What is kept of a number's schema.
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
Member = tuple[str, str, bool]
"""A member's key, the Lark of its value, and whether it must be there."""


class Values(ABC):
    """Makes the Lark of values from their schemas; what needs a rule of its own is put into
    `rules`."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    @abstractmethod
    def of(self, described: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        """The Lark of a value; `root` is where references point to."""


class JsonValues(Values):
    """JSON, whose schema says it all. `python`: true, false and null may be spelled as in Python
    too."""

    def __init__(self, *, python: bool = False) -> None:
        super().__init__()
        self._python = python

    def of(self, described: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        if not self._python:
            return any_value(described, root)
        words: list[bool | None] = []
        for option in options_of(described, root) or ({},):
            if "const" in option and isinstance(option["const"], bool | None):
                words.append(option["const"])
            elif option.get("type") in ("boolean", "null"):
                words += [True, False] if option["type"] == "boolean" else [None]
            else:
                return any_value(described, root)
        return f"({' | '.join(f'{text(json.dumps(w))} | {text(repr(w))}' for w in words)})"


class SpelledValues(Values):
    """Values in a notation of its own, which a subclass spells.

    A schema that says nothing of a value, or what has no rule here, allows any value of the
    notation. `comma`, `brackets` and `braces` stand as they do in the notation's lists and objects.
    `any_order`: members come as the model orders them.
    """

    comma: ClassVar[str] = ","
    brackets: ClassVar[tuple[str, str]] = ("[", "]")
    braces: ClassVar[tuple[str, str]] = ("{", "}")
    any_order: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._named: dict[str, str] = {}

    @abstractmethod
    def any_text(self) -> str:
        """The Lark of any text."""

    @abstractmethod
    def this_text(self, said: str) -> str:
        """The Lark of this very text."""

    @abstractmethod
    def member(self, key: str, value: str) -> str:
        """The Lark of a member called `key` with the Lark of its value."""

    @abstractmethod
    def any_member(self, value: str) -> str:
        """The Lark of a member of any name."""

    def closed(self, scalar: str) -> str:
        """The Lark of a number or a word with what ends it."""
        return scalar

    def item(self, value: str) -> str:
        return value

    def truth(self, value: bool | None) -> str:
        return self.closed(text(json.dumps(value)))

    def ordered(self, members: Sequence[tuple[str, Any, bool]]) -> Sequence[tuple[str, Any, bool]]:
        """An object's members in the order that they are written in."""
        return members

    def of(self, described: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        """The Lark of a value; `root` is where references point to."""
        options = options_of(described, root) if depth < _MOST_NESTED else None
        if options is None:
            return self.anything()
        return "(" + " | ".join(dict.fromkeys(self._one(o, root, depth) for o in options)) + ")"

    def anything(self) -> str:
        name = "v_any"
        if name not in self._named:
            self._named[name] = name
            items, members = (
                self._separated(self.item(name)),
                self._separated(self.any_member(name)),
            )
            scalars = [
                self.any_text(),
                self.closed(json_value({"type": "number"})),
                *map(self.truth, (True, False, None)),
            ]
            lists = [f"{text(self.brackets[0])} {items}? {text(self.brackets[1])}"]
            objects = [f"{text(self.braces[0])} {members}? {text(self.braces[1])}"]
            self.rules.append(f"{name}: {' | '.join([*scalars, *lists, *objects])}")
        return name

    def _one(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        if "const" in option:
            return self._constant(option["const"])
        kind = option["type"]
        if kind == "string":
            return self.any_text()
        if kind in ("integer", "number"):
            return self.closed(
                json_value({"type": kind, **{w: option[w] for w in _NUMBER if w in option}})
            )
        if kind == "boolean":
            return f"({self.truth(True)} | {self.truth(False)})"
        if kind == "null":
            return self.truth(None)
        if kind == "object":
            return self._object(option, root, depth)
        return self._array(option, root, depth) if kind == "array" else self.anything()

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self.this_text(value)
        if value is None or isinstance(value, bool):
            return self.truth(value)
        return (
            self.closed(text(json.dumps(value)))
            if isinstance(value, int | float)
            else self.anything()
        )

    def _object(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        named = self.ordered(parameters(option))
        if not named:
            return self.open_object(option, root, depth)
        opened, closed = map(text, self.braces)
        members = [
            (key, self.member(key, self.of(d, root, depth + 1)), wanted) for key, d, wanted in named
        ]
        return f"{opened} {self.sequence(members)} {closed}"

    def open_object(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """The Lark of an object whose schema leaves the names of its members open."""
        extra = option.get("additionalProperties")
        value = self.of(extra, root, depth + 1) if isinstance(extra, Mapping) else self.anything()
        opened, closed = map(text, self.braces)
        return f"{opened} {self._separated(self.any_member(self.rule(value)))}? {closed}"

    def _array(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        low, high = option.get("minItems", 0), option.get("maxItems")
        low = low if type(low) is int and low >= 0 else 0
        high = high if type(high) is int and high >= max(1, low) else None
        opened, closed = map(text, self.brackets)
        item = self.rule(self.item(self.of(option.get("items"), root, depth + 1)))
        more = (
            f"({text(self.comma)} {item}){{{max(0, low - 1)},{'' if high is None else high - 1}}}"
        )
        return f"{opened} {item} {more} {closed}" if low else f"{opened} ({item} {more})? {closed}"

    def sequence(self, members: Sequence[Member]) -> str:
        """The Lark of an object's members, or a call's."""
        name = f"v{len(self.rules)}"
        named = [(f"{name}_p{i}", wanted) for i, (_, _, wanted) in enumerate(members)]
        self.rules += [f"{name}_p{i}: {member}" for i, (_, member, _) in enumerate(members)]
        comma = text(self.comma) if self.comma else ""
        return (in_any_order if self.any_order else in_order)(name, named, self.rules, comma)

    def rule(self, lark: str) -> str:
        """The name of a rule of this Lark, which may begin with the rule's attributes."""
        name = self._named.get(lark)
        if name is None:
            name = self._named[lark] = f"v_r{len(self._named)}"
            self.rules.append(f"{name}{lark if lark.startswith('[') else f': {lark}'}")
        return name

    def _separated(self, lark: str) -> str:
        return f"({lark} ({text(self.comma)} {lark})*)"


class QuotedValues(SpelledValues):
    """Gemma's: a control token for a text's quotes and none at keys."""

    def __init__(self, quote: str, names: str) -> None:
        super().__init__()
        self._quote, self._names = quote, names

    def any_text(self) -> str:
        return f"{self._quote} /(?s:.*)/ {self._quote}"

    def this_text(self, said: str) -> str:
        return (
            f"{self._quote} {text(said)} {self._quote}"
            if said
            else (f"{self._quote} {self._quote}")
        )

    def member(self, key: str, value: str) -> str:
        if re.fullmatch(self._names, key):
            return f"{text(key + ':')} {value}"
        return f'{self.this_text(key)} ":" {value}'

    def any_member(self, value: str) -> str:
        return f'(/{self._names}/ | {self.any_text()}) ":" {value}'

    def truth(self, value: bool | None) -> str:
        """As JSON; the templates write Python's None."""
        return '("null" | "None")' if value is None else text(json.dumps(value))

    def ordered(self, members: Sequence[tuple[str, Any, bool]]) -> Sequence[tuple[str, Any, bool]]:
        """As Gemma's templates sort them (Jinja's dictsort passes over case)."""
        return sorted(members, key=lambda m: m[0].lower())


class PythonValues(SpelledValues):
    """Python's or JSON's, which models mix: either quotes, True or true."""

    comma = ", "
    # A text between ', as a regular expression.
    bare: ClassVar[str] = r"'([^'\\\n]|\\(?s:.))*'"

    def any_text(self) -> str:
        return f"({json_value({'type': 'string'})} | /{self.bare}/)"

    def this_text(self, said: str) -> str:
        return f"({text(json.dumps(said, ensure_ascii=False))} | {text(repr(said))})"

    def truth(self, value: bool | None) -> str:
        return f"({text(json.dumps(value))} | {text(repr(value))})"

    def member(self, key: str, value: str) -> str:
        return f'{self.this_text(key)} ": " {value}'

    def any_member(self, value: str) -> str:
        return f'{self.any_text()} ": " {value}'
