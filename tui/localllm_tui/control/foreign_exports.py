"""Exports of conversations from ChatGPT (conversations.json) and Open WebUI.

Both are lists of conversations, each a tree of messages by id. A message that can't be read is left
out and named, and its replies follow the message before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from localllm.conversation import stored_rows
from localllm.conversation.history import StoredMessage
from localllm.foreign_json import JsonPart, MalformedError
from localllm_tui.control.formatting import title_of

# ChatGPT's messages with this mark are instructions of the program.
_HIDDEN = "is_visually_hidden_from_conversation"

# The member that a conversation of each program has.
_FORMS = {"mapping", "chat"}
# Open WebUI keeps a model's thinking in the text, as a block that is quoted.
_THINKING = re.compile(r"<details type=\"reasoning\"[^>]{0,300}>")
_THINKING_END = re.compile(r"</details>\s*")
_SUMMARY = re.compile(r"\s*<summary>[^<]*</summary>")


@dataclass(slots=True)
class ForeignConversation:
    """A conversation of another program. `head`: the id of its last turn that was shown (0: not
    known). `skipped`: the messages that can't be read, each with the reason."""

    title: str
    model: str
    turns: list[StoredMessage]
    head: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Tree:
    """The nodes of a conversation by id. `message` reads one, and returns None if it is no turn."""

    title: str
    nodes: JsonPart
    head: str
    parent: str
    children: str
    message: Callable[[JsonPart], StoredMessage | None]


def conversations(found: JsonPart) -> Iterator[ForeignConversation | str]:
    """The conversations of an export; for one that can't be read, the reason.

    The result is empty if the document is no known export.
    """
    entries = [found]
    if isinstance(found.value, list):
        entries = [*found.items()]
    if not any(_FORMS & entry.members().keys() for entry in entries):
        return
    for entry in entries:
        try:
            if "mapping" in entry.members():
                yield _read(_of_chatgpt(entry))
            elif "chat" in entry.members():
                yield _read(_of_open_webui(entry))
            else:
                yield f"{entry.path} is no conversation"
        except MalformedError as e:
            yield e.message


def _of_chatgpt(entry: JsonPart) -> _Tree:
    return _Tree(
        entry.get("title").text(),
        entry.get("mapping"),
        entry.get("current_node").text(),
        "parent",
        "children",
        _chatgpt_message,
    )


def _of_open_webui(entry: JsonPart) -> _Tree:
    chat = entry.get("chat")
    history = chat.get("history")
    return _Tree(
        chat.get("title").text() or entry.get("title").text(),
        history.get("messages"),
        history.get("currentId").text(),
        "parentId",
        "childrenIds",
        _open_webui_message,
    )


def _chatgpt_message(node: JsonPart) -> StoredMessage | None:
    message = node.get("message")
    if message.value is None or message.get("metadata").members().get(_HIDDEN):
        return None
    content = message.get("content")
    text = content.get("text").value
    if "parts" in content.members():
        text = [part.value for part in content.get("parts").items()]
    return _message(
        message.get("author").get("role"),
        _text(text),
        message.get("metadata").members().get("model_slug"),
        message.get("create_time").value,
    )


def _open_webui_message(node: JsonPart) -> StoredMessage | None:
    text = _text(node.get("content").value)
    thoughts: list[str] = []
    if node.get("role").value == "assistant":
        text, thoughts = _without_thinking(text)
    turn = _message(
        node.get("role"),
        text,
        node.get("model").value,
        node.get("timestamp").value,
    )
    if turn is None or not thoughts:
        return turn
    return replace(turn, reasoning="\n\n".join(thoughts))


def _without_thinking(text: str) -> tuple[str, list[str]]:
    """The text without its blocks of thinking, and these. A block without an end is text."""
    parts = []
    thoughts = []
    at = 0
    while True:
        opened = _THINKING.search(text, at)
        if opened is None:
            break
        ended = _THINKING_END.search(text, opened.end())
        if ended is None:
            break
        block = text[opened.end() : ended.start()]
        summary = _SUMMARY.match(block)
        if summary is not None:
            block = block[summary.end() :]
        thoughts.append(re.sub(r"^(?:>|&gt;) ?", "", block.strip(), flags=re.MULTILINE))
        parts.append(text[at : opened.start()])
        at = ended.end()
    parts.append(text[at:])
    return "".join(parts), thoughts


def _message(role: JsonPart, text: str, model: object, created_s: object) -> StoredMessage | None:
    """A turn without its place; None for a tool's message, and for one without text."""
    if role.value is None:
        raise role.wrong("a role")
    if role.text() not in stored_rows.ROLES or not text.strip():
        return None
    meta = {}
    if role.text() == "assistant":
        meta["finish_reason"] = "stop"
        if isinstance(model, str) and model:
            meta["model"] = model
    return StoredMessage(0, role.text(), text, None, meta, True, stored_rows.number(created_s))


def _text(value: object) -> str:
    """The text of a content: text, or a list of texts and of objects with a text."""
    if isinstance(value, str):
        return stored_rows.text(value)
    parts = []
    if isinstance(value, list):
        for part in value:
            inner = part.get("text") if isinstance(part, dict) else part
            if isinstance(inner, str):
                parts.append(stored_rows.text(inner))
    return "\n\n".join(part for part in parts if part)


def _read(tree: _Tree) -> ForeignConversation:
    """The tree as turns, a parent before its replies. Raises MalformedError if there is no tree."""
    if not isinstance(tree.nodes.value, dict):
        raise tree.nodes.wrong("an object")
    nodes = tree.nodes.value
    turns: list[StoredMessage] = []
    skipped: list[str] = []
    places: dict[str, int] = {}
    todo = [(name, 0) for name in reversed(_roots(tree))]
    while todo:
        name, parent = todo.pop()
        if name in places:
            continue
        node = tree.nodes.get(name)
        try:
            turn = tree.message(node)
        except MalformedError as e:
            skipped.append(e.message)
            turn = None
        if turn is not None:
            turns.append(_placed(turn, len(turns) + 1, parent))
            if turn.role != "system":
                parent = len(turns)
        places[name] = parent
        todo += [(child, parent) for child in reversed(_children(tree, node)) if child in nodes]
    return ForeignConversation(
        tree.title or _title(turns), _model(turns), turns, places.get(tree.head, 0), skipped
    )


def _roots(tree: _Tree) -> list[str]:
    nodes = tree.nodes.value
    roots = []
    for name, node in nodes.items():
        parent = node.get(tree.parent) if isinstance(node, dict) else None
        if not isinstance(parent, str) or parent not in nodes:
            roots.append(name)
    return roots


def _children(tree: _Tree, node: JsonPart) -> Sequence[str]:
    children = node.members().get(tree.children)
    if not isinstance(children, list):
        return []
    return [child for child in children if isinstance(child, str)]


def _placed(turn: StoredMessage, number: int, parent: int) -> StoredMessage:
    return replace(turn, id=number, parent_id=parent)


def _title(turns: Sequence[StoredMessage]) -> str:
    first = next((turn.content for turn in turns if turn.role == "user"), "")
    return title_of(first)


def _model(turns: Sequence[StoredMessage]) -> str:
    models = [str(turn.meta["model"]) for turn in turns if "model" in turn.meta]
    if models:
        return models[-1]
    return ""
