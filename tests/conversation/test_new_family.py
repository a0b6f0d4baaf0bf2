"""A model family with its own format of calls needs only one new file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from conversation.test_grammar_triggers import TOOLS, check, matcher, read, walk
from localllm.conversation import tools as tool_formats
from localllm.conversation.tools import FORMATS, format_for, formats
from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    Triggers,
)
from localllm.conversation.tools.call_grammars import NAME, TagGrammar, tagged_calls
from localllm.conversation.tools.constraints import answer_or_call, triggers_of
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.tag_reader import typed

TEMPLATE = "{% if tools %}%call … %end{% endif %}"


def _reader(first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
    """Return a reader that reads the complete block."""

    def parse(block: str) -> list[Call] | None:
        name, _, pairs = block.partition("\n")
        values = dict(re.findall(r"^(\w+) = (.*?)\n(?=\w+ = |\Z)", pairs, re.DOTALL | re.MULTILINE))
        return [(name, as_json({k: typed(v, k, name, tools) for k, v in values.items()}))]

    return BlockReader(first, marker, "%end", parse)


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    """Return the trigger of one call."""
    tags = TagGrammar(head=f"{NAME}\n", before=f"{NAME} = ", after="\n", end="%end")
    return {"%call ": GrammarTrigger("", tagged_calls(tools, tags))}


# `%call name⏎key = value⏎…%end`.
PERCENT = ToolFormat(
    name="percent", signs=("%call",), markers=("%call ",), reader=_reader, triggers=_triggers
)


@pytest.fixture
def percent(monkeypatch: pytest.MonkeyPatch) -> ToolFormat:
    monkeypatch.setattr(tool_formats, "FORMATS", (PERCENT, *FORMATS))
    return format_for(TEMPLATE)


def test_a_new_format_needs_only_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "percent_family.py").write_text(
        "from conversation.test_new_family import PERCENT\n\nFORMATS = (PERCENT,)\n"
    )
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    with_it = tool_formats.discover()
    assert {f.name for f in with_it} == {*(f.name for f in FORMATS), "percent"}
    monkeypatch.setattr(tool_formats, "FORMATS", with_it)
    assert format_for(TEMPLATE).name == "percent"


def test_the_new_format_is_detected_from_its_template(percent: ToolFormat) -> None:
    assert percent.name == "percent"
    assert format_for("… <tool_call>").name == "hermes"


def test_calls_in_the_new_format_are_constrained_and_parsed(percent: ToolFormat) -> None:
    ((opening, start),) = triggers_of(percent, TEMPLATE, TOOLS).items()
    seen = set()
    for seed in range(15):
        ((name, arguments),) = read(percent, [opening + start.lead + walk(start.grammar, seed)])
        check(name, arguments)
        seen.add(name)
    assert seen == {"get_weather", "stop"}


def test_a_schema_answer_may_be_a_call_in_the_new_format_instead(percent: ToolFormat) -> None:
    lark = answer_or_call(percent, TEMPLATE, TOOLS, json.dumps({"type": "boolean"}), None)
    assert lark is not None
    state = matcher(("lark", lark))
    for allowed in (b"true", b"%call stop\n", b"%call get_weather\ncity = "):
        assert state.validate_tokens(list(allowed)) == len(allowed)
    for refused in (b"1", b"%call other"):
        assert state.validate_tokens(list(refused)) < len(refused)


def test_parameter_names_that_a_schema_leaves_open_are_not_constrained(percent: ToolFormat) -> None:
    free: dict[str, object] = {"type": "object", "additionalProperties": {"type": "string"}}
    open_tool = {"type": "function", "function": {"name": "f", "parameters": free}}
    (start,) = triggers_of(percent, TEMPLATE, [open_tool, TOOLS[1]]).values()
    said = "f\na = b\nc = d\n%end"
    assert matcher(start.grammar).validate_tokens(list(said.encode())) == len(said)
    assert matcher(start.grammar).validate_tokens(list(b"stop\na = b\n")) == len("stop\n")


def test_no_shared_file_contains_the_name_of_a_format() -> None:
    names = "|".join(f.name for f in FORMATS)
    folder = Path(tool_formats.__file__).parent
    shared = {
        "base.py",
        "constraints.py",
        "lark.py",
        "prompt.py",
        "readers.py",
        "schemas.py",
        "tag_reader.py",
    }
    assert {p.name for p in folder.glob("*.py")} >= shared
    for file in shared:
        assert not re.search(rf"[\"']({names})[\"']", (folder / file).read_text()), file
