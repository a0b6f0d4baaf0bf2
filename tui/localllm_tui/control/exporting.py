"""A conversation as a file: Markdown for people, JSON for programs, both with all versions, thinking and system prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from localllm.conversation.history import StoredMessage
from localllm_tui.control.session import Session

FORMAT = "localllm-conversation"
FORMAT_VERSION = 1


def to_json(session: Session) -> str:
    """All branches, as `importing` reads them back."""
    tree = session.tree
    turns = sorted([*tree.every, *tree.systems], key=lambda t: t.id)
    return json.dumps(
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "title": session.title,
            "model": session.model,
            "head": tree.head,
            "messages": [_message(t) for t in turns],
        },
        ensure_ascii=False,
        indent=1,
    )


def _message(turn: StoredMessage) -> dict[str, Any]:
    return {
        "id": turn.id,
        "parent": turn.parent_id,
        "role": turn.role,
        "content": turn.content,
        **({"reasoning": turn.reasoning} if turn.reasoning else {}),
        **({"meta": turn.meta} if turn.meta else {}),
        **({} if turn.complete else {"complete": False}),
        "created_s": turn.created_s,
    }


def to_markdown(session: Session) -> str:
    """The branch that is shown, with the other versions of each turn folded beside it."""
    parts = [f"# {session.title or 'Conversation'}"]
    if session.system and not session.tree.systems:
        parts.append(_system(session.system))
    parts += _systems_after(session, 0)
    for turn in session.turns:
        parts.append(f"## {_who(session, turn)}")
        parts += _body(turn)
        versions = session.tree.versions(turn)
        for n, other in enumerate(versions, 1):
            if other.id != turn.id:
                parts.append(_folded(f"version {n} of {len(versions)}", _body(other)))
        parts += _systems_after(session, turn.id)
    return "\n\n".join(parts) + "\n"


def _systems_after(session: Session, turn_id: int) -> Iterable[str]:
    """The system prompts that were set after a turn; those set on a branch that is not shown stand at the beginning."""
    shown = {t.id for t in session.turns}
    for s in session.tree.systems:
        if (s.parent_id if s.parent_id in shown else 0) == turn_id:
            yield _system(s.content)


def _system(text: str) -> str:
    return f"## System\n\n{text}" if text else "## System\n\n(removed)"


def _who(session: Session, turn: StoredMessage) -> str:
    return "You" if turn.role == "user" else str(turn.meta.get("model") or session.model)


def _body(turn: StoredMessage) -> list[str]:
    reasoning = (turn.reasoning or "").strip()
    thought = [_folded("thinking", [reasoning])] if reasoning else []
    return [*thought, turn.content.strip()]


def _folded(title: str, parts: list[str]) -> str:
    return "\n\n".join([f"<details><summary>{title}</summary>", *parts, "</details>"])
