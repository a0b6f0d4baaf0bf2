"""One conversation as the chat holds it: what is said, in step with the history on disk; knows no screen."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from localllm.conversation.history import History, StoredMessage
from localllm.errors import UsageError

TITLE_CHARS = 60
# An answer is written this often while it streams: what a kill -9 can cost.
SAVE_EVERY_S = 0.5

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)


class Session:
    """A conversation and its place in `history`. A new one reaches the disk with its first message.

    `turns` are the stored messages in order. Every method that changes them has written the change when it returns.
    """

    def __init__(
        self,
        history: History,
        model: str,
        *,
        conv_id: str | None = None,
        system: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = history
        self.model = model
        self.id = conv_id
        self.now = now
        self._system = system
        self.turns: list[StoredMessage] = history.messages(conv_id) if conv_id else []
        self.title = history.get(conv_id).title if conv_id else ""
        if conv_id and system is not None and system != self.system:
            self.set_system(system)

    @property
    def system(self) -> str:
        """The system prompt in force ("" for none): the last one set."""
        for turn in reversed(self.turns):
            if turn.role == "system":
                return turn.content
        return self._system or ""

    @property
    def dialogue(self) -> list[StoredMessage]:
        """The turns a person sees: questions and answers."""
        return [t for t in self.turns if t.role in ("user", "assistant")]

    @property
    def last_answer(self) -> StoredMessage | None:
        """The newest answer, or None."""
        return next((t for t in reversed(self.turns) if t.role == "assistant"), None)

    @property
    def used_tokens(self) -> int:
        """Context in use after the last answer whose tokens the server counted (0 when there is none)."""
        for turn in reversed(self.turns):
            if turn.role == "assistant" and "prompt_tokens" in turn.meta:
                return int(turn.meta["prompt_tokens"]) + int(turn.meta.get("completion_tokens") or 0)
        return 0

    @property
    def compacts(self) -> bool:
        """Whether the oldest messages may be left out of what is sent once not all fit. Nothing is removed here."""
        return any(t.meta.get("compact") for t in self.turns)

    def set_compacts(self, on: bool) -> None:
        """Allow that, or forbid it again; kept with the conversation. Raises UsageError when nothing was asked."""
        for turn in [t for t in self.turns if t.meta.get("compact")]:
            meta = {k: v for k, v in turn.meta.items() if k != "compact"}
            self._rewrite(turn, turn.content, turn.reasoning or "", meta, turn.complete)
        if on:
            first = next((t for t in self.turns if t.role == "user"), None) or self.last_question
            self._rewrite(first, first.content, first.reasoning or "", {**first.meta, "compact": True}, first.complete)

    def set_system(self, text: str) -> None:
        """Use `text` as the system prompt from here on; "" for none."""
        if self.id is None:
            self._system = text
        else:
            self._append("system", text)

    def ask(
        self, text: str, attached: Sequence[tuple[str, str]] = (), *, like: StoredMessage | None = None
    ) -> StoredMessage:
        """Store a question. `attached` are files as (name, text); those of the question `like` come along too."""
        files, names = _files_of(like) if like is not None else ("", [])
        names += [name for name, _ in attached]
        meta = {"typed": text, "attached": names} if names else {}
        content = with_files(text, attached, files)
        if self.id is None:
            self.title = title_of(text or ", ".join(names))
            self.id = self.history.create(self.title, self.model)
            if self._system:
                self._append("system", self._system)
        return self._append("user", content, meta=meta)

    def payload(self) -> list[dict[str, str]]:
        """What to send so that the last question is answered (an answer after it is left out).

        Questions that got no answer are joined with the next: many templates insist on alternating roles.
        """
        turns = self.dialogue
        while turns and turns[-1].role == "assistant":
            turns.pop()
        messages: list[dict[str, str]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in turns:
            if not turn.content.strip():
                continue
            if messages and messages[-1]["role"] == turn.role:
                messages[-1]["content"] += "\n\n" + turn.content
            else:
                messages.append({"role": turn.role, "content": turn.content})
        return messages

    def answer(self) -> Answer:
        """Begin the answer to the last question: a new message, or a new version of the answer it already has.

        Raises UsageError when nothing was asked.
        """
        self._last_question()
        last = self.dialogue[-1]
        return Answer(self, last if last.role == "assistant" else None)

    def swap_earlier(self) -> StoredMessage:
        """Show the last answer's next earlier version in its place; they go round. Raises UsageError if it has none."""
        answer = self.last_answer
        earlier = list(answer.meta.get("earlier", ())) if answer else []
        if answer is None or not earlier:
            raise UsageError("the last answer has no other version", hint="/retry makes one")
        shown, *rest = earlier
        meta = {**shown["meta"], "earlier": [*rest, _version(answer)]}
        return self._rewrite(answer, shown["content"], shown["reasoning"] or "", meta, complete=True)

    def branch(self) -> tuple[Session, StoredMessage]:
        """A new conversation with everything before the last question, and that question, to be asked differently.

        The old conversation stays as it is. Raises UsageError when nothing was asked.
        """
        i = self._last_question()
        copy = Session(self.history, self.model, system=self.system, now=self.now)
        if any(t.role == "user" for t in self.turns[:i]):
            copy.title = self.title
            copy.id = self.history.create(self.title, self.model)
            for turn in self.turns[:i]:
                copy._append(turn.role, turn.content, reasoning=turn.reasoning, meta=turn.meta)
        return copy, self.turns[i]

    @property
    def last_question(self) -> StoredMessage:
        """The newest question. Raises UsageError when nothing was asked."""
        return self.turns[self._last_question()]

    def _last_question(self) -> int:
        for i in range(len(self.turns) - 1, -1, -1):
            if self.turns[i].role == "user":
                return i
        raise UsageError("nothing was asked yet", hint="type a question and press Enter")

    def to_markdown(self) -> str:
        """The conversation as a Markdown document."""
        parts = [f"# {self.title or 'Conversation'}"]
        if self.system:
            parts.append("## System\n\n" + self.system)
        for turn in self.dialogue:
            who = "You" if turn.role == "user" else str(turn.meta.get("model") or self.model)
            parts.append(f"## {who}\n\n{turn.content.strip()}")
        return "\n\n".join(parts) + "\n"

    def _append(
        self,
        role: str,
        content: str,
        *,
        reasoning: str | None = None,
        meta: dict[str, Any] | None = None,
        complete: bool = True,
    ) -> StoredMessage:
        assert self.id is not None
        meta = meta or {}
        n = self.history.append(self.id, role, content, reasoning=reasoning, meta=meta, complete=complete)
        turn = StoredMessage(n, role, content, reasoning, meta, complete, time.time())
        self.turns.append(turn)
        return turn

    def _rewrite(
        self, old: StoredMessage, content: str, reasoning: str, meta: dict[str, Any], complete: bool
    ) -> StoredMessage:
        self.history.update_partial(old.id, content, reasoning=reasoning, meta=meta, complete=complete)
        new = replace(old, content=content, reasoning=reasoning, meta=meta, complete=complete)
        self.turns[next(i for i, t in enumerate(self.turns) if t.id == old.id)] = new
        return new


