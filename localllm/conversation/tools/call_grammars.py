"""Lark grammars of calls whose parameters are written one by one: between tags, or in a list.

A tool whose schema leaves names open (any names, or names that depend on one another) may be called
with any parameters in the same notation; the others are held to theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from localllm.conversation.tools.base import Grammar, NamedSchemas
from localllm.conversation.tools.lark import (
    any_of,
    any_value,
    in_any_order,
    slashed,
    spelled,
    text,
    whole_pattern,
)
from localllm.conversation.tools.schemas import kind_of, names_all, options_of, parameters
from localllm.conversation.tools.values import SpelledValues, Spelling

# Where any name, or any number, stands in a text.
_HERE = "\0"
ANY_NUMBER = "\1"
_ANY = {_HERE: r"/[^<>\"\s]+/", ANY_NUMBER: "/[0-9]{1,3}/"}
# What a schema that says nothing may turn out to be.
_KINDS = ("string", "number", "boolean", "null", "object", "array")


_ValueOf: TypeAlias = Callable[[Any, Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class TagGrammar:
    """How a notation writes a call with tagged parameters: `head` for a function's name, `before`
    for a parameter's key and the JSON type of its value, `after` a value and `end`.
    `text` is the Lark of any text and what follows it, where that is not all up to `after`.
    `spelling`: of what is no text; without one it is JSON, of whose values `json` makes the Lark.
    `loose`: newlines may be left out or doubled.
    `tokens`: everything between < and > is a control token."""

    head: Callable[[str], str]
    before: Callable[[str, str], str]
    after: str
    end: str
    text: str = ""
    spelling: Spelling | None = None
    json: _ValueOf = any_value
    loose: bool = False
    tokens: bool = False

    def lark(self, said: str) -> str:
        """The Lark of `said`, with any name where it leaves one open."""
        parts = re.split(f"([{_HERE}{ANY_NUMBER}])", said)
        return " ".join(_ANY.get(part) or self._fixed(part) for part in parts)

    def _fixed(self, said: str) -> str:
        if self.tokens:
            return spelled(said) or '""'
        if self.loose and said != "\n":
            return r" /\n{0,2}/ ".join(text(part) for part in said.split("\n") if part) + (
                r" /\n{0,2}/" if said.endswith("\n") else ""
            )
        if self.loose:
            return r"/\n{0,2}/"
        return text(said)

    def held(self, described: Mapping[str, Any]) -> str | None:
        """A text that is held to its pattern, up to the end of its closing tag: its end is where
        both match."""
        pattern = None if self.text else whole_pattern(described)
        if pattern is None:
            return None
        if self.tokens:
            return f"/{pattern}/ {spelled(self.after)}"
        closing = self.after.rstrip("\n") if self.loose else self.after
        return f"/{pattern}{slashed(re.escape(closing))}/ {self._fixed(self.after[len(closing) :])}"

    def free(self) -> str:
        """The rules of any text up to the end of its closing tag."""
        if self.text:
            return f"free: {self.text}"
        if self.tokens:
            return f"free: /(?s:.*)/ {spelled(self.after)}"
        closing = self.after.rstrip("\n") if self.loose else self.after
        return (
            "free: until "
            f"{self._fixed(self.after[len(closing) :])}\nuntil[suffix={text(closing)}]: "
            "/(?s:.*)/"
        )


def tagged_calls(
    tools: NamedSchemas, tags: TagGrammar, *, repeat: bool = False, closing: str = ""
) -> Grammar:
    """A call, or several behind one another (`repeat`), and `closing`."""
    if tags.spelling is not None:
        spelled_values = SpelledValues(tags.spelling)
    else:
        spelled_values = None
    value = tags.json if spelled_values is None else spelled_values.of
    rules: list[str] = []
    for f, (name, schema) in enumerate(tools):
        parts = [tags.lark(tags.head(name))]
        if names_all(schema):
            named: list[tuple[str, bool]] = []
            for p, (key, described, wanted) in enumerate(parameters(schema)):
                named.append((f"f{f}_p{p}", wanted))
                rules.append(f"f{f}_p{p}: {_parameter(tags, value, key, described, schema)}")
            parts.append(in_any_order(f"f{f}", named, rules))
        else:
            parts.append(f"f{f}_any*")
            rules.append(f"f{f}_any: {_parameter(tags, value, _HERE, None, schema)}")
        rules.append(f"f{f}: {' '.join(parts)}{' ' + tags.lark(tags.end) if tags.end else ''}")
    calls = f"({any_of(tools)}){'+' if repeat else ''}"
    more = spelled_values.rules if spelled_values is not None else ()
    whole = [calls] + [tags.lark(closing)] * bool(closing)
    return "lark", "\n".join([f"start: {' '.join(whole)}", *rules, *more, tags.free()]) + "\n"


def _parameter(
    tags: TagGrammar, value: _ValueOf, key: str, described: Any, root: Mapping[str, Any]
) -> str:
    """The Lark of a parameter: what its value may be, in alternatives that differ in what stands
    before them."""
    ways: dict[str, list[str]] = {}
    options = options_of(described, root)
    for option in [{"type": kind} for kind in _KINDS] if options is None else options:
        if "const" in option:
            kind = kind_of(option["const"])
        else:
            kind = str(option["type"])
        way = ways.setdefault(tags.before(key, kind), [])
        if kind != "string":
            way.append(f"{value(option, root)} {tags.lark(tags.after)}")
        elif "const" in option:
            way.append(f"{text(option['const'])} {tags.lark(tags.after)}")
        else:
            way.append(tags.held(option) or "free")
    # Any text is also what would be a number.
    return " | ".join(
        f"{tags.lark(before)} "
        f"{'free' if 'free' in way else '(' + ' | '.join(dict.fromkeys(way)) + ')'}"
        for before, way in ways.items()
    )


def listed_calls(
    tools: NamedSchemas,
    spelling: Spelling,
    head: Callable[[str], str],
    end: str,
    *,
    before: Callable[[str | None], str] | None = None,
    start: str = "call",
) -> Grammar:
    """Calls with their parameters in a list: the Lark of a function's `head` and of the `end`.
    `before` is the Lark in front of a parameter's value, of any parameter's where no key is given;
    without it, parameters are written as members of an object. `start` makes the whole of
    `call`s."""

    values = SpelledValues(spelling)

    def parameter(key: str | None, value: str) -> str:
        if before is not None:
            return f"{before(key)} {value}"
        if key is None:
            return spelling.any_member(value)
        return values.member(key, value)

    rules: list[str] = []
    for f, (name, schema) in enumerate(tools):
        if names_all(schema):
            members = [
                (key, parameter(key, values.of(described, schema)), wanted)
                for key, described, wanted in values.ordered(parameters(schema))
            ]
            body = values.sequence(members)
        else:
            rules.append(f"f{f}_any: {parameter(None, values.anything())}")
            body = f"(f{f}_any ({text(spelling.comma)} f{f}_any)*)?"
        rules.append(f"f{f}: {head(name)} {body} {end}")
    return "lark", "\n".join(
        [f"start: {start}", f"call: {any_of(tools)}", *rules, *values.rules]
    ) + "\n"
