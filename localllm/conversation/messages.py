"""Converts clients' messages to the plain form that templates and the history use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm import json_store
from localllm.conversation import documents, sounds
from localllm.conversation import images as pictures
from localllm.conversation.documents import AttachedPdf
from localllm.conversation.images import AttachedImage
from localllm.conversation.sounds import AttachedSound
from localllm.errors import RequestError, UnsupportedError
from localllm.json_limits import (
    TooDeepError,
    TooManyContainersError,
    TooManyValuesError,
    check_counts,
    check_depth,
)

ROLES = ("system", "user", "assistant", "tool")
# `developer` is OpenAI's newer name for `system`; `function` is its older one for `tool`.
_ALIASES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")
_BINARY_PARTS = {
    "image_url": "images",
    "image": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "file": "files",
    "input_file": "files",
    "document": "documents",
    "video_url": "video",
    # Reasoning in any other role than the assistant's.
    **dict.fromkeys(_THOUGHT_PARTS, "thinking"),
}

_SINGULAR = {"images": "image", "files": "file", "documents": "document"}


@dataclass
class Attachments:
    """The parts that flattening removes from a content: media and PDFs, with marks in their place.

    `thoughts` collects reasoning, if the content is the model's own.
    """

    thoughts: list[str] | None = None
    images: list[AttachedImage] = field(default_factory=list)
    sounds: list[AttachedSound] = field(default_factory=list)
    pdfs: list[AttachedPdf] = field(default_factory=list)


def normalise(messages: Sequence[Any], omitted: list[str] | None = None) -> list[dict[str, Any]]:
    """Check and flatten a `messages` array: known roles, text content, parsed tool-call arguments.

    Each result has `role` and `content` (a str). If they were sent, it also has
    - `name`, `reasoning_content`, `tool_call_id`
    - `tool_calls` (`[{"id", "type": "function", "function": {"name", "arguments": dict}}]`)
    - `images` (an AttachedImage for each mark in the content, see images.py)
    - `sounds` (an AttachedSound for each mark, see sounds.py)
    - `pdfs` (an AttachedPdf for each mark)

    Text files become text. Videos and other files can't be read here. In the user's newest message
    they are rejected (UnsupportedError), because the answer would be about them. Anywhere else,
    tool results included, a note to the model replaces them, so that an older conversation can
    continue; `omitted` receives their names for the client. Raises RequestError naming the invalid
    element.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    kinds: list[str] = []
    question_index = _question_index(messages)
    plain = [
        _plain_message(message, f"messages[{i}]", None if i == question_index else kinds)
        for i, message in enumerate(messages)
    ]
    _parse_all_arguments(plain)
    if omitted is not None:
        omitted += (f"messages.{kind}" for kind in dict.fromkeys(kinds))
    return plain


def _question_index(messages: Sequence[Any]) -> int | None:
    """The index of the user's newest message, if it is to be answered. System texts may follow
    it."""
    index = len(messages) - 1
    while index > 0 and _sent_role(messages[index]) in ("system", "developer"):
        index -= 1
    if _sent_role(messages[index]) != "user":
        return None
    if index > 0 and _sent_role(messages[index - 1]) in ("tool", "function"):
        return None  # many clients send a tool's images in a message with the user's role
    return index


def _sent_role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _plain_message(message: Any, where: str, omitted: list[str] | None) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with a role and a content", param=where)
    role = _role(message, where)
    sent_content = message.get("content")
    if role == "tool" and isinstance(sent_content, Mapping):  # a tool's return value, unchanged
        sent_content = json.dumps(sent_content, ensure_ascii=False)
    thoughts: list[str] = []
    attachments = Attachments(thoughts if role == "assistant" else None)
    texts = [flatten(sent_content, f"{where}.content", omitted, attachments)]
    texts += _ollama_images(message, where, omitted, attachments)
    plain: dict[str, Any] = {"role": role, "content": "\n".join(text for text in texts if text)}
    fields: dict[str, Any] = {
        "images": attachments.images,
        "sounds": attachments.sounds,
        "pdfs": attachments.pdfs,
        "name": _text_of(message, "name"),
    }
    if role == "tool":
        fields["tool_call_id"] = _text_of(message, "tool_call_id")
        fields["name"] = _text_of(message, "tool_name") or fields["name"]
    if role == "assistant":
        fields["reasoning_content"] = _reasoning(message, thoughts)
        fields["tool_calls"] = _tool_calls(message, where)
    for name, value in fields.items():
        if value:
            plain[name] = value
    return plain


