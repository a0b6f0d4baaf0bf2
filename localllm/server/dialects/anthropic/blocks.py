"""Anthropic's messages of blocks as the plain messages that templates know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.conversation.messages import flatten
from localllm.errors import RequestError, UnsupportedError

# Stands before what a failed tool said: templates have no field for it.
FAILED = "[the tool failed]"
# What Anthropic's servers did in an earlier turn. Nothing here could go on with it, and the answer that came of it is
# beside it.
_SERVER_SIDE = ("server_tool_use", "mcp_tool_use")


def plain_messages(message: Mapping[str, Any], where: str, omitted: list[str]) -> list[dict[str, Any]]:
    """One message as `conversation.messages.normalise` takes them: tool results become messages of their own. `omitted`
    gets the names of what the model is not told. Raises RequestError."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        spot = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(_result(block, f"{spot}.content"))
        elif kind in _SERVER_SIDE or str(kind).endswith("_tool_result"):
            omitted.append(f"messages.{kind}")
        else:
            parts += _readable(block, kind, spot)
    if not parts and results:
        return results
    plain: dict[str, Any] = {"role": role, "content": parts}
    if calls:
        plain["tool_calls"] = calls
    return [*results, plain]


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    said = block.get("content")
    parts = said if isinstance(said, list) else [{"type": "text", "text": flatten(said, where)}]
    read: list[Any] = [{"type": "text", "text": FAILED}] if block.get("is_error") is True else []
    for i, part in enumerate(parts):
        read += _readable(part, part.get("type") if isinstance(part, Mapping) else None, f"{where}[{i}]")
    texts = [p for p in read if not (isinstance(p, Mapping) and p.get("text") == "")]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": texts}


def _readable(block: Any, kind: Any, where: str) -> list[Any]:
    """The parts of a plain message that `block` comes to; what `normalise` knows is left to it."""
    if kind in ("text", "image", "thinking", "redacted_thinking"):
        return [block]
    if kind == "document":
        return _document(block, where)
    if kind == "search_result":
        return [*_title(block), *_parts(block.get("content"))]
    if kind == "compaction":
        return [{"type": "text", "text": block.get("content") or ""}]
    if kind == "tool_reference":
        return [{"type": "text", "text": f"The tool {block.get('tool_name')} can be called now."}]
    raise UnsupportedError(f"{where}.type {str(kind)[:40]!r} is not supported", param=where)


def _document(block: Mapping[str, Any], where: str) -> list[Any]:
    """A document's text, where it is text: a PDF or an address is for `normalise` to name."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "text" and isinstance(source, Mapping):
        return [*_title(block), {"type": "text", "text": source.get("data")}]
    if kind == "content" and isinstance(source, Mapping):
        return [*_title(block), *_parts(source.get("content"))]
    return [block]


def _title(block: Mapping[str, Any]) -> list[Any]:
    title = block.get("title")
    return [{"type": "text", "text": title}] if isinstance(title, str) and title else []


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
