"""Turn rows of the conversation file, or of an imported file, into messages, even if they are damaged.

Another program, a bad disk or a person may have written them. The text is kept, and a part of the
wrong type is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from localllm import json_store
from localllm.foreign_json import well_formed

ROLES = ("system", "user", "assistant")
_MAX_ID = 2**53


def text(value: object) -> str:
    """A text column, or its nearest text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if value is None:
        return ""
    return well_formed(str(value))


def optional_text(value: object) -> str | None:
    """A text column that may be empty (NULL)."""
    if value is None:
        return None
    return text(value)


def number(value: object) -> float:
    """A time in seconds; 0 if it is no time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MAX_ID:
        return 0.0
    if math.isfinite(value):
        return float(value)
    return 0.0


def whole_number(value: object) -> int:
    """An id or a count; 0 if it is neither."""
    return int(number(value))


def role(value: object) -> str:
    """One of ROLES; a damaged role becomes the user's."""
    if value in ROLES:
        return str(value)
    return "user"


def meta(value: object) -> dict[str, Any]:
    """The metadata of a message, from JSON text or an object. Known members of the wrong type are
    left out."""
    if isinstance(value, str | bytes):
        value = json_store.parsed(text(value))
    if not isinstance(value, dict):
        return {}
    members = {}
    for name, member in value.items():
        is_valid = _VALID_MEMBER.get(name)
        if is_valid is None or is_valid(member):
            members[name] = member
    return members


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= _MAX_ID


def _is_figure(value: object) -> bool:
    return number(value) == value


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _are_calls(value: object) -> bool:
    return isinstance(value, list) and all(_is_call(entry) for entry in value)


def _is_call(value: object) -> bool:
    """Whether a tool call has texts for its name, its arguments and its result."""
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(value.get(name, ""), str) for name in ("name", "arguments", "result"))


# The members that the chat reads, with the check of each.
_VALID_MEMBER: Mapping[str, Callable[[object], bool]] = {
    "model": _is_text, "finish_reason": _is_text, "reread_why": _is_text, "typed": _is_text,
    "prompt_tokens": _is_count, "completion_tokens": _is_count, "cached_tokens": _is_count,
    "left_out": _is_count, "reread_tokens": _is_count, "tok_s": _is_figure, "ttft_s": _is_figure,
    "attached": _are_texts, "tools": _are_calls, "identical_calls": _is_text,
    "summary": _is_text, "summary_tokens": _is_count,
}  # fmt: skip
