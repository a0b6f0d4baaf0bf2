"""Seed-OSS: Qwen3-Coder's functions between tags of its own, `<seed:tool_call>…</seed:tool_call>`, values on one line."""

from __future__ import annotations

from localllm.conversation.tools.base import Named, Start
from localllm.conversation.tools.lark import tagged_calls
from localllm.conversation.tools.qwen_coder import QwenCoder

_OPEN, _CLOSE = "<seed:tool_call>", "</seed:tool_call>"


class Seed(QwenCoder):
    """One function with tagged parameters."""

    name = "seed"
    signs = (_OPEN,)
    markers = (_OPEN, "<function=")
    closing = _CLOSE
    control = True

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other."""
        lark = tagged_calls(
            tools,
            head=lambda name: f"<function={name}>\n",
            before=lambda key: f"<parameter={key}>",
            after="</parameter>\n",
            end="</function>",
        )
        return {_OPEN: Start("\n", lark, f"\n{_CLOSE}", again=True)}


FORMAT = Seed()
