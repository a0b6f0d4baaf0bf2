"""Messages as clients send them, made into the one plain form that templates and history use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localllm.errors import RequestError, UnsupportedError

ROLES = ("system", "user", "assistant", "tool")
# `developer` is OpenAI's newer name of `system`; `function` the older one of `tool`.
_ALIASES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_BINARY_PARTS = {
    "image_url": "images",
    "image": "images",
    "input_image": "images",
    "input_audio": "audio",
    "file": "files",
    "input_file": "files",
    "video_url": "video",
}


def normalise(messages: Any) -> list[dict[str, Any]]:
    """Check and flatten a `messages` array: known roles, text content, tool calls with parsed arguments.

    Each result has `role` and `content` (a str), and where sent `name`, `reasoning_content`, `tool_calls`
    (`[{"id", "type": "function", "function": {"name", "arguments": dict}}]`), `tool_call_id`. Raises RequestError
    naming the offending element, UnsupportedError for images, audio and files.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError("messages must be an array", param="messages")
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    return [_one(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _one(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with a role and a content", param=where)
    sent = message.get("role")
    role = _ALIASES.get(sent, sent) if isinstance(sent, str) else None
    if role not in ROLES:
        known = ", ".join(("system", "developer", "user", "assistant", "tool"))
        raise RequestError(f"{where}.role is {_short(sent)}; known roles are {known}", param=f"{where}.role")
    plain: dict[str, Any] = {"role": role, "content": flatten(message.get("content"), f"{where}.content")}
    if isinstance(message.get("name"), str):
        plain["name"] = message["name"]
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        plain["tool_call_id"] = message["tool_call_id"]
    if role == "tool" and isinstance(message.get("tool_name"), str):
        plain["name"] = message["tool_name"]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
        if isinstance(reasoning, str):
            plain["reasoning_content"] = reasoning
        calls = _tool_calls(message, where)
        if calls:
            plain["tool_calls"] = calls
    return plain


def flatten(content: Any, where: str = "content") -> str:
    """Text of a content: a string, null, or an array of text parts. Raises UnsupportedError for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string, null or an array of parts", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        spot = f"{where}[{i}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise RequestError(f"{spot} must be an object with a type", param=spot)
        kind = part.get("type", "text")
        if not isinstance(kind, str):
            raise RequestError(f"{spot}.type must be a string", param=spot)
        if kind in _TEXT_PARTS:
            text = part.get("text", part.get("refusal"))
            if not isinstance(text, str):
                raise RequestError(f"{spot}.text must be a string", param=spot)
            texts.append(text)
        elif kind in _BINARY_PARTS:
            raise UnsupportedError(f"{spot}: this model reads text only, not {_BINARY_PARTS[kind]}", param=spot)
        else:
            raise UnsupportedError(f"{spot}.type {_short(kind)} is not supported", param=spot)
    return "\n".join(texts)


def _tool_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    sent = message.get("tool_calls")
    if sent is None and isinstance(message.get("function_call"), Mapping):
        sent = [{"function": message["function_call"]}]
    if sent is None:
        return []
    if not isinstance(sent, Iterable) or isinstance(sent, (str, bytes, Mapping)):
        raise RequestError(f"{where}.tool_calls must be an array", param=f"{where}.tool_calls")
    calls = []
    for i, call in enumerate(sent):
        spot = f"{where}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{spot}.function needs a name", param=spot)
        identity = call.get("id")
        calls.append(
            {
                "id": identity if isinstance(identity, str) else f"call_{i}",
                "type": "function",
                "function": {"name": function["name"], "arguments": parse_arguments(function.get("arguments"))},
            }
        )
    return calls


def unfinished(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True when the last of these (normalised) messages is an assistant's text: an answer for the model to go on with
    (`prefill`)."""
    if not messages:
        return False
    last = messages[-1]
    return last["role"] == "assistant" and not last.get("tool_calls") and bool(last["content"])


def parse_arguments(arguments: Any) -> Any:
    """Arguments as an object when they are one (templates write them with `tojson`), else the text as it is."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
