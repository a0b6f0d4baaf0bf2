"""Random schemas and matching arguments make the round trip in every format.

The grammar accepts the complete call that the template writes, and the reader returns it.
LOCALLLM_ROUND_TRIPS is the number of calls for each template (500 before a release).
"""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest

from conversation.call_law import LawError, obeyed
from conversation.call_templates import TEMPLATES
from localllm.conversation.template import ChatTemplate

ROUNDS = int(os.environ.get("LOCALLLM_ROUND_TRIPS", "8"))
# Texts that a parameter cannot contain in this format. The grammar may refuse a call with such a
# text, and never writes one.
ENDS = {
    "qwen_coder": r"</parameter>",
    "seed": r"</parameter>",
    "glm": r"</arg_value>",
    "minimax": r"</parameter>",
    "muse": r"</atem:parameter>",
    "dsml": r"</｜DSML｜parameter>",
    "minicpm": r"\]\]>|</param>",
    "kimi_k3": r"<\|\w+\|>",
    "minimax_m3": r"\]<\]minimax\[>\[",
    "function_gemma": r"<escape>",
    "gemma4": r'<\|"\|>',
}
# Texts that look like the beginning of a parameter. At the start of a line, and with the name of a
# parameter, such a text is read as the next parameter after an unclosed one. After a closing tag it
# is written as a parameter.
OPENS = re.compile(
    r"\n\s*<(?:parameter|arg_key|invoke|param|atem:|｜DSML｜|\|open)|</\S+>\s*(?:<|\Z)"
)
TAGS = [
    "</tool_call>", "<tool_call>", "</function>", "<function=f>", "</parameter>", "<parameter=a>",
    "</arg_value>",
    "<arg_key>a</arg_key>", "</invoke>", "</minimax:tool_call>", '<parameter name="a">',
    "</seed:tool_call>",
    "</atem:parameter>", "</atem:function_calls>", "</｜DSML｜parameter>", "</｜DSML｜tool_calls>",
    "</param>", "]]>",
    "<![CDATA[", "]<]minimax[>[</a>", "</TOOLCALL>", "</tool_calls>", "</think>", "```", "<end>",
    '"}}', "']", '<|"|>',
    "<escape>", "<|close|>",
]  # fmt: skip
WORDS = [
    "a",
    "Paris",
    "São",
    "東京",
    "🎉",
    "it's",
    'say "so"',
    "\\",
    "C:\\new",
    "{",
    "}",
    "[1, 2]",
    ",",
    ":",
    "#",
    "\t",
    "None",
]
# If text is one of several types, these texts would be read as the other type.
LOOSE = ["12", "null", "true", "None", "1.5", "[]"]