def _role(message: Mapping[str, Any], where: str) -> str:
    sent_role = message.get("role")
    if isinstance(sent_role, str):
        role = _ALIASES.get(sent_role, sent_role)
        if role in ROLES:
            return role
    raise RequestError(
        f"{where}.role is {_short_repr(sent_role)}; known roles are system, "
        "developer, user, assistant, tool",
        param=f"{where}.role",
    )


def _text_of(message: Mapping[str, Any], field_name: str) -> str | None:
    value = message.get(field_name)
    return value if isinstance(value, str) else None


def _ollama_images(
    message: Mapping[str, Any], where: str, omitted: list[str] | None, attachments: Attachments
) -> list[str]:
    """The marks of the media in Ollama's field `images`. They are added to `attachments`."""
    files = message.get("images") or []
    if not isinstance(files, list):
        files = [files]
    marks = []
    for i, file in enumerate(files):
        place = f"{where}.images[{i}]"
        in_question = omitted is None
        sound = (
            sounds.attached_if_sound(file, place, in_question=in_question)
            if isinstance(file, str)
            else None
        )
        if sound is not None:
            attachments.sounds.append(sound)
            marks.append(sound.mark)
            continue
        image = pictures.attached_image(file, place, in_question=in_question)
        attachments.images.append(image)
        marks.append(image.mark)
    return marks


def _reasoning(message: Mapping[str, Any], thoughts: Sequence[str]) -> str | None:
    field_text = (
        message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    )
    if not field_text:
        return "\n".join(thoughts)
    return field_text if isinstance(field_text, str) else None


def _reasoning_text(part: Mapping[str, Any]) -> str:
    """The text of a reasoning part: a string or, in Mistral's format, text parts."""
    text = part.get("thinking", part.get("text"))
    if isinstance(text, list):
        return "\n".join(str(p.get("text", "")) for p in text if isinstance(p, Mapping))
    return text if isinstance(text, str) else ""


def flatten(
    content: Any,
    where: str = "content",
    omitted: list[str] | None = None,
    attachments: Attachments | None = None,
) -> str:
    """The text of a content: a string, null, or an array of parts.

    `attachments` receives media and PDFs; marks replace them in the text. A note replaces each
    unsupported part, and `omitted` receives its kind. If `omitted` is None, such a part raises
    UnsupportedError.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string, null or an array of parts", param=where)
    texts = [
        _part_text(part, f"{where}[{i}]", omitted, attachments) for i, part in enumerate(content)
    ]
    return "\n".join(text for text in texts if text is not None)


def _part_text(
    part: Any, where: str, omitted: list[str] | None, attachments: Attachments | None
) -> str | None:
    """The text of one part, or its replacement. None for reasoning."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with a type", param=where)
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type must be a string", param=where)
    if kind in _TEXT_PARTS:
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise RequestError(f"{where}.text must be a string", param=where)
        return text
    name = _BINARY_PARTS.get(kind)
    if name is None:
        known_types = ", ".join((*_TEXT_PARTS, *_BINARY_PARTS))
        raise UnsupportedError(
            f"{where}.type {_short_repr(kind)} is not supported; known: {known_types}", param=where
        )
    if attachments is not None:
        if kind in _THOUGHT_PARTS and attachments.thoughts is not None:
            attachments.thoughts.append(_reasoning_text(part))
            return None
        if kind in pictures.KINDS:
            attachments.images.append(pictures.attached(part, where, in_question=omitted is None))
            return attachments.images[-1].mark
        if kind in sounds.KINDS:
            attachments.sounds.append(sounds.attached(part, where, in_question=omitted is None))
            return attachments.sounds[-1].mark
        if name in ("files", "documents"):
            return _file(part, name, where, omitted, attachments)
    refused = f"this model does not support {name}"
    return _omit(name, where, omitted, refused, f"this server does not support {name} yet")


