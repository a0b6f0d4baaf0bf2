"""Requests that need many resources, by generator: the part that is large, and its size, 2**k.

`KINDS` maps each to the k of every run and the largest k. All are sent to a model whose chat
template is `TEMPLATE`, except those with pictures, which are sent to a model with vision.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

# Operations of a hostile template. The conversation selects the operation, its count and its size,
# so one file contains all of them.
_HOSTILE = {
    "power": "{% set x = 3 ** n %}",
    "text": "{% set x = 'é' * n * n %}",
    "join": "{% set x = (['a'] * n) | join('b' * n) %}",
    "lists": "{% set l = [] %}{% for i in range(n) %}{% set _ = l.append([n] * n) %}{% endfor %}",
    "loops": "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}",
    "width": "{% set x = ('%' ~ n ~ '.' ~ n ~ 'f') | format(1.5) %}",
    "said": "{% for i in range(n) %}{{ 'a' * n }}{% endfor %}",
}
TEMPLATE = (
    "{% set asked = messages[0].content.split(' ') %}{% set n = asked[-1] | int %}"
    + "".join(
        f"{{% if asked[0] == 'do-{name}' %}}{do}{{% endif %}}" for name, do in _HOSTILE.items()
    )
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def chat(content: object = "hi", **fields: Any) -> Body:
    """A small request."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def _schema(schema: Any) -> Body:
    form = {"name": "x", "schema": schema}
    return chat(response_format={"type": "json_schema", "json_schema": form})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _ref(i: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/d{i}"}


def _loose(schema: Any) -> Body:
    """A schema that is enforced only in the parts that can be."""
    form = {"name": "x", "schema": schema, "strict": False}
    return chat(response_format={"type": "json_schema", "json_schema": form})


def _optional(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}


def _arrays(n: int) -> Body:
    schema: Any = {"type": "integer"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return _schema(schema)


def _choices(n: int) -> Body:
    schema: Any = {"type": "integer"}
    for depth in range(n.bit_length()):
        schema = {"anyOf": [schema, _object({f"k{depth}": schema})]}
    return _schema(schema)


def _chain(n: int) -> Body:
    """Each definition refers to the next one twice."""
    links = {f"d{i}": _object({"l": _ref(i + 1), "r": _ref(i + 1)}) for i in range(n)}
    return _schema({"$defs": {**links, f"d{n}": {"type": "integer"}}, **_ref(0)})


def _ring(n: int) -> Body:
    """Each definition leads to all others, one after another, and so to itself."""
    links = {
        f"d{i}": {"anyOf": [_object({"next": _ref((i + 1) % n)}), _ref((i + 2) % n), {"const": i}]}
        for i in range(n)
    }
    return _schema({"$defs": links, **_ref(0)})


def _patterns(n: int) -> Body:
    named = {f"^p{i}[a-z]*$": {"type": "string", "pattern": f"^(a|b){{{i}}}$"} for i in range(n)}
    return _schema({"type": "object", "patternProperties": named})


def _enums(n: int) -> Body:
    side = math.isqrt(n)
    named = {f"p{i}": {"enum": [f"value {i} {j}" for j in range(side)]} for i in range(side)}
    return _schema({"type": "object", "properties": named})


def _rules(n: int) -> str:
    """Each rule refers to the next one twice, so a word has many derivations."""
    return (
        "\n".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}" for i in range(n)) + f'\nr{n}: "a" | "aa"'
    )


def _gbnf(n: int) -> Body:
    return chat(grammar="root ::= r0\n" + _rules(n).replace(": ", " ::= "))


def _arguments(n: int) -> Body:
    """One call whose arguments are a JSON text with many lists."""
    function = {"name": "look", "arguments": '{"a": [' + "[]," * n + "1]}"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    return {**chat(), "messages": [{"role": "user", "content": "a"}, called]}


def _steps(n: int) -> Body:
    """A reference with many steps, in an object that is described in two parts."""
    return _schema({"allOf": [{"$ref": "#/" + "/" * n}, _object({"a": {"type": "integer"}})]})


def _tools(n: int) -> Body:
    schema = _object({f"p{i}": {"enum": [f"e{i}{j}" for j in range(8)]} for i in range(n // 8)})
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}}
        for i in range(n)
    ]
    return chat(tools=tools, tool_choice="required")


def _messages(n: int) -> Body:
    roles = ["user", "assistant"]
    said = [{"role": roles[i % 2], "content": "a"} for i in range(n + 1)]
    return {**chat(), "messages": said}


def _png(side: int) -> bytes:
    """A picture of one colour: a small file for any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        end = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + end

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(side * (3 * side + 1)), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _picture(n: int) -> Body:
    url = "data:image/png;base64," + base64.b64encode(_png(n)).decode()
    return chat([{"type": "image_url", "image_url": {"url": url}}])


def _pdf(n: int) -> Body:
    """A PDF with one page, whose compressed content draws `n` letters."""
    content = zlib.compress(b"BT /F1 9 Tf (a) Tj ET\n" * n, 9)
    objects = (
        b"1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
        b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
        b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R/Resources<</Font<</F1"
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>>>endobj\n"
        b"4 0 obj<</Filter/FlateDecode/Length %d>>stream\n%b\nendstream endobj\n"
        b"trailer<</Root 1 0 R>>\n%%%%EOF" % (len(content), content)
    )
    data = "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.4\n" + objects).decode()
    return chat([{"type": "file", "file": {"filename": "a.pdf", "file_data": data}}])


def _hostile(name: str) -> Callable[[int], Body]:
    return lambda n: chat(f"do-{name} {n}")


@dataclass(frozen=True, slots=True)
class Kind:
    """A request of size 2**k: `make` takes that size. `usual`: the k of every run; `largest`: the
    largest k."""

    make: Callable[[int], Body]
    usual: int
    largest: int
    sees: bool = False
    reads_pdf: bool = False


KINDS = {
    "arrays in arrays": Kind(_arrays, 6, 9),
    "anyOf in anyOf": Kind(_choices, 9, 13),
    "a chain of refs": Kind(_chain, 9, 13),
    "a ring of refs": Kind(_ring, 9, 13),
    "a reference of many steps": Kind(_steps, 20, 24),
    "a schema as text": Kind(lambda n: chat(json_schema='{"enum": [' + "{}," * n + "1]}"), 22, 23),
    "arguments as text": Kind(_arguments, 22, 23),
    "choices": Kind(lambda n: chat(guided_choice=[f"{i}" + "(" * n for i in range(4096)]), 12, 12),
    "patternProperties": Kind(_patterns, 7, 12),
    "enums of properties": Kind(_enums, 14, 18),
    "a long name": Kind(lambda n: _loose(_object({"k" * n: {"type": "integer"}})), 17, 23),
    "a long name held": Kind(lambda n: _schema(_object({"k" * n: {"type": "integer"}})), 15, 23),
    "a long word": Kind(lambda n: chat(grammar=f'root ::= "{"a" * n}"'), 14, 17),
    "optional properties": Kind(lambda n: _loose(_optional(n)), 14, 15),
    "optional properties held": Kind(lambda n: _schema(_optional(n)), 12, 15),
    "alternatives": Kind(
        lambda n: chat(regex="|".join(f"w{i}[a-z]*x{i}" for i in range(n))), 11, 13
    ),
    "counted repeats": Kind(lambda n: chat(regex=f"(a|b)*a(a|b){{{n}}}"), 12, 20),
    "nested repeats": Kind(lambda n: chat(regex="(" * n + "a" + "{1,99})" * n), 4, 12),
    "lark": Kind(lambda n: chat(grammar="%llguidance {}\nstart: r0\n" + _rules(n)), 9, 13),
    "gbnf": Kind(_gbnf, 6, 13),
    "tools": Kind(_tools, 9, 9),
    "stop strings": Kind(
        lambda n: chat(stop=["ab" * (n // 2 - 1) + f"{i}" for i in range(32)], max_tokens=64),
        10,
        11,
    ),
    "logit_bias": Kind(lambda n: chat(logit_bias={str(i): -1 for i in range(n)}, n=4), 12, 12),
    "messages": Kind(_messages, 14, 15),
    "one letter": Kind(lambda n: chat("a" * n), 22, 24),
    "letters of four bytes": Kind(lambda n: chat("\U000e0001" * n), 20, 21),
    "a packed PDF": Kind(_pdf, 22, 25, reads_pdf=True),
    "a picture": Kind(_picture, 11, 15, sees=True),
    **{f"template: {name}": Kind(_hostile(name), 14, 20) for name in _HOSTILE},
}
