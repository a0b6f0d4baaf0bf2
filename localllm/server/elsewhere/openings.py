"""Frames of a stream that come before its first token: until one that is no such frame has left, it can begin anew
elsewhere and nobody notices. Reads every dialect's; what it does not know is a token."""

from __future__ import annotations

import json
from typing import Any, Literal

Kind = Literal["comment", "opening", "retry", "token"]
# Events that say that there will be an answer (Anthropic's, Responses').
_OPENINGS = (
    "message_start", "ping", "response.created", "response.in_progress", "response.queued",
    "response.output_item.added", "response.content_part.added",
)  # fmt: skip
# Errors of a server that another one need not have.
_RETRIED = ("server_busy", "worker_died", "other_machine_gone", "upstream_failed")
_SAYS_NOTHING: tuple[object, ...] = (None, "", [], {})


def kind_of(frame: bytes) -> Kind:
    """What one frame (with or without the blank line behind it) is."""
    lines = frame.strip().split(b"\n")
    if all(line.startswith(b":") or not line for line in lines):
        return "comment"
    data = b"".join(line[5:] for line in lines if line.startswith(b"data:")) or lines[-1]
    try:
        said = json.loads(data)
    except ValueError:
        return "token"
    if not isinstance(said, dict):
        return "token"
    error = said.get("error")
    if isinstance(error, dict):
        return "retry" if error.get("code") in _RETRIED or said.get("type") == "overloaded_error" else "token"
    if said.get("type") in _OPENINGS:
        return "opening"
    if said.get("type") == "content_block_start":
        return "opening" if (said.get("content_block") or {}).get("text") == "" else "token"
    choices = said.get("choices")
    return "opening" if isinstance(choices, list) and choices and all(map(_empty, choices)) else "token"


def _empty(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason"):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    return all(v in _SAYS_NOTHING for k, v in delta.items() if k != "role")
