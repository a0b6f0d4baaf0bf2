"""DeepSeek V3 and R1 (name, then fenced JSON) and V3.1 (name, then JSON) between <｜tool▁call…｜> marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.lark import json_calls, spelled, text
from localllm.conversation.tools.readers import JsonReader

_HEAD = re.compile(
    r"[\s`]*(?:<｜tool▁call▁end｜>)?\s*(?:<｜tool▁call▁begin｜>)?\s*"
    r"(?:function\s*<｜tool▁sep｜>\s*([^\s<{`]+)\s*(?:```json)?|([^\s<{`]+)\s*<｜tool▁sep｜>)\s*(?=\{)"
)
_SECTION, _CALL, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


class DeepSeek(ToolFormat):
    """Calls in one section; the template tells V3 from V3.1."""

    name = "deepseek"
    signs = (_SECTION,)
    markers = (_SECTION,)
    control = True
    named_tokens = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        """Streams the arguments of one call after the other up to the section's end."""
        return JsonReader(first, marker, _HEAD, end="<｜tool▁calls▁end｜>")

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """The section opens the first call, its own token every other one."""
        if "```json" in template:  # V3 and R1
            lead, end = "function<｜tool▁sep｜>", f"\n```{_END}"
            lark = json_calls(tools, lambda name: text(f"{name}\n```json\n"))
        else:
            lead, end = "", _END
            lark = json_calls(tools, lambda name: spelled(f"{name}<｜tool▁sep｜>"))
        return {
            _SECTION: Start(_CALL + lead, lark, end, again=True),
            _CALL: Start(lead, lark, end, again=True),
        }


FORMAT = DeepSeek()
