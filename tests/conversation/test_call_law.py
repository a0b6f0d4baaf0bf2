"""The round trip of a call in every format.

The grammar accepts the complete call that a template writes, and then ends. The reader returns
the same call. This is tested with every template that llama.cpp's sources publish (name a source
tree in LOCALLLM_LLAMA_CPP_SOURCE), and always with one reduced template of each format.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conversation.call_law import obeyed, planned
from conversation.call_shapes import PLAIN_TOOLS, SHAPES, TOOLS, TWO
from conversation.call_templates import TEMPLATES
from conversation.test_published_templates import _FILES, _SOURCE
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools import FORMATS, detect_format

PLAIN = set(PLAIN_TOOLS[0]["function"]["parameters"]["properties"])
# Templates that write no calls of earlier turns: the calls are part of the message's text.
SILENT = ("LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct")
# Formats whose templates write only the first call of a turn, or one turn for each call.
ONE_A_TURN = ("gigachat", "llama3", "harmony")
# Templates that write a schema in their own syntax and do not terminate for more than types.
TYPES_ALONE = ("NousResearch-Hermes-2-Pro", "NousResearch-Hermes-3")
# Arguments that a format cannot express, by template or format.
UNSAYABLE: dict[str, dict[str, str]] = {
    "minimax_m3": dict.fromkeys(
        ("null", "null of an alternative", "empty object", "null in an object", "nested null"),
        "null is written as nothing, and an empty object as an empty text",
    ),
    "LFM2.5-8B-A1B": {
        "quotes": "texts stand between ' as they are, so they may hold neither that nor a backslash"
    },
    "Reka-Edge": {
        "lines and letters": "writes letters as escapes of their codes, which "
        "llguidance's "
        "texts "
        "leave "
        "out"
    },
}


@pytest.mark.skipif(not _SOURCE, reason="set LOCALLLM_LLAMA_CPP_SOURCE to a llama.cpp source tree")
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_published_templates(path: Path) -> None:
    name = path.stem
    template = ChatTemplate(path.read_text(encoding="utf-8"), bos_text="<s>", eos_text="</s>")
    style = detect_format(template.source)
    if style is None or not template.knows_tools or name in SILENT:
        pytest.skip("writes no calls that are read here")
    assert shapes_that_obey(name, style.name, template)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_round_trip_through_reduced_templates(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    style = detect_format(template.source)
    assert style is not None
    assert style.name == name.partition(",")[0]
    assert shapes_that_obey(name, style.name, template)


def test_every_format_has_a_reduced_template() -> None:
    assert {name.partition(",")[0] for name in TEMPLATES} == {f.name for f in FORMATS}


def shapes_that_obey(name: str, style: str, template: ChatTemplate) -> list[str]:
    """Check the round trip of every shape that the template can write, and return the shapes.

    Raises LawError.
    """
    unsayable = {**UNSAYABLE.get(style, {}), **UNSAYABLE.get(name, {})}
    one = style in ONE_A_TURN
    plain = name.startswith(TYPES_ALONE)
    tools = PLAIN_TOOLS if plain else TOOLS
    prompt = planned(template, tools)
    shapes = []
    for shape, calls in SHAPES.items():
        if shape in unsayable or (one and shape in TWO):
            continue
        if plain and not {k for _, arguments in calls for k in arguments} <= PLAIN:
            continue
        obeyed(template, tools, calls, prompt)
        shapes.append(shape)
    return shapes