def _file(
    part: Mapping[str, Any],
    kind: str,
    where: str,
    omitted: list[str] | None,
    attachments: Attachments,
) -> str:
    """The text that replaces a file.

    Raises UnsupportedError if the file belongs to the turn to be answered and can't be read.
    """
    try:
        file = documents.attached(part, where, kind, in_question=omitted is None)
    except UnsupportedError as e:
        return _omit(kind, where, omitted, e.message, e.message)
    if isinstance(file, str):
        return file
    attachments.pdfs.append(file)
    return file.mark


def _omit(kind: str, where: str, omitted: list[str] | None, error: str, reason: str) -> str:
    """The note to the model that replaces an unsupported part.

    Raises UnsupportedError with the reason `error` if `omitted` is None.
    """
    if omitted is None:
        raise UnsupportedError(f"{where}: {error}", param=where)
    omitted.append(kind)
    return f"[{_SINGULAR.get(kind, kind)} omitted: {reason}]"


def _tool_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    sent_calls = message.get("tool_calls")
    if sent_calls is None:
        function_call = message.get("function_call")
        sent_calls = [{"function": function_call}] if isinstance(function_call, Mapping) else []
    if not isinstance(sent_calls, Iterable) or isinstance(sent_calls, (str, bytes, Mapping)):
        raise RequestError(f"{where}.tool_calls must be an array", param=f"{where}.tool_calls")
    calls = []
    for i, call in enumerate(sent_calls):
        place = f"{where}.tool_calls[{i}]"
        function = _function(call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{place}.function needs a name", param=place)
        call_id = _text_of(call, "id")
        if call_id is None:
            call_id = f"call_{i}"
        plain_function = {"name": function["name"], "arguments": function.get("arguments")}
        calls.append({"id": call_id, "type": "function", "function": plain_function})
    return calls


def _function(call: Any) -> Any:
    """The function of one of OpenAI's calls, or None.

    A custom tool has a text instead of arguments.
    """
    if not isinstance(call, Mapping):
        return None
    custom = call.get("custom")
    if isinstance(custom, Mapping):
        return {"name": custom.get("name"), "arguments": {"input": custom.get("input") or ""}}
    return call.get("function")


def unfinished(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if the last of these normalised messages is assistant text.

    The model then continues that text (`prefill`).
    """
    if not messages:
        return False
    last = messages[-1]
    return last["role"] == "assistant" and not last.get("tool_calls") and bool(last["content"])


def _parse_all_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Parse the arguments of all tool calls.

    Raises RequestError if they hold too many values or nest too deeply.
    """
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    sent_arguments = [function["arguments"] for function in functions]
    try:
        check_counts(
            *(text.encode(errors="replace") for text in sent_arguments if isinstance(text, str))
        )
        for function in functions:
            function["arguments"] = parse_arguments(function["arguments"])
            check_depth(function["arguments"])
    except (TooManyContainersError, TooManyValuesError) as e:
        raise RequestError(f"the arguments of all tool calls hold {e}", param="messages") from e
    except TooDeepError as e:
        raise RequestError(f"an argument of a tool call {e}", param="messages") from e


def parse_arguments(arguments: Any) -> Any:
    """Arguments as an object if possible (templates write them with `tojson`), else unchanged."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        parsed = json_store.parsed(arguments)
        if isinstance(parsed, dict):
            return parsed
    return arguments


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
