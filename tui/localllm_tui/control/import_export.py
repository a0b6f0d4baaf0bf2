"""Conversations as files: Markdown and JSON out; the JSON, and exports of other programs, in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from localllm import paths
from localllm.conversation import stored_rows
from localllm.conversation.history import History, StoredMessage
from localllm.errors import UsageError
from localllm.foreign_json import JsonPart, MalformedError, parse
from localllm_tui.control import foreign_exports
from localllm_tui.control.foreign_exports import ForeignConversation
from localllm_tui.control.formatting import how_many
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import one_line

FORMAT = "localllm-conversation"
FORMAT_VERSION = 1


def to_json(session: Session) -> str:
    """Return all branches in the format that `import_file` reads."""
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


_MAX_BYTES = 256 << 20
_MAX_VALUES = 20_000_000
# The most names of unreadable parts in a note.
_NAMED = 3
_KNOWN = (
    "JSON files of /save, conversations.json of ChatGPT and exports of Open WebUI can be imported"
)


@dataclass(frozen=True, slots=True)
class Imported:
    """The ids of the imported conversations, newest first, and the parts that can't be read."""

    ids: list[str]
    skipped: list[str]

    def note(self, path: Path) -> str:
        """What was imported from `path`, in a line."""
        text = f"imported {how_many(len(self.ids), 'conversation')} from {path}; /list shows them"
        if len(self.ids) == 1:
            text = f"imported from {path}; /list shows it too"
        if not self.skipped:
            return text
        named = "; ".join(one_line(reason) for reason in self.skipped[:_NAMED])
        more = len(self.skipped) - _NAMED
        if more > 0:
            named += f"; and {more:,} more"
        return f"{text}\nleft out, because it can't be read: {named}"


def import_file(history: History, path: Path, model: str) -> Imported:
    """Store the conversations of a file in the history: one of /save, or an export of another
    program.

    `model`: the model if the file does not name one. Raises UsageError if the file can't be read or
    contains no conversation.
    """
    try:
        found = parse(_contents(path), most_chars=_MAX_BYTES, most_values=_MAX_VALUES)
    except MalformedError as e:
        raise UsageError(f"{path} is not a conversation: {e.message}", hint=_KNOWN) from e
    read = [*foreign_exports.conversations(found)]
    if not read:
        return Imported([_store(history, found, path, model)], [])
    skipped: list[str] = []
    stored: list[tuple[float, str]] = []
    for conversation in read:
        if isinstance(conversation, str):
            skipped.append(conversation)
            continue
        skipped += conversation.skipped
        if conversation.turns:
            latest_s = max(turn.created_s for turn in conversation.turns)
            stored.append((latest_s, _store_foreign(history, conversation, model)))
        else:
            skipped.append(f"{conversation.title or 'a conversation'} has no message with text")
    if not stored:
        reason = skipped[0] if skipped else "no message has text"
        raise UsageError(f"{path} has no conversation: {reason}", hint=_KNOWN)
    return Imported([conv_id for _, conv_id in sorted(stored, reverse=True)], skipped)


def _store_foreign(history: History, found: ForeignConversation, model: str) -> str:
    conv_id = history.create(found.title, found.model or model)
    places = history.add(conv_id, found.turns)
    if places.get(found.head):
        history.set_head(conv_id, places[found.head])
    return conv_id


def _store(history: History, found: JsonPart, path: Path, model: str) -> str:
    """Store the conversation of a file of /save. Returns its id."""
    try:
        version = found.get("version").count()
        if found.get("format").text() != FORMAT or version is None or version > FORMAT_VERSION:
            raise MalformedError(f"its format is not {FORMAT} of version {FORMAT_VERSION}")
        turns = [_turn(message) for message in found.get("messages").items()]
        head = found.get("head").count() or 0
        title = found.get("title").text() or "Untitled"
        model = found.get("model").text() or model
    except MalformedError as e:
        raise UsageError(f"{path} is not a conversation: {e.message}", hint=_KNOWN) from e
    conv_id = history.create(title, model)
    places = history.add(conv_id, turns)
    if places.get(head):
        history.set_head(conv_id, places[head])
    return conv_id


def _contents(path: Path) -> bytes:
    """The bytes of a file. Raises UsageError if it can't be read or is too large."""
    file = path.expanduser()
    try:
        return paths.file_bytes(file, _MAX_BYTES)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UsageError(f"{path} can't be read: {reason}", hint=_KNOWN) from e


def _turn(message: JsonPart) -> StoredMessage:
    role = message.get("role")
    if role.value not in stored_rows.ROLES:
        raise role.wrong(" or ".join(stored_rows.ROLES))
    number = message.get("id").count()
    if number is None:
        raise message.get("id").wrong("a number")
    complete = message.get("complete").value
    return StoredMessage(
        number,
        role.text(),
        message.get("content").text(),
        message.get("reasoning").text() or None,
        stored_rows.meta(message.get("meta").cleaned()),
        complete is None or bool(complete),
        stored_rows.number(message.get("created_s").value),
        message.get("parent").count() or 0,
    )
