"""`oneOf`, `not` and `if`, which the grammar engine does not know, said with words that it does."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from localllm.errors import UnsupportedError
from localllm.grammars.deep_stack import on_deep_stack
from localllm.grammars.values import OPPOSITE, SPEAKS_OF, TYPES, kind_of, matches, picked, values_of

_MOST_NESTED = 6
# Pairs of alternatives are compared one by one, for so long.
_COMPARING_S = 1.0
_MOST_LETTERS = 2_000
# What a grammar may cost to make: about a second (llguidance counts its own steps).
_FUEL, _SIZE = 2_000_000, 100_000


def holds(schema: Any) -> str:
    """Why llguidance can make no grammar of `schema`, in one line; empty where it can."""
    from llguidance import LLMatcher

    said = json.dumps({"allOf": [schema]} if isinstance(schema, bool) else schema)
    try:
        return made_of(LLMatcher.grammar_from_json_schema(said))
    except ValueError as e:
        return str(e)


def made_of(grammar: str) -> str:
    """Why no matcher can be made of `grammar`, in one line; empty where one can. Which vocabulary
    it is for makes no difference."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=_FUEL, max_grammar_size=_SIZE, verbose_errors=False)
    try:
        said = on_deep_stack(
            grammar, lambda: LLMatcher.validate_grammar(grammar, None, limits=limits)
        ).strip()
    except UnsupportedError as e:
        said = str(e)
    return said.splitlines()[0] if said else ""


def empty(schema: Mapping[str, Any]) -> bool:
    """True where nothing matches `schema`, and llguidance can tell. Words that it does not know are
    passed over."""
    return "Unsatisfiable" in holds({**schema, "x-guidance": {"lenient": True}})


