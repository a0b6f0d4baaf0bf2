"""JSON values as Lark: members in any order, or in the schema's, and numbers with an end.

llguidance's own grammar of a schema has the members of an object in one order and lets numbers go
on without end. Here objects, lists and plain values are rules; what else a schema says of a value
stays a schema of llguidance's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain, combinations, product
from typing import Any

from localllm.grammars.endings import reachable, with_ends
from localllm.grammars.members import (
    OBJECT,
    all_taken,
    as_name,
    both_of,
    kinds_of,
    merged,
    name_matches,
    overlap,
)
from localllm.grammars.schema_words import empty
from localllm.grammars.translator import IN_ORDER
from localllm.grammars.values import picked, without_endless

# Between JSON's parts: nothing, a space, or a new line and its indentation. Without a limit a small
# model fills its window with space (llama.cpp's own grammars, common/json-schema-to-grammar.cpp,
# draw the same line).
SPACE = r"( |\n{1,2}[ \t]{0,20})?"
# As many digits as llama.cpp's grammars have; ids of others are longer (LARGEST in translator.py).
_NUMBER = r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?"
_TERMINALS: Mapping[str, str] = {
    "string": r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt]|\\u(00[01][0-9a-fA-F]|007[fF]))*"/',
    # A name that needs no escapes.
    "name": r'/"[^"\\\x00-\x1F\x7F]*"/',
    "number": f"/{_NUMBER}/",
    "integer": "/-?(0|[1-9][0-9]{0,17}|[1-3][0-9]{18})/",
    "boolean": "/true|false/",
    "null": '"null"',
    "open": rf"/\{{{SPACE}/", "close": rf"/{SPACE}\}}/", "colon": f"/{SPACE}:{SPACE}/",
    "comma": f"/{SPACE},{SPACE}/",
    # Nothing is both.
    "never": "/a/ & /b/",
    "first": rf"/\[{SPACE}/", "last": rf"/{SPACE}\]/",
}  # fmt: skip
# Members have a bit each.
_MOST_FREE = 64
_MOST_ITEMS = 200
# Alternatives of an object, and how deep they may lie.
_MOST_WAYS = 40
_MOST_NESTED = 8
# How long pieces are asked whether anything matches them; one that nothing does is a mistake of the
# whole from then on.
_ASKING_S = 1.0
_SCALARS = (str, int, float, bool, type(None))
ANY_ORDER = "x-any-order"
"""In a schema within Lark: members of its objects come as the model orders them."""
_ARRAY = {"type", "items", "minItems", "maxItems"}
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


class JsonRules:
    """Makes the rules of JSON values, under names that begin with `prefix`. `any_order`: members
    come as the model orders them."""

    def __init__(self, prefix: str, *, any_order: bool) -> None:
        self._prefix, self._any_order = prefix, any_order
        self._definitions: Mapping[str, Any] = {}
        self._named: dict[str, str] = {}
        self._until = time.monotonic() + _ASKING_S
        self.rules: list[str] = []

    def value(self, schema: Any) -> str:
        """The Lark of a value that matches `schema`, as `translated` or `loosened` returns it."""
        if isinstance(schema, dict):
            self._definitions = without_endless(schema.get("$defs", {}))
            schema = {word: said for word, said in schema.items() if word != "$defs"}
        self._named = {
            key: name for key, name in self._named.items() if not key.startswith(("$", "{"))
        }
        return self._value(schema)

    def _value(self, schema: Any) -> str:
        return self._plain(schema) or self._other(schema)

    def _plain(self, schema: Any) -> str | None:
        """A value said in rules; None where that takes a schema of llguidance's."""
        if schema is True or schema == {}:
            return self._anything()
        if not isinstance(schema, dict):
            return self.never
        words = set(schema)
        if words == {"$ref"}:
            return self._definition(schema["$ref"])
        if words == {"anyOf"}:
            return self._any_of(schema["anyOf"])
        if words == {"allOf"} and len(schema["allOf"]) == 1:
            return self._plain(schema["allOf"][0])
        if "allOf" in words and (kept := picked(schema, self._leads)) != schema:
            return self._plain(kept)
        if words & {"allOf", "anyOf", "$ref"}:
            return self._combined(schema)
        if words & {"enum", "const"} and words <= {"enum", "const", "type"}:
            return self._listed(schema)
        return self._typed(schema, words)

    def _combined(self, schema: Mapping[str, Any]) -> str | None:
        """A rule of alternatives and parts, since a part of it may lead back to the whole."""
        ways = self._of_one_type(schema)
        if ways is None:
            return None
        found: list[str] = []

        def lark() -> str:
            found.append(self._any_of(ways) or "")
            return found[0]

        name = self._rule(json.dumps(schema), self._new_name(), lark)
        if found == [""]:
            return None
        return self.never if found == [self.never] else name

    def _typed(self, schema: Mapping[str, Any], words: Set[str]) -> str | None:
        kind = schema.get("type")
        if kind is None and words <= OBJECT:
            others = [{"type": other} for other in ("string", "number", "boolean", "null", "array")]
            return self._any_of([*others, {**schema, "type": "object"}])
        if isinstance(kind, list):
            return self._any_of([_speaking_of(schema, one) for one in kind])
        if kind == "object" and words <= OBJECT:
            return self._object(schema)
        if kind == "array" and words <= _ARRAY and (schema.get("maxItems") or 0) <= _MOST_ITEMS:
            return self._array(schema)
        return self._terminal(str(kind)) if words == {"type"} and kind in _TERMINALS else None

    def _any_of(self, ways: Sequence[Any]) -> str | None:
        """Alternatives, where none needs a schema of llguidance's: it takes the first grammar that
        fits."""
        found = [self._plain(way) for way in ways if way is not False]
        if None in found:
            return None
        found = [way for way in found if way != self.never]
        if not found:
            return self.never
        return f"({' | '.join(dict.fromkeys(way for way in found if way is not None))})"

    def _listed(self, schema: Mapping[str, Any]) -> str | None:
        values = schema.get("enum", [schema.get("const")])
        kinds = schema.get("type", list(_KINDS.values()))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not all(isinstance(value, _SCALARS) for value in values) or (
            "const" in schema and "enum" in schema
        ):
            return None
        held = [
            v
            for v in values
            if _KINDS[type(v)] in kinds or (_KINDS[type(v)] == "integer" and "number" in kinds)
        ]
        if not held:
            return self.never
        held += [int(value) for value in held if isinstance(value, float) and value.is_integer()]
        ways = " | ".join(dict.fromkeys(_quoted(value) for value in held))
        # one terminal, however many
        return self._rule(f"one of {ways}", self._new_name().upper(), lambda: ways)

    def _terminal(self, kind: str) -> str:
        name = f"{self._prefix}{kind}".upper()
        return self._rule(kind, name, lambda: _TERMINALS[kind])

    def _rule(self, key: str, name: str, lark: Any) -> str:
        """The name of the rule for `key`, made if there is none yet. It may lead to itself."""
        if key not in self._named:
            self._named[key] = name
            at = len(self.rules)
            self.rules.insert(at, f"{name}: {lark()}")
        return self._named[key]

    def _new_name(self) -> str:
        return f"{self._prefix}{len(self._named)}_{len(self.rules)}"

    def _anything(self) -> str:
        name = f"{self._prefix}any"

        def lark() -> str:
            t = self._terminal
            member = f"{t('string')} {t('colon')} {name}"
            many = f"{t('open')} ({member} ({t('comma')} {member})*)? {t('close')}"
            items = f"{t('first')} ({name} ({t('comma')} {name})*)? {t('last')}"
            return (
                f"{t('string')} | {t('number')} | {t('boolean')} | {t('null')} | {many} | {items}"
            )

        return self._rule("anything", name, lark)

    @property
    def never(self) -> str:
        """The terminal that nothing matches."""
        return self._terminal("never")

    def _leads(self, reference: str) -> Any:
        return self._definitions.get(reference.removeprefix("#/$defs/"), True)

    def _definition(self, reference: str) -> str:
        schema = self._leads(reference)
        found: list[str] = []

        def lark() -> str:
            found.append(self._value(schema))
            return found[0]

        name = self._rule(f"${reference}", self._new_name(), lark)
        if found == [self.never]:
            self._named[f"${reference}"] = name = self.never
        return name

    def _ways(self, schema: Any, depth: int = 0) -> list[dict[str, Any]] | None:
        """`schema` as alternatives that are objects' own words alone, or of other types; None where
        it is more than that."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        if "object" not in kinds_of(schema):
            return [schema]
        if depth > _MOST_NESTED or not set(schema) <= OBJECT | {"allOf", "anyOf", "$ref"}:
            return None
        ways: list[dict[str, Any]] = [{}]
        for alternatives in self._parts(schema, depth):
            if alternatives is None:
                return None
            combined = [merged(one, other) for one, other in product(ways, alternatives)]
            ways = _each_once(way for way in combined if way is not None)
            if len(ways) > _MOST_WAYS:
                return None
        return ways

    def _parts(self, schema: Mapping[str, Any], depth: int) -> list[list[dict[str, Any]] | None]:
        """The parts of `schema` that must all hold, each as its alternatives, in the order in which
        they stand."""
        own = {word: said for word, said in schema.items() if word in OBJECT}
        parts: list[list[dict[str, Any]] | None] = []
        for word, said in schema.items():
            if word == "anyOf":
                inner = [self._ways(way, depth + 1) for way in said]
                parts.append(
                    None if None in inner else list(chain.from_iterable(way or () for way in inner))
                )
            elif word == "$ref":
                parts.append(self._ways(self._leads(said), depth + 1))
            elif word == "allOf":
                parts += [self._ways(part, depth + 1) for part in said]
            elif word == next(iter(own)):
                parts.append([own])
        return parts

    def _of_one_type(self, schema: Any) -> list[dict[str, Any]] | None:
        """`_ways` of one type each; None where one of them says more of another type than its
        name."""
        ways = self._ways(schema)
        if ways is None or any(set(way) - OBJECT for way in ways):
            return None
        found: list[dict[str, Any]] = []
        for way in ways:
            found += [{**(way if kind == "object" else {}), "type": kind} for kind in kinds_of(way)]
        return _each_once(found)

    def _other(self, schema: Any) -> str:
        """A rule that is a schema of llguidance's, with what it refers to."""
        needed = reachable(schema, self._definitions)
        whole = {"allOf": [schema]} if isinstance(schema, bool) else dict(schema)
        whole = {**whole, **({"$defs": needed} if needed else {})}
        said = json.dumps(whole)
        exact = any(f'"{word}"' in said for word in ("multipleOf", "enum", "const", "integer"))
        # some bounds leave no number with so many digits
        for finest in (False,) if exact else (True, False):
            ending = with_ends(whole, finest=finest)
            text = json.dumps({"x-guidance": {"whitespace_pattern": SPACE}, **ending})
            if text in self._named or time.monotonic() > self._until or not empty(ending):
                break
        else:
            self._named[text] = self.never
        return self._rule(text, self._new_name(), lambda: f"%json {text}")

    def _array(self, schema: Mapping[str, Any]) -> str:
        t = self._terminal
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if schema.get("items") is False or high == 0:
            return f"({t('first')} {t('last')})" if not low else self.never
        item = self._value(schema.get("items", True))
        if item == self.never:
            return self.never if low else f"({t('first')} {t('last')})"
        more = (
            f"({t('comma')} {item}){{{max(0, low - 1)},{'' if high is None else max(0, high - 1)}}}"
        )
        more = "" if high == 1 else more
        return (
            f"({t('first')} {item} {more} {t('last')})"
            if low
            else (f"({t('first')} ({item} {more})? {t('last')})")
        )

    def _object(self, schema: Mapping[str, Any]) -> str | None:
        t = self._terminal
        patterns: Mapping[str, Any] = schema.get("patternProperties", {})
        if not all(map(as_name, patterns)) or any(
            overlap(*pair) for pair in combinations(patterns, 2)
        ):
            return None
        named = _described_members(schema, patterns)
        required = schema.get("required", ())
        members: list[tuple[str, bool]] = []
        for name, described in named.items():
            value = self._value(described)
            if value == self.never and name in required:
                return self.never
            if value != self.never:
                members.append((f"{_quoted(name)} {t('colon')} {value}", name in required))
        other = self._other_members(schema, list(named), patterns)
        if not members and not other:
            return f"({t('open')} {t('close')})"
        base = self._new_name()
        free = self._any_order and not schema.get(IN_ORDER) and len(members) <= _MOST_FREE
        self._named[base] = base
        body = (self._free if free else self._ordered)(base, members, other)
        return f"({t('open')} {body} {t('close')})"

    def _other_members(
        self, schema: Mapping[str, Any], names: Sequence[str], patterns: Mapping[str, Any]
    ) -> str:
        """The Lark of a member that is none of `names`; empty where there can be none."""
        colon = self._terminal("colon")
        value = self._value(schema.get("additionalProperties", True))
        ways = (
            [] if value == self.never else [f"{self._other_name(names, patterns)} {colon} {value}"]
        )
        for pattern, described in patterns.items():
            value = self._value(described)
            taken = [name for name in names if name_matches(pattern, name)]
            if value != self.never and not (taken and all_taken(pattern, taken)):
                ways.append(f"{self._name_like(pattern, taken)} {colon} {value}")
        return " | ".join(ways)

    def _other_name(self, names: Sequence[str], patterns: Mapping[str, Any]) -> str:
        """The terminal of a member's name that is none of `names`, and like none of `patterns`."""
        string = self._terminal("string")
        taken = " | ".join(
            [*map(_quoted, names), *(f"/{as_name(pattern)}/" for pattern in patterns)]
        )
        if not taken:
            return string
        return self._rule(
            f"not {taken}", self._new_name().upper(), lambda: f"{string} & ~({taken})"
        )

    def _name_like(self, pattern: str, names: Sequence[str]) -> str:
        """The terminal of a member's name that is like `pattern`, and none of `names`."""
        key = f"{self._terminal('name')} & /{as_name(pattern)}/"
        lark = f"{key} & ~({' | '.join(map(_quoted, names))})" if names else key
        return self._rule(lark, self._new_name().upper(), lambda: lark)

    def _free(self, base: str, members: Sequence[tuple[str, bool]], other: str) -> str:
        """Each member once, in any order: a bit says that it was there, the first bits are those of
        required ones."""
        ordered = sorted(range(len(members)), key=lambda i: not members[i][1])
        names = []
        for bit, i in enumerate(ordered):
            names.append(f"{base}_m{bit}")
            self.rules.append(f"{base}_m{bit}: {members[i][0]}")
        n = sum(wanted for _, wanted in members)
        end = f'"" %if is_ones([0:{n}])' if n else '""'
        first = [f"{name} {base}_r::set_bit({bit})" for bit, name in enumerate(names)]
        more = [
            f"{self._terminal('comma')} {way} %if bit_clear({bit})" for bit, way in enumerate(first)
        ]
        if other:
            self.rules.append(f"{base}_o: {other}")
            first.append(f"{base}_o {base}_r::_")
            more.append(f"{self._terminal('comma')} {base}_o {base}_r::_")
        self.rules.append(
            f"{base}_f::_ : {' | '.join([*([] if n else [end]), *first])}"
            if first
            else f'{base}_f::_ : ""'
        )
        self.rules.append(f"{base}_r::_ : {' | '.join([end, *more])}")
        return f"{base}_f::0x0"

    def _ordered(self, base: str, members: Sequence[tuple[str, bool]], other: str) -> str:
        """Members in the order of the schema, any others last."""
        comma = self._terminal("comma")
        if other:
            self.rules.append(f"{base}_o: {other}")
        tail, tail_first = (
            (f"({comma} {base}_o)*", f"({base}_o ({comma} {base}_o)*)?") if other else ('""', '""')
        )
        for i, (member, wanted) in enumerate(members):
            self.rules.append(f"{base}_m{i}: {member}")
            first = f"{base}_m{i} {base}_r{i + 1}" + ("" if wanted else f" | {base}_f{i + 1}")
            more = f"{comma} {base}_m{i} {base}_r{i + 1}" + (
                "" if wanted else f" | {base}_r{i + 1}"
            )
            self.rules += [f"{base}_f{i}: {first}", f"{base}_r{i}: {more}"]
        self.rules += [f"{base}_f{len(members)}: {tail_first}", f"{base}_r{len(members)}: {tail}"]
        return f"{base}_f0"


