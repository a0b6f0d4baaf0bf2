"""What is made of a schema before it goes to the grammar engine: numbers with an end, and the
definitions that it leads to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from localllm.grammars.translator import INERT, LARGEST, NAMED

# Of a number with bounds, which llguidance writes without an exponent.
_FINEST = 1e-9
# A class of letters in an expression, behind anything escaped.
_CLASS = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])+)\]", re.DOTALL)


def with_ends(schema: Any, *, finest: bool) -> Any:
    """`schema` whose numbers have an end; `finest`: with so many digits behind the point and no
    more, which llguidance does not hold beside integers and other multiples."""
    if isinstance(schema, list):
        return [with_ends(inner, finest=finest) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for word, said in schema.items():
        if word == "patternProperties":
            out[word] = {
                _escapable(name): with_ends(inner, finest=finest) for name, inner in said.items()
            }
        elif word in NAMED:
            out[word] = {name: with_ends(inner, finest=finest) for name, inner in said.items()}
        elif word == "pattern":
            out[word] = _escapable(said)
        else:
            out[word] = said if word in INERT else with_ends(said, finest=finest)
    _bound(out, finest=finest)
    return out


def _bound(schema: dict[str, Any], *, finest: bool) -> None:
    """Give numbers that have a bound, and integers, the other one too."""
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    bounded = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} & set(schema)
    if "integer" not in kinds and not ("number" in kinds and bounded):
        return
    if not {"minimum", "exclusiveMinimum"} & bounded:
        schema["minimum"] = -LARGEST
    if not {"maximum", "exclusiveMaximum"} & bounded:
        schema["maximum"] = LARGEST
    if "number" in kinds and finest:
        schema.setdefault("multipleOf", _FINEST)


def _escapable(pattern: str) -> str:
    r"""`pattern` without form feeds in classes of what a letter is not: a class that has all of \b
    \t \n \f \r is to llguidance one that has \ and " as well (1.9.1)."""

    def narrowed(found: re.Match[str]) -> str:
        if found[1] is None or not (found[1] or r"\x0" in found[2] or r"\u00" in found[2]):
            return found[0]
        return f"[^{found[2]}\\f]" if found[1] else f"[{found[2]}--\\f]"

    return _CLASS.sub(narrowed, pattern)


def reachable(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The definitions that `schema` leads to."""
    found: dict[str, Any] = {}
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                name = reference.removeprefix("#/$defs/")
                if name not in found:
                    found[name] = definitions.get(name, True)
                    left.append(found[name])
            for word, inner in node.items():
                left += inner.values() if word in NAMED else [] if word in INERT else [inner]
    return found
