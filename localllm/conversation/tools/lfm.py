"""LFM2: Python calls in a list, `<|tool_call_start|>[f(city="Paris", days=2)]<|tool_call_end|>`."""

from __future__ import annotations

import ast
import json

from localllm.conversation.tools.base import BlockReader, Call, ToolFormat, json_calls


def _parse(block: str) -> list[Call] | None:
    try:
        tree = ast.parse(block.strip(), mode="eval").body
        items = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        calls: list[Call] = []
        for item in items:
            prefix = ""
            if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Sub):
                # `get-weather(…)` is a subtraction to Python.
                prefix, item = ast.unparse(item.left).replace(" ", "") + "-", item.right
            if not isinstance(item, ast.Call) or item.args or any(k.arg is None for k in item.keywords):
                return json_calls(block)
            values = {str(k.arg): ast.literal_eval(k.value) for k in item.keywords}
            calls.append((prefix + ast.unparse(item.func), json.dumps(values, ensure_ascii=False)))
        return calls or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return json_calls(block)


FORMAT = ToolFormat(
    name="lfm",
    signs=("<|tool_call_start|>",),
    markers=("<|tool_call_start|>",),
    reader=lambda first, marker, tools: BlockReader(first, marker, "<|tool_call_end|>", _parse),
    control=True,
)