class Maker:
    """A generator of schemas and values.

    With `typed`, every value's type is in its schema, and no value is null.
    """

    def __init__(self, seed: int, typed: bool) -> None:
        self.rng, self.typed = random.Random(seed), typed

    def text(self, loose: bool = True) -> str:
        """Return a text. Only with `loose` may it look like a value of another type."""
        rng = self.rng
        if loose and rng.random() < 0.15:
            return rng.choice([*LOOSE, "", "\n", " x ", "\nx\n"])
        pieces = [
            rng.choice(TAGS) if rng.random() < 0.2 else rng.choice(WORDS)
            for _ in range(rng.randint(1, 6))
        ]
        said = "".join(p + rng.choice(["", " ", " ", "\n", "\n  "]) for p in pieces)
        return said if loose else f"it {said}."

    def pair(self, depth: int = 0) -> tuple[Any, Any]:
        """Return a schema and a value that matches it."""
        rng = self.rng
        kinds = ["text", "text", "enum", "integer", "number", "boolean", "either", "ref"]
        kinds += [] if self.typed else ["nullable", "null"]
        kinds += ["array", "object"] * (depth < 2) + ["open"] * (depth < 2 and not self.typed)
        return getattr(self, f"_{rng.choice(kinds)}")(depth)  # type: ignore[no-any-return]

    def _text(self, depth: int) -> tuple[Any, Any]:
        return {"type": "string"}, self.text(self.typed is False or depth == 0)

    def _enum(self, depth: int) -> tuple[Any, Any]:
        options = ["fast", "slow", "as is", "12", 'a "b"']
        return {"type": "string", "enum": options}, self.rng.choice(options)

    def _ref(self, depth: int) -> tuple[Any, Any]:
        return {"$ref": "#/$defs/kind"}, self.rng.choice(["one", "two"])

    def _integer(self, depth: int) -> tuple[Any, Any]:
        value = self.rng.choice([0, -1, 7, 2**53, -(10**30), self.rng.randint(-(10**9), 10**9)])
        bounds = {"minimum": value - 3, "maximum": value + 5} if self.rng.random() < 0.3 else {}
        return {"type": "integer", **bounds}, value

    def _number(self, depth: int) -> tuple[Any, Any]:
        return {"type": "number"}, self.rng.choice([0.5, -1.5e-7, 1e22, 3, -0.125, 12345.678])

    def _boolean(self, depth: int) -> tuple[Any, Any]:
        return {"type": "boolean"}, self.rng.random() < 0.5

    def _null(self, depth: int) -> tuple[Any, Any]:
        return {"type": "null"}, None

    def _nullable(self, depth: int) -> tuple[Any, Any]:
        value = None if self.rng.random() < 0.4 else self.text(loose=False)
        shapes = [
            {"type": ["string", "null"]},
            {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        ]
        return self.rng.choice(shapes), value

    def _either(self, depth: int) -> tuple[Any, Any]:
        value = self.rng.choice([3, self.text(loose=False)])
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}, value

    def _array(self, depth: int) -> tuple[Any, Any]:
        described, _ = self.pair(depth + 1)
        made = [
            value
            for other, value in (self.pair(depth + 1) for _ in range(12))
            if other == described
        ]
        return {"type": "array", "items": described}, made[:3] if made or not self.typed else made

    def _object(self, depth: int) -> tuple[Any, Any]:
        schema, value = self.members(depth + 1, least=1)
        return schema, value

    def _open(self, depth: int) -> tuple[Any, Any]:
        inner = [1, self.text(), None, True, {"z": [self.text(), {}]}, []]
        return {"type": "object"}, {
            k: self.rng.choice(inner) for k in ("k", "m") if self.rng.random() < 0.7
        }

    def members(self, depth: int = 0, least: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the schema of an object and a matching object."""
        names = self.rng.sample(
            ["a", "b", "path", "new_string", "n", "opts"], self.rng.randint(least, 4)
        )
        names = sorted(names) if depth else names
        properties: dict[str, Any] = {}
        value: dict[str, Any] = {}
        required = []
        for name in names:
            properties[name], made = self.pair(depth)
            if self.rng.random() < 0.4:
                required.append(name)
            if name in required or self.rng.random() < 0.7 or (depth and not value):
                value[name] = made
        schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        return schema, value


def texts_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [t for inner in value.values() for t in texts_of(inner)]
    if isinstance(value, list):
        return [t for inner in value for t in texts_of(inner)]
    return [value] if isinstance(value, str) else []


def round_trip(template: ChatTemplate, style: str, seed: int) -> bool:
    """Check one random call. Raises LawError.

    Returns False if the grammar refused a text that the format cannot contain.
    """
    maker = Maker(seed, typed=style == "minimax_m3")
    schema, arguments = maker.members()
    schema["$defs"] = {"kind": {"enum": ["one", "two"]}}
    tools = [
        {"type": "function", "function": {"name": n, "description": "", "parameters": schema}}
        for n in ("f", "g")
    ]
    said = texts_of(arguments)
    unsayable = style in ENDS and any(re.search(ENDS[style], t) for t in said)
    ambiguous = style in ENDS and any(OPENS.search(t) for t in said)
    try:
        obeyed(template, tools, [("f", arguments)])
    except LawError as e:
        if ambiguous or (unsayable and "refused" in str(e)):
            return False
        raise LawError(f"{seed}: {e}\n{schema}") from e
    return True


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_calls_round_trip_in_every_format(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    whole = [round_trip(template, name.partition(",")[0], seed) for seed in range(ROUNDS)]
    assert sum(whole) >= 0.6 * ROUNDS