class Answer:
    """An answer while it streams. Nothing is stored, and no earlier version touched, before its first text."""

    def __init__(self, session: Session, replaces: StoredMessage | None) -> None:
        self.session = session
        self._message = replaces
        self._earlier = [*replaces.meta.get("earlier", ()), _version(replaces)] if replaces else []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._begun = False
        self._dirty = False
        self._saved_s = float("-inf")

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The thinking so far."""
        return "".join(self._reasoning)

    def add(self, text: str = "", reasoning: str = "") -> None:
        """Take a new piece, and write if the last write is SAVE_EVERY_S ago."""
        if text:
            self._text.append(text)
        if reasoning:
            self._reasoning.append(reasoning)
        self._dirty = True
        self.save_if_due()

    def save_if_due(self) -> None:
        """Write what is unsaved, at most every SAVE_EVERY_S seconds (call it from a timer: a stream may stall)."""
        if self._dirty and self.session.now() - self._saved_s >= SAVE_EVERY_S:
            self._save({}, complete=False)

    def finish(self, meta: dict[str, Any]) -> StoredMessage | None:
        """Write the last of it with `meta`. None when there never was anything to keep."""
        if not self._text and not self._reasoning:
            return None
        return self._save(meta, complete=True)

    def _save(self, meta: dict[str, Any], *, complete: bool) -> StoredMessage:
        session = self.session
        meta = {"model": session.model, **meta, **({"earlier": self._earlier} if self._earlier else {})}
        if self._message is None:
            self._message = session._append("assistant", self.text, reasoning=self.reasoning, meta=meta, complete=False)
            if not complete:
                return self._saved(self._message)
        return self._saved(session._rewrite(self._message, self.text, self.reasoning, meta, complete))

    def _saved(self, message: StoredMessage) -> StoredMessage:
        self._message, self._dirty, self._saved_s = message, False, self.session.now()
        return message


def _version(turn: StoredMessage) -> dict[str, Any]:
    meta = {k: v for k, v in turn.meta.items() if k != "earlier"}
    return {"content": turn.content, "reasoning": turn.reasoning, "meta": meta}


def typed_in(question: StoredMessage) -> str:
    """What a person typed for `question`, without the files that went along."""
    return str(question.meta.get("typed", question.content))


def title_of(text: str) -> str:
    """A conversation's title: the first line of its first question, cut at a word where that is possible."""
    line = next((part.strip() for part in text.splitlines() if part.strip()), "Untitled")
    if len(line) <= TITLE_CHARS:
        return line
    cut = line[: TITLE_CHARS - 1]
    return (cut[: cut.rfind(" ")] if " " in cut[TITLE_CHARS // 2 :] else cut).rstrip() + "…"


def code_blocks(markdown: str) -> list[str]:
    """The contents of the fenced code blocks in `markdown`, in order; an unclosed last one counts."""
    return [found[2].rstrip("\n") for found in _FENCE.finditer(markdown)]


def fenced(name: str, body: str) -> str:
    """A file's text as a named Markdown code block, its fence longer than any inside."""
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    language = name.rpartition(".")[2] if "." in name else ""
    return f"File {name}:\n{fence}{language}\n{body.rstrip()}\n{fence}"


def with_files(text: str, attached: Sequence[tuple[str, str]], files: str = "") -> str:
    """A question as sent: `files` (fenced already) and the `attached` ones before the text."""
    return "\n\n".join([*([files] if files else []), *(fenced(name, body) for name, body in attached), text])


def _files_of(turn: StoredMessage) -> tuple[str, list[str]]:
    names = [str(name) for name in turn.meta.get("attached", ())]
    return (turn.content.removesuffix(str(turn.meta.get("typed", ""))).rstrip(), names) if names else ("", [])
