"""Compare how the templates of two models write a conversation with tools."""

from __future__ import annotations

import difflib
from typing import Any

from localllm import json_store, paths
from localllm.conversation.template import ChatTemplate, TemplateError
from localllm.library.catalog import read_header
from localllm.library.types import LocalModel

_MAX_LINES = 40
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2}},
}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Will it rain in Bern?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes, it will rain."},
    {"role": "user", "content": "And tomorrow?"},
]


def tool_differences(model: LocalModel, reference: LocalModel) -> list[str]:
    """Return the lines that differ between the prompts of `reference` (-) and `model` (+)."""
    reference_lines = _rendered(reference).splitlines()
    model_lines = _rendered(model).splitlines()
    diff_lines = difflib.unified_diff(
        reference_lines, model_lines, reference.path.name, model.path.name, lineterm="", n=1
    )
    return list(diff_lines)[:_MAX_LINES]


def _rendered(model: LocalModel) -> str:
    try:
        return ChatTemplate(_template_of(model)).render(_CONVERSATION, tools=_TOOLS)
    except TemplateError as e:
        return f"the template refuses the conversation: {e.message}"


def _template_of(model: LocalModel) -> str | None:
    if not model.is_folder:
        return read_header(model.path).text("tokenizer.chat_template") or None
    file = model.path / "chat_template.jinja"
    if file.is_file():
        return paths.file_text(file)
    template = json_store.read(model.path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, str):
        return template
    return None
