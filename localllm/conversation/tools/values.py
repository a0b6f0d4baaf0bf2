"""Lark rules for nested values in notations that are not JSON: a record for each spelling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.conversation.tools.lark import any_value, in_any_order, in_order, json_value, text
from localllm.conversation.tools.schemas import options_of, parameters

# A schema that refers to itself has no end here: deeper than this, any value will do.
_MOST_NESTED = 8
# What is kept of a number's schema.
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ANYTHING = "v_any"
"""The rule of any value of a notation."""
Member = tuple[str, str, bool]
"""A member's key, the Lark of its value, and whether it must be there."""


def json_or_python(described: Any, root: Mapping[str, Any]) -> str:
    """The Lark of a value in JSON, of which true, false and null may be spelled as in Python too;
    `root` is where references point to."""
    words: list[bool | None] = []
    for option in options_of(described, root) or ({},):
        if "const" in option and isinstance(option["const"], bool | None):
            words.append(option["const"])
        elif option.get("type") == "boolean":
            words += [True, False]
        elif option.get("type") == "null":
            words.append(None)
        else:
            return any_value(described, root)
    return f"({' | '.join(map(_in_python, words))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How a notation writes values, each part as Lark: `any_text` and `this_text`; a `member` of a
    key and its value, where a rule for the value may be made; the member of any key; truths and
    null; an `item` of a list.
    `closed` ends numbers. `comma`, `brackets` and `braces` stand as they do in lists and objects.
    `any_order`: members come as the model orders them. `sorts`: by what the notation sorts them.
    `rules` are those that these parts need. `has_any`: a rule tells any value from what follows."""

    any_text: str
    this_text: Callable[[str], str]
    member: Callable[[str, str, Callable[[str], str]], str]
    any_member: Callable[[str], str]
    truth: Callable[[bool | None], str]
    item: Callable[[str], str] = str
    closed: str = ""
    comma: str = ","
    brackets: tuple[str, str] = ("[", "]")
    braces: tuple[str, str] = ("{", "}")
    any_order: bool = False
    sorts: Callable[[str], str] | None = None
    rules: tuple[str, ...] = ()
    has_any: bool = True


class SpelledValues:
    """Values in a notation of its own. What needs a rule is put into `rules`.

    A schema that says nothing of a value, or what has no rule here, allows any value of the
    notation.
    """

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.rules = list(spelling.rules)
        self._named: dict[str, str] = {}

    def of(self, described: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        """The Lark of a value; `root` is where references point to."""
        if depth >= _MOST_NESTED:
            return self.anything()
        options = options_of(described, root)
        if options is None:
            return self.anything()
        ways = dict.fromkeys(self._one(o, root, depth) for o in options)
        if ANYTHING in ways:
            return ANYTHING
        return f"({' | '.join(ways)})"

    def anything(self) -> str:
        if self.spelling.has_any and ANYTHING not in self._named:
            self._named[ANYTHING] = ANYTHING
            scalars = [
                self.spelling.any_text,
                self._number({"type": "number"}),
                *map(self.spelling.truth, (True, False, None)),
            ]
            items = self._listed(self.spelling.item(ANYTHING))
            members = self._listed(self.spelling.any_member(ANYTHING))
            containers = [
                self._between(self.spelling.brackets, items),
                self._between(self.spelling.braces, members),
            ]
            self.rules.append(f"{ANYTHING}: {' | '.join([*scalars, *containers])}")
        return ANYTHING

    def _number(self, schema: Mapping[str, Any]) -> str:
        return f"{json_value(schema)} {self.spelling.closed}"

    def _between(self, marks: tuple[str, str], lark: str) -> str:
        return f"{text(marks[0])} {lark} {text(marks[1])}"

    def _one(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        if "const" in option:
            return self._constant(option["const"])
        kind = option["type"]
        truth = self.spelling.truth
        if kind == "string":
            return self.spelling.any_text
        if kind in ("integer", "number"):
            return self._number({"type": kind, **{w: option[w] for w in _NUMBER if w in option}})
        if kind == "boolean":
            return f"({truth(True)} | {truth(False)})"
        if kind == "null":
            return truth(None)
        if kind == "object":
            return self._object(option, root, depth)
        if kind == "array":
            return self._array(option, root, depth)
        return self.anything()

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self.spelling.this_text(value)
        if value is None or isinstance(value, bool):
            return self.spelling.truth(value)
        if isinstance(value, int | float):
            return f"{text(json.dumps(value))} {self.spelling.closed}"
        return self.anything()

    def _object(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        named = self.ordered(parameters(option))
        if named:
            members = [(k, self.member(k, self.of(d, root, depth + 1)), w) for k, d, w in named]
            return self._between(self.spelling.braces, self.sequence(members))
        if not self.spelling.has_any:
            return ANYTHING
        extra = option.get("additionalProperties")
        if isinstance(extra, Mapping):
            value = self.of(extra, root, depth + 1)
        else:
            value = self.anything()
        members_of = self._listed(self.spelling.any_member(self._rule(value)))
        return self._between(self.spelling.braces, members_of)

    def _array(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        low = option.get("minItems", 0)
        if type(low) is not int or low < 0:
            low = 0
        high = option.get("maxItems")
        most = ""
        if type(high) is int and high >= max(1, low):
            most = str(high - 1)
        item = self._rule(self.spelling.item(self.of(option.get("items"), root, depth + 1)))
        items = f"{item} ({text(self.spelling.comma)} {item}){{{max(0, low - 1)},{most}}}"
        if not low:
            items = f"({items})?"
        return self._between(self.spelling.brackets, items)

    def ordered(self, members: Sequence[tuple[str, Any, bool]]) -> Sequence[tuple[str, Any, bool]]:
        """An object's members in the order that they are written in."""
        sorts = self.spelling.sorts
        if sorts is None:
            return members

        def place(member: tuple[str, Any, bool]) -> str:
            return sorts(member[0])

        return sorted(members, key=place)

    def member(self, key: str, value: str) -> str:
        return self.spelling.member(key, value, self._rule)

    def sequence(self, members: Sequence[Member]) -> str:
        """The Lark of an object's members, or a call's."""
        name = f"v{len(self.rules)}"
        named = [(f"{name}_p{i}", wanted) for i, (_, _, wanted) in enumerate(members)]
        self.rules += [f"{name}_p{i}: {member}" for i, (_, member, _) in enumerate(members)]
        comma = text(self.spelling.comma) if self.spelling.comma else ""
        if self.spelling.any_order:
            return in_any_order(name, named, self.rules, comma)
        return in_order(name, named, self.rules, comma)

    def _rule(self, lark: str) -> str:
        """The name of a rule of this Lark, which may begin with the rule's attributes."""
        name = self._named.get(lark)
        if name is not None:
            return name
        name = f"v_r{len(self._named)}"
        self._named[lark] = name
        if lark.startswith("["):
            self.rules.append(f"{name}{lark}")
        else:
            self.rules.append(f"{name}: {lark}")
        return name

    def _listed(self, lark: str) -> str:
        return f"({lark} ({text(self.spelling.comma)} {lark})*)?"


def _in_python(value: bool | None) -> str:
    return f"{text(json.dumps(value))} | {text(repr(value))}"


def python_values(bare: str = r"'([^'\\\n]|\\(?s:.))*'", *, any_order: bool = False) -> Spelling:
    """Python's values or JSON's, which models mix: either quotes, True or true. `bare`: a text
    between ', as a regular expression."""
    any_text = f"({json_value({'type': 'string'})} | /{bare}/)"

    def this_text(said: str) -> str:
        return f"({text(json.dumps(said, ensure_ascii=False))} | {text(repr(said))})"

    def member(key: str, value: str, _: object) -> str:
        return f'{this_text(key)} ": " {value}'

    def any_member(value: str) -> str:
        return f'{any_text} ": " {value}'

    def truth(value: bool | None) -> str:
        return f"({_in_python(value)})"

    return Spelling(
        any_text=any_text,
        this_text=this_text,
        member=member,
        any_member=any_member,
        truth=truth,
        comma=", ",
        any_order=any_order,
    )


PYTHON = python_values()
