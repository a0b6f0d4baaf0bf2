"""DeepSeek V3 and R1 (name, then fenced JSON) and V3.1 (name, then JSON) between <｜tool▁call…｜> marks."""

import re

from localllm.conversation.tools.base import JsonReader, ToolFormat

_HEAD = re.compile(
    r"[\s`]*(?:<｜tool▁call▁end｜>)?\s*(?:<｜tool▁call▁begin｜>)?\s*"
    r"(?:function\s*<｜tool▁sep｜>\s*([^\s<{`]+)\s*(?:```json)?|([^\s<{`]+)\s*<｜tool▁sep｜>)\s*(?=\{)"
)

FORMAT = ToolFormat(
    name="deepseek",
    signs=("<｜tool▁calls▁begin｜>",),
    markers=("<｜tool▁calls▁begin｜>",),
    reader=lambda first, marker, tools: JsonReader(first, marker, _HEAD, end="<｜tool▁calls▁end｜>"),
    control=True,
)
