"""A schema's own words in those that the grammar engine keeps: one draft, references that lead to
`$defs`, no annotations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urljoin

from localllm.grammars.formats import EXPRESSIONS, FORMATS
from localllm.grammars.member_names import (
    Schema,
    described_by,
    forbid_all_but,
    is_like,
    name_listed,
    one_more_of,
    pattern_of_names,
)
from localllm.grammars.schema_words import Words
from localllm.grammars.values import TYPES

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Beyond 64 bits llguidance dies of bounds, and an integer has to end somewhere: up to here the ids
# of others fit.
LARGEST = 4_000_000_000_000_000_000
IN_ORDER = "x-in-order"
"""In an object's schema: its own members keep their order, whatever holds for others."""
# Where values stand that are no schemas.
INERT = frozenset({"const", "enum", "default", "examples", "example"})
# Where schemas stand under names of the author's choosing.
NAMED = frozenset({"properties", "patternProperties", "$defs"})
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
_WITHOUT_PREFIX_ITEMS = (*_OLD_DRAFTS, "2019-09")
# Words that ask for something no grammar here keeps.
_NEVER = (
    "contains",
    "disallow",
    "divisibleBy",
    "extends",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_APPLIED = ("$ref", "anyOf", "oneOf", "allOf", "if", "dependencies")
_NOT_NULL = (
    "type", "enum", "properties", "required", "additionalProperties", "patternProperties", "items",
    "prefixItems", "pattern",
    "anyOf", "oneOf", "allOf", "not", "multipleOf", *_COUNTS, *BOUNDS,
)  # fmt: skip
# Words of one part of an allOf that may as well stand beside it.
_MERGED = frozenset({"const", "enum", "type", "not", "pattern", "format", *_COUNTS[:2], *BOUNDS})
_BEYOND_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<")


class Translator:
    """Translates one schema; `unsupported` are the words that it could not say."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.unsupported: set[str] = set()
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Any]] = []
        said = root.get("$schema") if isinstance(root, dict) else None
        self._old = isinstance(said, str) and any(draft in said for draft in _OLD_DRAFTS)
        self._plain_items = isinstance(said, str) and any(
            draft in said for draft in _WITHOUT_PREFIX_ITEMS
        )
        self._index(root, "")

    def translated(self) -> Schema:
        root = self._schema(self._root)
        definitions: dict[str, Schema] = {}
        while self._pending:
            name, node = self._pending.pop()
            definitions[name] = self._schema(node)
        words = Words(definitions, self.unsupported)
        result: Schema = words.in_known_words(root)
        if not definitions:
            return result
        return {
            **(result if isinstance(result, dict) else {"allOf": [result]}),
            "$defs": words.definitions(),
        }

    # --- references

    def _index(self, node: Any, base: str) -> None:
        """Learn where the names of schemas are, and which is whose base."""
        if isinstance(node, list):
            for inner in node:
                self._index(inner, base)
        if not isinstance(node, dict):
            return
        said = node.get("$id", node.get("id"))
        if isinstance(said, str):
            if said.startswith("#"):
                self._anchors.setdefault((base, said[1:]), node)
            else:
                base = urljoin(base, said).partition("#")[0]
                self._resources.setdefault(base, node)
        for word in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(word), str):
                self._anchors.setdefault((base, node[word]), node)
        self._bases[id(node)] = base
        for word, inner in node.items():
            if word not in INERT:
                self._index(inner, base)

    def _target(self, node: Mapping[str, Any], reference: str) -> Any:
        """What `reference` within `node` leads to; None where that is nothing here."""
        base = self._bases.get(id(node), "")
        uri = base + reference if reference.startswith("#") else urljoin(base, reference)
        document, _, fragment = uri.partition("#")
        found = self._resources.get(document)
        fragment = unquote(fragment)
        if not fragment:
            return found
        if not fragment.startswith("/"):
            return self._anchors.get((document, fragment))
        for part in fragment[1:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict):
                found = found.get(part)
            else:
                return None
        return found

    def _reference(self, node: Mapping[str, Any]) -> Schema:
        target = self._target(node, node["$ref"]) if isinstance(node["$ref"], str) else None
        if isinstance(target, bool):
            return target
        if not isinstance(target, dict):
            self.unsupported.add("$ref")
            return True
        seen: set[int] = set()
        while set(target) == {"$ref"} and isinstance(target["$ref"], str):
            if id(target) in seen:
                self.unsupported.add("$ref")  # to itself, and nothing else
                return True
            seen.add(id(target))
            further = self._target(target, target["$ref"])
            if not isinstance(further, dict):
                break
            target = further
        if id(target) not in self._names:
            last = node["$ref"].rpartition("/")[2]
            plain = re.fullmatch(r"[A-Za-z]\w*", last) and last not in self._names.values()
            self._names[id(target)] = name = last if plain else f"d{len(self._names)}"
            self._pending.append((name, target))
        return {"$ref": f"#/$defs/{self._names[id(target)]}"}

    # --- words

    def _schema(self, node: Any) -> Schema:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            self.unsupported.add("schema")
            return True
        # What is null is not said: to some clients no more than that, to the specification a
        # mistake.
        stated = {
            word: value for word, value in node.items() if value is not None or word == "const"
        }
        self.unsupported |= {word for word in _NOT_NULL if word in node and word not in stated}
        if "$ref" in stated and self._old:
            return self._reference(node)
        self._note_unsupported(stated)
        out: dict[str, Any] = {}
        parts: list[Schema] = []
        self._type(stated, out)
        self._numbers(stated, out)
        self._texts(stated, out, parts)
        self._lists(stated, out)
        self._members(stated, out, parts)
        self._values(stated, out)
        if "$ref" in stated:
            parts.append(self._reference(node))
        self._applied(stated, out, parts)
        self._conditions(stated, out)
        return _with_parts(stated, out, parts)

    def _note_unsupported(self, node: Mapping[str, Any]) -> None:
        for word in _NEVER:
            if word in node and not self._says_nothing(word, node):
                self.unsupported.add(word)

    def _values(self, node: Mapping[str, Any], out: dict[str, Any]) -> None:
        for word in ("const", "enum"):
            if word in node and self._listed(word, node[word]):
                out[word] = node[word]

    def _conditions(self, node: Mapping[str, Any], out: dict[str, Any]) -> None:
        if node.get(IN_ORDER) is True:
            out[IN_ORDER] = True
        if "not" in node:
            out["not"] = self._schema(node["not"])
        if "if" in node and ("then" in node or "else" in node):
            out["if"] = [self._schema(node.get(word, True)) for word in ("if", "then", "else")]

    def _applied(self, node: Mapping[str, Any], out: dict[str, Any], more: list[Schema]) -> None:
        """Alternatives and parts, in the order in which they stand."""
        for word in [w for w in node if w in ("anyOf", "oneOf", "allOf")]:
            if word not in node:
                continue
            if not isinstance(node[word], list) or not node[word]:
                self.unsupported.add(word)
                continue
            ways = [self._schema(inner) for inner in node[word]]
            if word == "allOf":
                more += ways
            elif word in out:
                more.append({word: ways})
            else:
                out[word] = ways

    def _says_nothing(self, word: str, node: Mapping[str, Any]) -> bool:
        """True where an unsupported word has no effect, or is one that is supported under another
        name."""
        value = node[word]
        applied = (
            "$ref",
            "allOf",
            "anyOf",
            "oneOf",
            "if",
            "dependentSchemas",
            "dependencies",
            "contains",
        )
        if word == "unevaluatedProperties":
            return (
                value in (True, {})
                or "additionalProperties" in node
                or not any(a in node for a in applied)
            )
        if word == "unevaluatedItems":
            listed = "items" in node and not isinstance(node["items"], list)
            return value in (True, {}) or listed or not any(a in node for a in applied)
        return False

    def _type(self, node: Mapping[str, Any], out: dict[str, Any]) -> None:
        if "type" not in node:
            return
        sent = node["type"]
        kinds = [sent] if isinstance(sent, str) else sent
        kinds = (
            [k.lower() if isinstance(k, str) else k for k in kinds]
            if isinstance(kinds, list)
            else [None]
        )
        if not kinds or not all(k in TYPES or k == "integer" for k in kinds):
            self.unsupported.add("type")
            return
        kinds = [k for k in dict.fromkeys(kinds) if k != "integer" or "number" not in kinds]
        out["type"] = kinds[0] if len(kinds) == 1 else kinds

    def _number(self, word: str, value: Any) -> bool:
        good = type(value) in (int, float) and value == value and abs(value) != float("inf")
        if not good:
            self.unsupported.add(word)
        return good

    def _numbers(self, node: Mapping[str, Any], out: dict[str, Any]) -> None:
        bounds = self._bounds(node)
        far = {word for word, value in bounds.items() if abs(value) > LARGEST}
        # all that is allowed lies beyond
        if any((bounds[word] > 0) == ("inimum" in word) for word in far):
            self.unsupported |= far
        out.update({word: value for word, value in bounds.items() if word not in far})
        if (
            "multipleOf" in node
            and self._number("multipleOf", node["multipleOf"])
            and node["multipleOf"] > 0
        ):
            out["multipleOf"] = node["multipleOf"]

    def _bounds(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """What bounds a number; in draft 4 an exclusive bound says so of the plain one."""
        bounds: dict[str, Any] = {}
        for word in BOUNDS:
            value, source = node.get(word), word
            if isinstance(value, bool) and word.startswith("exclusive"):
                source = word.removeprefix("exclusive").lower()
                value = node.get(source) if value else None
            if value is not None and self._number(source, value):
                bounds[word] = value
        return bounds

    def _counts(self, node: Mapping[str, Any], out: dict[str, Any], words: Sequence[str]) -> None:
        for word in words:
            value = node.get(word)
            if value is None:
                continue
            if type(value) in (int, float) and value >= 0 and value == int(value):
                out[word] = int(value)
            else:
                self.unsupported.add(word)

    def _texts(self, node: Mapping[str, Any], out: dict[str, Any], more: list[Schema]) -> None:
        self._counts(node, out, _COUNTS[:2])
        kind = node.get("format")
        if isinstance(kind, str) and kind in FORMATS:
            out["format"] = kind
        elif isinstance(kind, str) and kind in EXPRESSIONS:
            more.append({"pattern": EXPRESSIONS[kind]})
        if "pattern" in node:
            if isinstance(node["pattern"], str) and not _BEYOND_REGULAR.search(node["pattern"]):
                out["pattern"] = node["pattern"]
            else:
                self.unsupported.add("pattern")

    def _listed(self, word: str, value: Any) -> bool:
        values = [value] if word == "const" else value
        if isinstance(values, list) and not _beyond(values):
            return True
        self.unsupported.add(word)
        return False

    def _lists(self, node: Mapping[str, Any], out: dict[str, Any]) -> None:
        self._counts(node, out, _COUNTS[2:4])
        first, items = self._items(node)
        if isinstance(first, list) and first:
            out["prefixItems"] = [self._schema(inner) for inner in first]
        elif first not in (None, []):
            self.unsupported.add("prefixItems")
        if items is not None:
            out["items"] = self._schema(items)
        if node.get("uniqueItems") is True and not (out.get("maxItems", 2) < 2 or _no_list(out)):
            self.unsupported.add("uniqueItems")

    def _items(self, node: Mapping[str, Any]) -> tuple[Any, Any]:
        """The schemas of the first items one by one, and that of the others; None where nothing is
        said of them."""
        items, first = node.get("items"), node.get("prefixItems")
        if isinstance(items, list):
            first, items = items, node.get("additionalItems")
        elif first is not None and self._plain_items:
            self.unsupported.add("prefixItems")
            first = None
        if items is None and "unevaluatedItems" not in self.unsupported:
            items = node.get("unevaluatedItems")
        return first, items

    def _members(self, node: Mapping[str, Any], out: dict[str, Any], more: list[Schema]) -> None:
        self._counts(node, out, _COUNTS[4:])
        named = self._named("properties", node)
        patterns = self._named("patternProperties", node)
        extra = self._extra(node)
        required = self._required(node)
        if "propertyNames" in node:
            extra = self._names_held(self._schema(node["propertyNames"]), named, patterns, extra)
        name_listed(named, patterns)
        if patterns or extra is not True:
            for name in required:
                named.setdefault(name, described_by(name, patterns, extra))
        if named or node.get("properties") == {}:
            out["properties"] = named
        if patterns:
            out["patternProperties"] = patterns
        if required:
            out["required"] = required
        if extra is not True:
            out["additionalProperties"] = extra
        self._sizes(out, more)
        kind = {"type": out["type"]} if "type" in out else {}
        for name, needed in self._dependencies(node):
            more.append({"anyOf": [{**kind, "properties": {name: False}}, needed]})

    def _extra(self, node: Mapping[str, Any]) -> Schema:
        """The schema of members that nothing names."""
        others = node.get("additionalProperties")
        if (
            others is None
            and "unevaluatedProperties" in node
            and "unevaluatedProperties" not in self.unsupported
        ):
            others = node["unevaluatedProperties"]
        return True if others is None else self._schema(others)

    def _required(self, node: Mapping[str, Any]) -> list[str]:
        required = node.get("required", [])
        if isinstance(required, list) and all(isinstance(name, str) for name in required):
            return list(dict.fromkeys(required))
        # `required: true` of draft 3 stands in the member itself, and is kept by its own object.
        if not isinstance(required, bool):
            self.unsupported.add("required")
        return []

    def _named(self, word: str, node: Mapping[str, Any]) -> dict[str, Schema]:
        value = node.get(word, {})
        if isinstance(value, dict):
            return {
                name: self._schema({} if inner is None else inner) for name, inner in value.items()
            }
        self.unsupported.add("schema" if word == "properties" else word)
        return {}

    def _names_held(
        self, held: Schema, named: dict[str, Schema], patterns: dict[str, Schema], extra: Schema
    ) -> Schema:
        """What other members may be, where `held` is what every member's name must match."""
        if held is True:
            return extra
        if held is False or "string" not in held.get("type", "string"):
            named.update(dict.fromkeys(named, False))
            patterns.clear()
            return False
        words = set(held) - {"type"}
        if words and words <= {"enum", "const"}:
            allowed = [held["const"]] if "const" in held else held["enum"]
            for name in allowed:
                if isinstance(name, str):
                    named.setdefault(name, described_by(name, patterns, extra))
            forbid_all_but({name for name in named if name in allowed}, named)
            patterns.clear()
            return False
        pattern = pattern_of_names(held, words)
        if pattern is None or patterns:
            self.unsupported.add("propertyNames")
            return extra
        patterns[pattern] = extra
        forbid_all_but({name for name in named if is_like(pattern, name)}, named)
        return False

    def _sizes(self, out: dict[str, Any], more: list[Schema]) -> None:
        """Numbers of members where some of the named ones may be left out."""
        named, required = out.get("properties", {}), out.get("required", [])
        free = [name for name in named if name not in required and named[name] is not False]
        closed = out.get("additionalProperties") is False and "patternProperties" not in out
        low, high = out.get("minProperties", 0), out.get("maxProperties")
        if low <= len(required):
            out.pop("minProperties", None)
        elif free and low == len(required) + 1 and high is None:
            del out["minProperties"]
            more.append(one_more_of(free, out, None if closed else low))
        if high is not None and closed and len(free) + len(required) <= high:
            del out["maxProperties"]

    def _dependencies(self, node: Mapping[str, Any]) -> list[tuple[str, Schema]]:
        found: list[tuple[str, Schema]] = []
        for word in ("dependencies", "dependentRequired", "dependentSchemas"):
            value = node.get(word, {})
            if not isinstance(value, dict) or (self._old and word != "dependencies"):
                self.unsupported |= {word} if word in node else set()
                continue
            for name, needed in value.items():
                names = [needed] if isinstance(needed, str) else needed
                if isinstance(names, list):
                    needs: Schema = {"required": names} if names else True
                else:
                    needs = self._schema(needed)
                if needs is not True:
                    found.append((name, needs))
        return found


def _with_parts(node: Mapping[str, Any], out: dict[str, Any], parts: list[Schema]) -> Schema:
    """`out` with the `parts` of an allOf: beside its words where they may as well stand there."""
    apart: list[Schema] = []
    for part in parts:
        if part is True:
            continue
        if isinstance(part, dict) and set(part) <= _MERGED and not set(part) & set(out):
            out.update(part)
        else:
            apart.append(part)
    if not apart:
        return out or True
    if len(apart) == 1 and not out:
        return apart[0]
    # llguidance has members in the order in which words name them.
    first = next((w for w in node if w in ("properties", *_APPLIED)), "properties")
    return {"allOf": apart, **out} if first != "properties" else {**out, "allOf": apart}


def _beyond(value: Any) -> bool:
    """True where some number in `value` is one that the grammar engine can't write."""
    if isinstance(value, list):
        return any(map(_beyond, value))
    if isinstance(value, dict):
        return any(map(_beyond, value.values()))
    return type(value) in (int, float) and not abs(value) <= LARGEST


def _no_list(out: Mapping[str, Any]) -> bool:
    kind = out.get("type", "array")
    return "array" not in ([kind] if isinstance(kind, str) else kind)
