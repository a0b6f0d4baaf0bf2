"""Lark rules for nested values in formats other than JSON: one record per spelling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.conversation.tools.lark import any_value, in_any_order, in_order, json_value, text
from localllm.conversation.tools.schemas import options_of, parameters

# A recursive schema would never end. At this depth, any value is allowed.
_MAX_NESTED = 8
# The keywords of a number's schema that are kept.
_NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ANYTHING = "v_any"
"""The name of the Lark rule for any value."""
Member = tuple[str, str, bool]
"""A member's key, the Lark of its value, and whether it must be there."""


def json_or_python(described: Any, root: Mapping[str, Any]) -> str:
    """The Lark of a JSON value in which true, false and null may also be spelled as in Python.

    References are resolved within `root`.
    """
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
    """How a format writes values. Each part is Lark, or a function that returns Lark.

    - `any_text`, `this_text`: any text, and one given text.
    - `member`: a key with its value. It may create a rule for the value.
    - `any_member`: a member with any key.
    - `truth`: booleans and null.
    - `item`: an item of a list.
    - `closed`: the text that ends a number.
    - `comma`, `brackets`, `braces`: the punctuation of lists and objects.
    - `any_order`: the model chooses the order of members.
    - `sorts`: the sort key of members, if the format sorts them.
    - `rules`: rules that these parts need.
    - `has_any`: a rule can separate any value from the text after it.
    """

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
    """Values in a format's own spelling. New rules are added to `rules`.

    If a schema states no type, or has no rule here, any value of the format is allowed.
    """

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.rules = list(spelling.rules)
        self._rule_names: dict[str, str] = {}

    def of(self, described: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        """The Lark of a value. References are resolved within `root`."""
        if depth >= _MAX_NESTED:
            return self.anything()
        options = options_of(described, root)
        if options is None:
            return self.anything()
        alternatives = dict.fromkeys(self._option_value(option, root, depth) for option in options)
        if ANYTHING in alternatives:
            return ANYTHING
        return f"({' | '.join(alternatives)})"

    def anything(self) -> str:
        if self.spelling.has_any and ANYTHING not in self._rule_names:
            self._rule_names[ANYTHING] = ANYTHING
            scalars = [
                self.spelling.any_text,
                self._number({"type": "number"}),
                *map(self.spelling.truth, (True, False, None)),
            ]
            items = self._repeated(self.spelling.item(ANYTHING))
            members = self._repeated(self.spelling.any_member(ANYTHING))
            containers = [
                self._enclosed(self.spelling.brackets, items),
                self._enclosed(self.spelling.braces, members),
            ]
            self.rules.append(f"{ANYTHING}: {' | '.join([*scalars, *containers])}")
        return ANYTHING

    def _number(self, schema: Mapping[str, Any]) -> str:
        return f"{json_value(schema)} {self.spelling.closed}"

    def _enclosed(self, marks: tuple[str, str], lark: str) -> str:
        return f"{text(marks[0])} {lark} {text(marks[1])}"

    def _option_value(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        if "const" in option:
            return self._constant(option["const"])
        kind = option["type"]
        truth = self.spelling.truth
        if kind == "string":
            return self.spelling.any_text
        if kind in ("integer", "number"):
            return self._number(
                {"type": kind, **{w: option[w] for w in _NUMBER_WORDS if w in option}}
            )
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
        ordered_parameters = self.ordered(parameters(option))
        if ordered_parameters:
            members = [
                (key, self.member(key, self.of(schema, root, depth + 1)), is_required)
                for key, schema, is_required in ordered_parameters
            ]
            return self._enclosed(self.spelling.braces, self.sequence(members))
        if not self.spelling.has_any:
            return ANYTHING
        additional = option.get("additionalProperties")
        if isinstance(additional, Mapping):
            value = self.of(additional, root, depth + 1)
        else:
            value = self.anything()
        members_of = self._repeated(self.spelling.any_member(self._rule(value)))
        return self._enclosed(self.spelling.braces, members_of)

    def _array(self, option: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        min_items = option.get("minItems", 0)
        if type(min_items) is not int or min_items < 0:
            min_items = 0
        max_items = option.get("maxItems")
        further_items = ""
        if type(max_items) is int and max_items >= max(1, min_items):
            further_items = str(max_items - 1)
        item = self._rule(self.spelling.item(self.of(option.get("items"), root, depth + 1)))
        bounds = f"{{{max(0, min_items - 1)},{further_items}}}"
        items = f"{item} ({text(self.spelling.comma)} {item}){bounds}"
        if not min_items:
            items = f"({items})?"
        return self._enclosed(self.spelling.brackets, items)

    def ordered(self, members: Sequence[tuple[str, Any, bool]]) -> Sequence[tuple[str, Any, bool]]:
        """An object's members in the order in which they are written."""
        sort_key = self.spelling.sorts
        if sort_key is None:
            return members

        def place(entry: tuple[str, Any, bool]) -> str:
            return sort_key(entry[0])

        return sorted(members, key=place)

    def member(self, key: str, value: str) -> str:
        return self.spelling.member(key, value, self._rule)

    def sequence(self, members: Sequence[Member]) -> str:
        """The Lark of the members of an object or a call."""
        name = f"v{len(self.rules)}"
        rule_names = [
            (f"{name}_p{i}", is_required) for i, (_, _, is_required) in enumerate(members)
        ]
        self.rules += [f"{name}_p{i}: {member}" for i, (_, member, _) in enumerate(members)]
        comma = text(self.spelling.comma) if self.spelling.comma else ""
        if self.spelling.any_order:
            return in_any_order(name, rule_names, self.rules, comma)
        return in_order(name, rule_names, self.rules, comma)

    def _rule(self, lark: str) -> str:
        """The name of a rule for this Lark, which may begin with the rule's attributes."""
        name = self._rule_names.get(lark)
        if name is not None:
            return name
        name = f"v_r{len(self._rule_names)}"
        self._rule_names[lark] = name
        if lark.startswith("["):
            self.rules.append(f"{name}{lark}")
        else:
            self.rules.append(f"{name}: {lark}")
        return name

    def _repeated(self, lark: str) -> str:
        return f"({lark} ({text(self.spelling.comma)} {lark})*)?"


def _in_python(value: bool | None) -> str:
    return f"{text(json.dumps(value))} | {text(repr(value))}"


def python_values(bare: str = r"'([^'\\\n]|\\(?s:.))*'", *, any_order: bool = False) -> Spelling:
    """The spelling of Python or JSON values, which models mix: either quotes, True or true.

    `bare` is the regular expression of a text in single quotes.
    """
    any_text = f"({json_value({'type': 'string'})} | /{bare}/)"

    def this_text(literal: str) -> str:
        return f"({text(json.dumps(literal, ensure_ascii=False))} | {text(repr(literal))})"

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
