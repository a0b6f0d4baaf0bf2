"""FunctionGemma: `<start_function_call>call:f{city:<escape>Paris<escape>,days:2}<end_function_call>`.

Values within values are not read, so tools that have them get no grammar (see lazy.py).
"""

from __future__ import annotations

import json
import re

from localllm.conversation.tools.base import BlockReader, Call, ToolFormat

_CALL = re.compile(r"\s*call:([\w.-]+)\s*\{(.*)\}\s*\Z", re.DOTALL)
_PAIR = re.compile(r"\s*([\w.-]+)\s*:\s*(?:<escape>(.*?)<escape>|([^,{}\[\]<]+))\s*(?:,|\Z)", re.DOTALL)


def _parse(block: str) -> list[Call] | None:
    match = _CALL.match(block)
    if match is None:
        return None
    name, body = match.groups()
    values: dict[str, object] = {}
    at = 0
    while at < len(body):
        pair = _PAIR.match(body, at)
        if pair is None:
            return None
        key, text, bare = pair.groups()
        values[key] = text if text is not None else _bare(bare.strip())
        at = pair.end()
    return [(name, json.dumps(values, ensure_ascii=False))]


def _bare(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


FORMAT = ToolFormat(
    name="function_gemma",
    signs=("<start_function_call>",),
    markers=("<start_function_call>",),
    reader=lambda first, marker, tools: BlockReader(first, marker, "<end_function_call>", _parse),
    control=True,
)
