"""Conversations as files: Markdown and JSON out; our JSON and exports of ChatGPT in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.conversation.history import History, StoredMessage
from localllm.errors import UsageError
from localllm_tui.control.conversation_tree import ConversationTree
from localllm_tui.control.formatting import title_of
from localllm_tui.control.session import Session

FORMAT = "localllm-conversation"
FORMAT_VERSION = 1


def to_json(session: Session) -> str:
    """All branches, as `read` takes them back."""
    tree = session.tree
    turns = sorted([*tree.turns.values(), *tree.systems], key=lambda t: t.id)
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
    """The branch that is shown, with the other versions of each turn folded."""
    parts = [f"# {session.title or 'Conversation'}"]
    if session.system and not session.tree.systems:
        parts.append(_system(session.system))
    parts += _systems_after(session, 0)
    for turn in session.turns:
        who = "You" if turn.role == "user" else turn.meta.get("model") or session.model
        parts.append(f"## {who}")
        parts += _body(turn)
        versions = session.tree.versions(turn)
        for n, other in enumerate(versions, 1):
            if other.id != turn.id:
                parts.append(_folded(f"version {n} of {len(versions)}", _body(other)))
        parts += _systems_after(session, turn.id)
    return "\n\n".join(parts) + "\n"


def _systems_after(session: Session, turn_id: int) -> Iterable[str]:
    """The system prompts that were set after a turn; those set on a branch that is not shown stand
    at the beginning."""
    shown = {t.id for t in session.turns}
    for s in session.tree.systems:
        if (s.parent_id if s.parent_id in shown else 0) == turn_id:
            yield _system(s.content)


def _system(text: str) -> str:
    return f"## System\n\n{text}" if text else "## System\n\n(removed)"


def _body(turn: StoredMessage) -> list[str]:
    reasoning = (turn.reasoning or "").strip()
    thought = [_folded("thinking", [reasoning])] if reasoning else []
    return [*thought, turn.content.strip()]


def _folded(title: str, parts: list[str]) -> str:
    return "\n\n".join([f"<details><summary>{title}</summary>", *parts, "</details>"])


_ROLES = ("system", "user", "assistant")
_KNOWN = "known are the JSON of /save and conversations.json of ChatGPT"


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    """A conversation read from a file. `head` is the turn to show (0: the newest); ids are the
    file's own."""

    title: str
    model: str
    turns: tuple[StoredMessage, ...]
    head: int = 0


def read(path: Path) -> list[ImportedConversation]:
    """The conversations in a file. Raises UsageError for one that can't be read, or is none of the
    formats known."""
    try:
        found = json.loads(path.expanduser().read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise UsageError(f"{path} can't be read: {e.strerror or e}") from e
    except ValueError as e:
        raise UsageError(f"{path} is not JSON: {e}", hint=_KNOWN) from e
    try:
        conversations = [c for c in _conversations(found) if c.turns]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise UsageError(
            f"{path} has conversations that can't be read ({type(e).__name__}: {e})", hint=_KNOWN
        ) from e
    if not conversations:
        raise UsageError(f"{path} has no conversations", hint=_KNOWN)
    return conversations


def store(history: History, conversations: Iterable[ImportedConversation], model: str) -> list[str]:
    """Write them to the history, each as a new conversation; returns their ids. `model` is for
    those that name none."""
    ids = []
    for imported in conversations:
        tree = ConversationTree(history, None)
        tree.create(imported.title or "Untitled", imported.model or model)
        places = tree.add_all(imported.turns)
        if places.get(imported.head):
            history.set_head(str(tree.id), places[imported.head])
        ids.append(str(tree.id))
    return ids


def _conversations(found: Any) -> Iterable[ImportedConversation]:
    if isinstance(found, Mapping):
        if found.get("format") == FORMAT:
            yield _ours(found)
        elif "mapping" in found:
            yield _chatgpt(found)
    elif isinstance(found, list):
        for one in found:
            yield from _conversations(one)


def _ours(found: Mapping[str, Any]) -> ImportedConversation:
    if int(found["version"]) > FORMAT_VERSION:
        raise ValueError(f"version {found['version']} is of a newer release")
    turns = tuple(
        StoredMessage(
            int(m["id"]),
            _role(m["role"]),
            str(m["content"]),
            m.get("reasoning"),
            dict(m.get("meta") or {}),
            bool(m.get("complete", True)),
            float(m.get("created_s") or 0),
            int(m.get("parent") or 0),
        )
        for m in found["messages"]
    )
    return ImportedConversation(
        str(found.get("title") or ""),
        str(found.get("model") or ""),
        turns,
        int(found.get("head") or 0),
    )


def _chatgpt(found: Mapping[str, Any]) -> ImportedConversation:
    """`mapping` is a tree of nodes, many of them empty or for tools, whose children move up to their
    parent; `current_node` is its head."""
    nodes = found["mapping"]
    turns: list[StoredMessage] = []
    place: dict[str, int] = {}
    roots = [n for n, node in nodes.items() if node.get("parent") not in nodes]
    todo, seen = [(n, 0) for n in reversed(roots)], set()
    while todo:
        name, parent = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        turn = _chatgpt_turn(nodes[name], len(turns) + 1, parent)
        if turn is not None:
            turns.append(turn)
            parent = parent if turn.role == "system" else turn.id
        place[name] = parent
        children = reversed(nodes[name].get("children") or ())
        todo += [(child, parent) for child in children if child in nodes]
    return ImportedConversation(
        str(found.get("title") or "") or _title(turns),
        next((str(t.meta["model"]) for t in reversed(turns) if "model" in t.meta), ""),
        tuple(turns),
        place.get(str(found.get("current_node") or ""), 0),
    )


def _chatgpt_turn(node: Mapping[str, Any], turn_id: int, parent: int) -> StoredMessage | None:
    message = node.get("message") or {}
    about, content = message.get("metadata") or {}, message.get("content") or {}
    if not message or about.get("is_visually_hidden_from_conversation"):
        return None
    role = message["author"]["role"]
    text = _text(content.get("parts") if "parts" in content else content.get("text"))
    if role not in _ROLES or not text.strip():
        return None
    model = about.get("model_slug")
    meta = {"model": model} if model and role == "assistant" else {}
    created_s = float(message.get("create_time") or 0.0)
    return StoredMessage(turn_id, role, text, None, meta, True, created_s, parent)


def _role(role: Any) -> str:
    if role not in _ROLES:
        raise ValueError(f"a message has the role {role!r}")
    return str(role)


def _text(content: Any) -> str:
    """The text of a message: a string, or parts of which those that are text count."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            p if isinstance(p, str) else str(p.get("text") or "") if isinstance(p, Mapping) else ""
            for p in content
        ]
        return "\n\n".join(p for p in parts if p)
    return ""


def _title(turns: Iterable[StoredMessage]) -> str:
    return next((title_of(t.content) for t in turns if t.role == "user"), "Untitled")