def _each_once(schemas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for schema in schemas:
        if schema not in found:
            found.append(schema)
    return found


def _quoted(value: Any) -> str:
    """The Lark of a plain value as JSON."""
    return text(json.dumps(value, ensure_ascii=False))


def text(said: str) -> str:
    """A Lark string; its escapes are JSON's."""
    return json.dumps(said, ensure_ascii=False)


def _described_members(schema: Mapping[str, Any], patterns: Mapping[str, Any]) -> dict[str, Any]:
    """All that an object's schema says of each member that it names or requires."""
    named: dict[str, Any] = dict(schema.get("properties", {}))
    extra = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in named:
            named[name] = (
                True if any(name_matches(pattern, name) for pattern in patterns) else extra
            )
    for pattern, described in patterns.items():
        for name, said in named.items():
            if name_matches(pattern, name):
                named[name] = both_of(said, described)
    return named


_WORDS_OF: Mapping[str, frozenset[str]] = {
    "object": frozenset(OBJECT), "array": frozenset(_ARRAY), "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip
_ANY_WORDS = frozenset({"enum", "const", "anyOf", "allOf", "$ref"})


def _speaking_of(schema: Mapping[str, Any], kind: str) -> Any:
    """`schema` for one of its types, without words that say nothing of it."""
    words = _WORDS_OF.get(kind)
    if words is None:
        skipped = (OBJECT | _ARRAY) - {"type"}
        return {**{w: v for w, v in schema.items() if w not in skipped}, "type": kind}
    object_words = {"patternProperties", "minProperties", "maxProperties", "prefixItems"}
    return {
        **{w: v for w, v in schema.items() if w in words | _ANY_WORDS | object_words},
        "type": kind,
    }
