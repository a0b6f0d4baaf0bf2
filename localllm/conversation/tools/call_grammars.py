"""Lark grammars of calls whose parameters are written one by one: between tags, or in a list.

If a tool's schema leaves parameter names open (any names, or names that depend on one another), its
calls may have any parameters in the same format. Other tools are restricted to their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from localllm.conversation.tools.base import Grammar, NamedSchemas
from localllm.conversation.tools.lark import (
    any_of,
    any_value,
    full_pattern,
    in_any_order,
    slashed,
    spelled,
    text,
)
from localllm.conversation.tools.schemas import kind_of_option, names_all, options_of, parameters
from localllm.conversation.tools.values import SpelledValues, Spelling

# Placeholders in the texts of a TagGrammar: the name of a function or parameter, any number, and
# the JSON type of a value.
NAME = "\0"
ANY_NUMBER = "\1"
KIND = "\2"
# The Lark of a placeholder that is left open.
_ANY_LARK = {NAME: r"/[^<>\"\s]+/", ANY_NUMBER: "/[0-9]{1,3}/"}
# The types to offer if a schema states no type.
_JSON_TYPES = ("string", "number", "boolean", "null", "object", "array")


_ValueOf: TypeAlias = Callable[[Any, Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class TagGrammar:
    """How a format writes a call with tagged parameters.

    - `head`: the text that opens a function, with its NAME.
    - `before`: the text before a value, with the parameter's NAME, and the KIND if the format
      writes it.
    - `after`: the text after a value.
    - `end`: the end of the call.
    - `kind_text`: returns the format's word for a JSON type.
    - `text`: the Lark of any text and its end, if that is not simply all text up to `after`.
    - `spelling`: the spelling of values other than text. The default is JSON.
    - `json`: makes the Lark of a JSON value.
    - `loose`: newlines may be missing or doubled.
    - `tokens`: everything between < and > is a control token.
    """

    head: str
    before: str
    after: str
    end: str
    kind_text: Callable[[str], str] = str
    text: str = ""
    spelling: Spelling | None = None
    json: _ValueOf = any_value
    loose: bool = False
    tokens: bool = False

    def opening(self, name: str) -> str:
        """The text that opens a call of this function."""
        return self.head.replace(NAME, name)

    def before_value(self, name: str, kind: str) -> str:
        """The text before a value of this JSON type of this parameter."""
        return self.before.replace(KIND, self.kind_text(kind)).replace(NAME, name)

    def lark(self, literal: str) -> str:
        """The Lark of `literal`. A placeholder left in it matches any name or number."""
        parts = re.split(f"([{NAME}{ANY_NUMBER}])", literal)
        return " ".join(_ANY_LARK.get(part) or self._fixed_text(part) for part in parts)

    def _fixed_text(self, literal: str) -> str:
        if self.tokens:
            return spelled(literal) or '""'
        if not self.loose:
            return text(literal)
        if literal == "\n":
            return r"/\n{0,2}/"
        lines = r" /\n{0,2}/ ".join(text(part) for part in literal.split("\n") if part)
        if literal.endswith("\n"):
            lines += r" /\n{0,2}/"
        return lines

    def _closing(self) -> tuple[str, str]:
        """The closing tag of a value, and the newlines after it that may be missing or doubled."""
        if not self.loose:
            return self.after, ""
        tag = self.after.rstrip("\n")
        return tag, self.after[len(tag) :]

    def pattern_text(self, described: Mapping[str, Any]) -> str | None:
        """The Lark of a text with a pattern, up to the end of its closing tag.

        The text ends at the first point where pattern and tag both match. None if there is no
        usable pattern.
        """
        if self.text:
            return None
        pattern = full_pattern(described)
        if pattern is None:
            return None
        if self.tokens:
            return f"/{pattern}/ {spelled(self.after)}"
        tag, newlines = self._closing()
        return f"/{pattern}{slashed(re.escape(tag))}/ {self._fixed_text(newlines)}"

    def free(self) -> str:
        """The rules of any text up to the end of its closing tag."""
        if self.text:
            return f"free: {self.text}"
        if self.tokens:
            return f"free: /(?s:.*)/ {spelled(self.after)}"
        tag, newlines = self._closing()
        return f"free: until {self._fixed_text(newlines)}\nuntil[suffix={text(tag)}]: /(?s:.*)/"


def tagged_calls(
    tools: NamedSchemas, tags: TagGrammar, *, repeat: bool = False, closing: str = ""
) -> Grammar:
    """The grammar of one call, or of several in a row (`repeat`), followed by `closing`."""
    value = tags.json
    value_rules: Sequence[str] = ()
    if tags.spelling is not None:
        spelled_values = SpelledValues(tags.spelling)
        value = spelled_values.of
        value_rules = spelled_values.rules
    rules: list[str] = []
    for number, (name, schema) in enumerate(tools):
        parts = [tags.lark(tags.opening(name))]
        if names_all(schema):
            rule_names: list[tuple[str, bool]] = []
            for parameter_number, (key, described, is_required) in enumerate(parameters(schema)):
                rule_names.append((f"f{number}_p{parameter_number}", is_required))
                rules.append(
                    f"f{number}_p{parameter_number}: "
                    f"{_parameter(tags, value, key, described, schema)}"
                )
            parts.append(in_any_order(f"f{number}", rule_names, rules))
        else:
            parts.append(f"f{number}_any*")
            rules.append(f"f{number}_any: {_parameter(tags, value, NAME, None, schema)}")
        if tags.end:
            parts.append(tags.lark(tags.end))
        rules.append(f"f{number}: {' '.join(parts)}")
    start = f"start: ({any_of(tools)})"
    if repeat:
        start += "+"
    if closing:
        start += f" {tags.lark(closing)}"
    return "lark", "\n".join([start, *rules, *value_rules, tags.free()]) + "\n"


def _parameter(
    tags: TagGrammar, value: _ValueOf, key: str, described: Any, root: Mapping[str, Any]
) -> str:
    """The Lark of a parameter: its possible values, grouped by the text before them."""
    values_by_lead: dict[str, list[str]] = {}
    options = options_of(described, root)
    if options is None:
        options = [{"type": kind} for kind in _JSON_TYPES]
    for option in options:
        kind = kind_of_option(option)
        values_of_lead = values_by_lead.setdefault(tags.before_value(key, kind), [])
        if kind != "string":
            values_of_lead.append(f"{value(option, root)} {tags.lark(tags.after)}")
        elif "const" in option:
            values_of_lead.append(f"{text(option['const'])} {tags.lark(tags.after)}")
        else:
            values_of_lead.append(tags.pattern_text(option) or "free")
    alternatives = []
    for lead, values_of_lead in values_by_lead.items():
        values_text = f"({' | '.join(dict.fromkeys(values_of_lead))})"
        if "free" in values_of_lead:  # any text also covers numbers and the like
            values_text = "free"
        alternatives.append(f"{tags.lark(lead)} {values_text}")
    return " | ".join(alternatives)


def listed_calls(
    tools: NamedSchemas,
    spelling: Spelling,
    head: Callable[[str], str],
    end: str,
    *,
    before: Callable[[str | None], str] | None = None,
    start: str = "call",
) -> Grammar:
    """The grammar of calls with a parameter list.

    `head` returns the Lark of a function's head, and `end` is the Lark of its end. `before` returns
    the Lark before a parameter's value; the key None means any parameter. Without `before`,
    parameters are written like members of an object. `start` is the Lark of the complete block,
    with `call` for a call.
    """

    values = SpelledValues(spelling)

    def parameter(key: str | None, value: str) -> str:
        if before is not None:
            return f"{before(key)} {value}"
        if key is None:
            return spelling.any_member(value)
        return values.member(key, value)

    rules: list[str] = []
    for number, (name, schema) in enumerate(tools):
        if names_all(schema):
            members = [
                (key, parameter(key, values.of(described, schema)), is_required)
                for key, described, is_required in values.ordered(parameters(schema))
            ]
            body = values.sequence(members)
        else:
            rules.append(f"f{number}_any: {parameter(None, values.anything())}")
            body = f"(f{number}_any ({text(spelling.comma)} f{number}_any)*)?"
        rules.append(f"f{number}: {head(name)} {body} {end}")
    first_rules = [f"start: {start}", f"call: {any_of(tools)}"]
    return "lark", "\n".join([*first_rules, *rules, *values.rules]) + "\n"
