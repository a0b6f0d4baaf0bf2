"""DeepSeek: JSON between <｜tool▁call…｜> tokens up to V3.1, DSML tags since V3.2."""

from __future__ import annotations

import json
import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.call_grammars import KIND, NAME, TagGrammar
from localllm.conversation.tools.lark import json_calls, spelled, text
from localllm.conversation.tools.readers import json_block
from localllm.conversation.tools.tag_reader import TagPatterns, tagged_format

_HEAD = re.compile(
    r"[\s`]*+(?:<｜tool▁call▁end｜>)?\s*+(?:<｜tool▁call▁begin｜>)?\s*+"
    r"(?:function\s*+<｜tool▁sep｜>\s*+([^\s<{`]+)\s*+(?:```json)?|([^\s<{`]+)\s*+<｜tool▁sep｜>)\s*+(?=\{)"
)
_SECTION = "<｜tool▁calls▁begin｜>"
_CALL = "<｜tool▁call▁begin｜>"
_END = "<｜tool▁call▁end｜>"


def _before_fenced_json(name: str) -> str:
    return text(f"{name}\n```json\n")


def _before_json(name: str) -> str:
    return spelled(f"{name}<｜tool▁sep｜>")


def _is_json(parameter: re.Match[str]) -> bool:
    return parameter[2] == "false"


def _is_string(kind: str) -> str:
    return json.dumps(kind == "string")


_DSML_PATTERNS = TagPatterns(
    re.compile(r'\s*<｜DSML｜invoke name="([^"]+)">'),
    "</｜DSML｜invoke>",
    re.compile(r'\s*<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>'),
    "</｜DSML｜parameter>",
    is_json=_is_json,
)
_DSML_GRAMMAR = TagGrammar(
    head=f'<｜DSML｜invoke name="{NAME}">\n',
    before=f'<｜DSML｜parameter name="{NAME}" string="{KIND}">',
    after="</｜DSML｜parameter>\n",
    end="</｜DSML｜invoke>\n",
    kind_text=_is_string,
    loose=True,  # V4 writes an empty line if there is no parameter
)


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    """The section token opens the first call, the call token every other one."""
    if "```json" in template:  # V3 and R1
        lead = "function<｜tool▁sep｜>"
        end = f"\n```{_END}"
        lark = json_calls(tools, _before_fenced_json)
    else:
        lead = ""
        end = _END
        lark = json_calls(tools, _before_json)
    return {
        _SECTION: GrammarTrigger(_CALL + lead, lark, end, again=True, once=True),
        _CALL: GrammarTrigger(lead, lark, end, again=True),
    }


FORMATS = (
    # V3 and R1 (name, then fenced JSON) and V3.1 (name, then JSON) use the same section. The
    # template shows which one.
    ToolFormat(
        name="deepseek",
        signs=(_SECTION,),
        markers=(_SECTION,),
        control=True,
        named_tokens=True,
        reader=json_block("<｜tool▁calls▁end｜>", _HEAD),
        triggers=_triggers,
    ),
    # V3.2 and V4: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="k"
    # string="true">v</｜DSML｜parameter>…`. The attribute `string` shows if a value is text or JSON.
    tagged_format(
        name="dsml",
        signs=("<｜DSML｜", "｜DSML｜"),
        markers=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        calls_in_reasoning=True,
        lead="\n",
        one_block=True,
        patterns=_DSML_PATTERNS,
        grammar=_DSML_GRAMMAR,
    ),
)
