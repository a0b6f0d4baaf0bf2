"""Conversations as files: Markdown and JSON out, the JSON in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from localllm.conversation.history import History, StoredMessage
from localllm.errors import UsageError
from localllm_tui.control.session import Session

FORMAT = "localllm-conversation"
FORMAT_VERSION = 1


def to_json(session: Session) -> str:
    """All branches, as `store` takes them back."""
    turns = sorted([*session.all_turns.values(), *session.systems], key=attrgetter("id"))
    conversation = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "title": session.title,
        "model": session.model,
        "head": session.head,
        "messages": [_message(t) for t in turns],
    }
    return json.dumps(conversation, ensure_ascii=False, indent=1)


def _message(turn: StoredMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"id": turn.id, "parent": turn.parent_id}
    message["role"] = turn.role
    message["content"] = turn.content
    if turn.reasoning:
        message["reasoning"] = turn.reasoning
    if turn.meta:
        message["meta"] = turn.meta
    if not turn.complete:
        message["complete"] = False
    message["created_s"] = turn.created_s
    return message


def to_markdown(session: Session) -> str:
    """The branch that is shown, with the other versions of each turn folded."""
    return "\n\n".join(_parts(session)) + "\n"


def _parts(session: Session) -> Iterable[str]:
    yield f"# {session.title or 'Conversation'}"
    if session.system and not session.systems:
        yield _system(session.system)
    yield from _systems_after(session, 0)
    for turn in session.turns:
        if turn.role == "user":
            yield "## You"
        else:
            yield f"## {turn.meta.get('model') or session.model}"
        yield from _body(turn)
        versions = session.versions(turn)
        for n, other in enumerate(versions, 1):
            if other.id != turn.id:
                yield _folded(f"version {n} of {len(versions)}", *_body(other))
        yield from _systems_after(session, turn.id)


def _systems_after(session: Session, turn_id: int) -> Iterable[str]:
    """The system prompts that were set after a turn. Those set on a branch that is not shown are at
    the beginning."""
    shown = {t.id for t in session.turns}
    for prompt in session.systems:
        after = prompt.parent_id if prompt.parent_id in shown else 0
        if after == turn_id:
            yield _system(prompt.content)


def _system(text: str) -> str:
    if text:
        return f"## System\n\n{text}"
    return "## System\n\n(removed)"


def _body(turn: StoredMessage) -> Iterable[str]:
    reasoning = (turn.reasoning or "").strip()
    if reasoning:
        yield _folded("thinking", reasoning)
    yield turn.content.strip()


def _folded(title: str, *parts: str) -> str:
    return "\n\n".join([f"<details><summary>{title}</summary>", *parts, "</details>"])


_ROLES = ("system", "user", "assistant")
_KNOWN = "known is the JSON of /save"


def store(history: History, path: Path, model: str) -> str:
    """Store the conversation of a file in the history as a new one. Returns its id.

    `model`: the model if the file does not name one. Raises UsageError if the file can't be read or
    contains no conversation.
    """
    try:
        found = json.loads(path.expanduser().read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise UsageError(f"{path} can't be read: {e.strerror or e}") from e
    except ValueError as e:
        raise UsageError(f"{path} is not JSON: {e}", hint=_KNOWN) from e
    try:
        if found["format"] != FORMAT or int(found["version"]) > FORMAT_VERSION:
            raise ValueError(f"{found['format']} of version {found['version']}")
        turns = [_turn(message) for message in found["messages"]]
        head = int(found.get("head") or 0)
        title = str(found.get("title") or "Untitled")
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(f"{path} is no conversation ({type(e).__name__}: {e})", hint=_KNOWN) from e
    conv_id = history.create(title, str(found.get("model") or model))
    places = history.add(conv_id, turns)
    if places.get(head):
        history.set_head(conv_id, places[head])
    return conv_id


def _turn(message: Mapping[str, Any]) -> StoredMessage:
    if message["role"] not in _ROLES:
        raise ValueError(f"a message has the role {message['role']!r}")
    return StoredMessage(
        int(message["id"]),
        message["role"],
        str(message["content"]),
        message.get("reasoning"),
        dict(message.get("meta") or {}),
        bool(message.get("complete", True)),
        float(message.get("created_s") or 0),
        int(message.get("parent") or 0),
    )
