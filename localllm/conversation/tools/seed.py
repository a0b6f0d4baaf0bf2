"""Seed-OSS: Qwen3-Coder's functions between tags of its own, `<seed:tool_call>…</seed:tool_call>`, values on one line and
in Python's spelling."""

from __future__ import annotations

from dataclasses import replace

from localllm.conversation.tools.qwen_coder import QwenCoder
from localllm.conversation.tools.values import PythonValues

_OPEN, _CLOSE = "<seed:tool_call>", "</seed:tool_call>"


class Seed(QwenCoder):
    """One function with tagged parameters."""

    name = "seed"
    signs = (_OPEN,)
    unsure = 0
    markers = (_OPEN, "<function=")
    closing = _CLOSE
    control = True
    tagged = replace(QwenCoder.tagged, wrapped=False)
    tags = replace(
        QwenCoder.tags,
        before=lambda key, kind: f"<parameter={key}>",
        after="</parameter>\n",
        values=PythonValues,
    )


FORMAT = Seed()
