"""gpt-oss: channels. `analysis` is reasoning, `final` the answer, `commentary to=functions.name` a call."""

import re

from localllm.conversation.tools.base import JsonReader, ToolFormat

_HEAD = re.compile(r"([\w.-]+)(?:(?!<\|message\|>)[^{])*<\|message\|>\s*(?=\{)")

FORMAT = ToolFormat(
    name="harmony",
    signs=("<|channel|>",),
    markers=(
        "<|channel|>commentary to=functions.",
        "<|channel|>analysis to=functions.",
        "<|start|>assistant to=functions.",
    ),
    reader=lambda first, marker, tools: JsonReader(first, marker, _HEAD, end=None),
    control=True,
    drops=(
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
    think=("<|channel|>analysis<|message|>", "<|end|>"),
)