class Words:
    """Says the words of schemas whose references lead to `definitions`; what can't be said goes to
    `unsupported`."""

    def __init__(self, definitions: Mapping[str, Any], unsupported: set[str]) -> None:
        self._definitions, self._unsupported = definitions, unsupported
        self._until = time.monotonic() + _COMPARING_S
        self._known: dict[str, Any] = {}

    def in_known_words(self, schema: Any) -> Any:
        """`schema` with other words for those that are not known, inside it too."""
        if isinstance(schema, list):
            return [self.in_known_words(inner) for inner in schema]
        if not isinstance(schema, dict):
            return schema
        out = {word: self._inside(word, value) for word, value in schema.items()}
        more: list[Any] = []
        ways, unwanted, condition = (out.pop(word, None) for word in ("oneOf", "not", "if"))
        if ways is not None:
            more.append(self._one_of(ways, out))
        if unwanted is not None:
            more.append(self._other_than(unwanted, out))
        if condition is not None:
            more.append(self._either(*condition))
        more = [inner for inner in more if inner is not True]
        if len(more) == 1 and not out:
            return more[0]
        return picked(_with_parts(schema, out, more) or True, self._definition)

    def _inside(self, word: str, value: Any) -> Any:
        """The `value` of a word, with other words for those that are not known in the schemas that
        it holds."""
        if word in ("properties", "patternProperties"):
            return {name: self.in_known_words(inner) for name, inner in value.items()}
        if word in (
            "items",
            "additionalProperties",
            "prefixItems",
            "anyOf",
            "oneOf",
            "allOf",
            "not",
            "if",
        ):
            return self.in_known_words(value)
        return value

    def _other_than(self, unwanted: Any, beside: Mapping[str, Any]) -> Any:
        """What is not `unwanted`, among what the words `beside` it allow."""
        rest = self.negated(unwanted)
        if rest is not None:
            return rest
        if "const" in beside or "enum" in beside:
            values = [beside["const"]] if "const" in beside else beside["enum"]
            return {"enum": [v for v in values if self._disjoint(unwanted, {"const": v})]}
        if not self._disjoint(unwanted, beside):
            self._unsupported.add("not")
        return True

    def _either(self, condition: Any, then: Any, otherwise: Any) -> Any:
        unless = self.negated(condition)
        if unless is None:
            self._unsupported.add("if")
            return True
        ways = ({"allOf": [condition, then]}, {"allOf": [unless, otherwise]})
        return {"anyOf": [picked(way, self._definition) for way in ways]}

    def _one_of(self, ways: Sequence[Any], beside: Mapping[str, Any]) -> Any:
        """Exactly one of `ways`: any where no two of them meet, else each without those that it
        meets."""
        if len(ways) == 1:
            return ways[0]
        # A type of which two alternatives say nothing matches both.
        kinds = [k for k in TYPES if sum(self._open_to(way, k) for way in ways) < 2]
        if len(kinds) < len(TYPES):
            held = [k for k in kinds if k in self._kinds(beside)]
            beside = {**beside, "type": held}
            if not held:
                return False
        exclusive: list[Any] = []
        for i, way in enumerate(ways):
            without = self._without([*ways[:i], *ways[i + 1 :]], way, beside)
            if None in without:
                self._unsupported.add("oneOf")
                return {"anyOf": list(ways)}
            exclusive.append(
                picked({"allOf": [way, *without]}, self._definition) if without else way
            )
        if len(kinds) == len(TYPES):
            return {"anyOf": exclusive}
        return {"type": kinds if len(kinds) > 1 else kinds[0], "anyOf": exclusive}

    def _without(self, others: Sequence[Any], way: Any, beside: Mapping[str, Any]) -> list[Any]:
        """What is none of `others`, of those that `way` meets; ends with None behind the first of
        which that is not known."""
        without: list[Any] = []
        for other in others:
            if not self._disjoint(way, other, beside):
                without.append(self.negated(other))
                if without[-1] is None:
                    break
        return without

    def _open_to(self, schema: Any, kind: str, depth: int = 0) -> bool:
        """True where `schema` is seen to allow everything of a type."""
        if not isinstance(schema, dict) or depth > _MOST_NESTED:
            return schema is True
        for word, value in schema.items():
            if word == "allOf":
                good = all(self._open_to(inner, kind, depth + 1) for inner in value)
            elif word == "anyOf":
                good = any(self._open_to(inner, kind, depth + 1) for inner in value)
            elif word == "$ref":
                good = self._open_to(self._definition(value), kind, depth + 1)
            else:
                good = SPEAKS_OF.get(word, kind) != kind
            if not good:
                return False
        return True

    def _definition(self, reference: str) -> Any:
        """What a reference leads to, said in known words unless that is what is being done."""
        name = reference.removeprefix("#/$defs/")
        if name not in self._known:
            self._known[name] = self._definitions.get(name, True)  # within itself
            self._known[name] = self.in_known_words(self._known[name])
        return self._known[name]

    def definitions(self) -> dict[str, Any]:
        """All definitions in known words."""
        return {name: self._definition(name) for name in self._definitions}

    def _disjoint(self, one: Any, other: Any, beside: Mapping[str, Any] | None = None) -> bool:
        """True where nothing matches both, and that can be told."""
        if one is False or other is False:
            return True
        first, second = self._kinds(one), self._kinds(other)
        if not first & second:
            return True
        for mine, theirs in ((one, other), (other, one)):
            answers = {
                matches({"allOf": [mine, theirs]}, v, self._definition)
                for v in values_of(mine, deep=True) or ()
            }
            if values_of(mine, deep=True) is not None and None not in answers:
                return True not in answers
        if time.monotonic() > self._until or one is True or other is True:
            return False
        parts = [
            one,
            other,
            *([{k: v for k, v in beside.items() if k != "allOf"}] if beside else []),
        ]
        return empty(
            {"allOf": parts, "$defs": dict(self._definitions)}
            if self._definitions
            else {"allOf": parts}
        )

    def _kinds(self, schema: Any, depth: int = 0) -> set[str]:
        """The types of what may match, at least."""
        if not isinstance(schema, dict) or depth > _MOST_NESTED:
            return set(TYPES) if schema is not False else set()
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            return {"number" if k == "integer" else k for k in kinds}
        if "$ref" in schema:
            return self._kinds(self._definition(schema["$ref"]), depth + 1)
        if "enum" in schema or "const" in schema:
            return {kind_of(value) for value in schema.get("enum", [schema.get("const")])}
        if "anyOf" in schema:
            return set().union(*(self._kinds(way, depth + 1) for way in schema["anyOf"]))
        return set(TYPES)

    def negated(self, schema: Any, depth: int = 0) -> Any:
        """The schema of all that does not match `schema`; None where there is none."""
        if isinstance(schema, bool):
            return not schema
        if depth > _MOST_NESTED:
            return None
        ways: list[Any] = []
        for word, value in schema.items():
            rest = self._against(word, value, schema, depth)
            if rest is None:
                return None
            if rest is True:
                return True
            if rest is not False:
                ways += rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
        if not ways:
            return False
        return ways[0] if len(ways) == 1 else {"anyOf": ways}

    def _against(self, word: str, value: Any, schema: Mapping[str, Any], depth: int) -> Any:
        """The schema of what one word forbids."""
        if word in OPPOSITE:
            kind, other, step = OPPOSITE[word]
            return {"type": kind, other: value + step} if value + step >= 0 or not step else False
        if word == "type":
            return _other_types([value] if isinstance(value, str) else value)
        if word == "required":
            return {"anyOf": [{"type": "object", "properties": {name: False}} for name in value]}
        if word == "properties":
            return self._against_members(value, depth)
        if word in ("const", "enum"):
            return _other_values([value] if word == "const" else value)
        if word == "$ref":
            return self.negated(self._definition(value), depth + 1)
        if word not in ("allOf", "anyOf"):
            return None
        parts = [self.negated(inner, depth + 1) for inner in value]
        if word == "allOf":
            return _any_way(parts)
        return None if None in parts else {"allOf": parts}

    def _against_members(self, members: Mapping[str, Any], depth: int) -> Any:
        """The schema of objects in which one of these members is wrong."""
        ways: list[Any] = []
        for name, schema in members.items():
            wrong = self.negated(schema, depth + 1)
            if wrong is None or wrong is False:
                ways.append(wrong)
            else:
                ways.append({"type": "object", "required": [name], "properties": {name: wrong}})
        return _any_way(ways)


