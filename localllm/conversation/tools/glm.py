"""GLM-4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from localllm.conversation.tools.base import BlockReader, Call, Tool, ToolFormat, as_json, typed

_CALL = re.compile(r"\s*([\w.-]+)\s*((?:<arg_key>.*)?)\s*\Z", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)


def _parse(tools: Sequence[Tool], block: str) -> list[Call] | None:
    match = _CALL.match(block)
    if match is None:
        return None
    name, pairs = match.groups()
    values = {k.strip(): typed(v.strip("\n"), k.strip(), name, tools) for k, v in _PAIR.findall(pairs)}
    return [(name, as_json(values))]


FORMAT = ToolFormat(
    name="glm",
    signs=("<arg_key>",),
    markers=("<tool_call>",),
    reader=lambda first, marker, tools: BlockReader(first, marker, "</tool_call>", partial(_parse, tools)),
)