def _with_parts(schema: Mapping[str, Any], out: dict[str, Any], more: list[Any]) -> dict[str, Any]:
    """`out` with `more` parts of an allOf, in the order in which the words of `schema` have
    members."""
    if not more:
        return out
    first = next((w for w in schema if w in ("properties", "oneOf", "if", "allOf")), "properties")
    own = out.pop("allOf", [])
    both = [*own, *more] if first == "allOf" else [*more, *own]
    return {**out, "allOf": both} if first == "properties" else {"allOf": both, **out}


def _other_types(kinds: Sequence[str]) -> Any:
    """The schema of all other types; None where integers are one of these, as they are no type of
    their own."""
    others = [kind for kind in TYPES if kind not in kinds]
    if "integer" in kinds:
        return None
    return {"type": others} if others else False


def _any_way(ways: Sequence[Any]) -> Any:
    """Any of these schemas; None where one of them is not known."""
    if None in ways:
        return None
    possible = [way for way in ways if way is not False]
    return {"anyOf": possible} if possible else False


def _other_values(values: Sequence[Any]) -> Any:
    """The schema of everything but `values`; None where some are lists or objects."""
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        by_kind.setdefault(kind_of(value), []).append(value)
    if {"array", "object"} & set(by_kind) or sum(
        map(len, by_kind.get("string", []))
    ) > _MOST_LETTERS:
        return None
    ways: list[Any] = [{"type": [k for k in TYPES if k not in by_kind]}]
    if "boolean" in by_kind and len(set(by_kind["boolean"])) == 1:
        ways.append({"const": not by_kind["boolean"][0]})
    if "string" in by_kind:
        ways.append({"type": "string", "pattern": f"^{other_texts(by_kind['string'])}$"})
    if "number" in by_kind:
        marks = sorted(set(by_kind["number"]))
        ways.append({"type": "number", "exclusiveMaximum": marks[0]})
        ways += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in pairwise(marks)
        ]
        ways.append({"type": "number", "exclusiveMinimum": marks[-1]})
    return {"anyOf": ways}


def other_texts(texts: Sequence[str]) -> str:
    """An expression for every text but these."""
    tails: dict[str, list[str]] = {}
    for text in texts:
        if text:
            tails.setdefault(text[0], []).append(text[1:])
    ways = [f"{re.escape(letter)}{other_texts(rest)}" for letter, rest in tails.items()]
    others = f"[^{''.join(map(re.escape, tails))}]" if tails else "(?s:.)"
    expression = f"(?:{'|'.join([*ways, f'{others}(?s:.)*'])})"
    return expression if "" in texts else f"{expression}?"
