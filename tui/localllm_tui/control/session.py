"""One conversation in step with the history on disk: its branches, the versions of a turn, and what
the model gets of it; knows no screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from localllm.conversation.history import History, HistoryError, StoredMessage, TurnGoneError
from localllm.conversation.summary import Summary
from localllm.errors import NotFoundError, UsageError
from localllm_tui.control.attachments import files_of, typed_in, with_files
from localllm_tui.control.formatting import title_of

# Members of a turn's metadata that belong to compaction.
_OF_COMPACTION = {"compact", "summary", "summary_tokens"}


def after_summary(
    turns: Sequence[StoredMessage],
) -> tuple[Summary | None, Sequence[StoredMessage]]:
    """The newest summary, and the turns after the turn that has it; without a summary, all turns."""
    for i in range(len(turns) - 1, -1, -1):
        summary = Summary.from_json(turns[i].meta.get("summary", ""))
        if summary is not None:
            return summary, turns[i + 1 :]
    return None, turns


class Session:
    """A conversation and its place in `history`. A new one reaches the disk with its first message.

    `turns` are the questions and answers of the branch that is shown, in order, `all_turns` those
    of all branches by their ids; `systems` are the system prompts that were set, which belong to no
    branch. Every method that changes something has written the change when it returns.
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
        self.now = now
        self.copied = False  # continued in a copy, because another window removed the parent turn
        self.changed_elsewhere = False  # another window has added turns since these were read
        self._system = system or ""
        self._forget()
        if conv_id is not None:
            self._read(conv_id)
            stored = history.get(conv_id)
            self.title = stored.title
            self.titled = stored.titled
            if system is not None and system != self.system:
                self.set_system(system)

    def _forget(self) -> None:
        """Become an empty conversation."""
        self.id: str | None = None  # in the history; None before the first message
        self.title = ""
        self.titled = 0  # who made the title: ConversationSummary
        self._empty()

    def _empty(self) -> None:
        self.all_turns: dict[int, StoredMessage] = {}
        self._after: dict[
            int, list[int]
        ] = {}  # the next turns of each turn, by parent, oldest version first
        self.turns: list[StoredMessage] = []
        self.systems: list[StoredMessage] = []

    def _read(self, conv_id: str, *, head: int | None = None) -> None:
        everything, stored_head = self.history.tree(conv_id)
        self._empty()
        self.id = conv_id
        for m in everything:
            if m.role == "system":
                self.systems.append(m)
            else:
                self.all_turns[m.id] = m
                self._after.setdefault(m.parent_id, []).append(m.id)
        for versions in self._after.values():
            versions.sort(key=self._age)
        self._show_branch(stored_head if head is None else head)

    def _age(self, turn_id: int) -> tuple[float, int]:
        return self.all_turns[turn_id].created_s, turn_id

    def _show_branch(self, head: int) -> None:
        path: dict[int, StoredMessage] = {}
        while head in self.all_turns and head not in path:
            path[head] = self.all_turns[head]
            head = path[head].parent_id
        self.turns = [*path.values()][::-1]

    @property
    def head(self) -> int:
        """The id of the last turn of the branch that is shown; 0 if it is empty."""
        if self.turns:
            return self.turns[-1].id
        return 0

    @property
    def system(self) -> str:
        """The current system prompt ("": no prompt). It is the last one set on any branch."""
        if self.systems:
            return self.systems[-1].content
        return self._system

    @property
    def last_answer(self) -> StoredMessage | None:
        return next((t for t in reversed(self.turns) if t.role == "assistant"), None)

    @property
    def used_tokens(self) -> int:
        """Context in use after the last answer whose tokens the server counted (0: no such
        answer)."""
        for turn in reversed(self.turns):
            if "summary_tokens" in turn.meta:
                return int(turn.meta["summary_tokens"])
            if turn.role == "assistant" and "prompt_tokens" in turn.meta:
                prompt = int(turn.meta["prompt_tokens"] or 0)
                return prompt + int(turn.meta.get("completion_tokens") or 0)
        return 0

    @property
    def counted(self) -> bool:
        """True if `used_tokens` is the server's count of all messages that would be sent now."""
        turns = self.sent_turns
        if not turns:
            return True
        last = turns[-1]
        counted = "prompt_tokens" in last.meta and not last.meta.get("estimated")
        return last.role == "assistant" and counted

    @property
    def unanswered(self) -> bool:
        return bool(self.turns) and self.turns[-1].role == "user"

    @property
    def compacts(self) -> bool:
        """True if compaction is on. A request that is too long is then sent without the oldest
        messages. They remain in the conversation."""
        return any(t.meta.get("compact") for t in self.all_turns.values())

    def set_compacts(self, on: bool) -> None:
        """Allow or forbid compaction in this conversation; to forbid it also forgets the summaries.
        Raises UsageError if there is no question yet."""
        for turn in [t for t in self.all_turns.values() if _OF_COMPACTION & t.meta.keys()]:
            meta = {k: v for k, v in turn.meta.items() if k not in _OF_COMPACTION}
            self.rewrite(replace(turn, meta=meta))
        if on:
            first = next((t for t in self.turns if t.role == "user"), None) or self.last_question
            self.rewrite(replace(first, meta={**first.meta, "compact": True}))

    def set_system(self, text: str) -> None:
        """Use `text` as the system prompt from here on; "" removes the prompt."""
        if self.id is None:
            self._system = text
        else:
            self.append("system", text)

    def ask(
        self,
        text: str,
        attached: Sequence[tuple[str, str]] = (),
        *,
        instead: StoredMessage | None = None,
    ) -> StoredMessage:
        """Store a question. `attached` are files as (name, text).

        `instead`: store it as another version of this question, with its files; the old version is
        removed if it has no answer.
        """
        files = ""
        names: list[str] = []
        if instead is not None:
            files, names = files_of(instead)
        names += [name for name, _ in attached]
        meta: dict[str, Any] = {}
        if names:
            meta = {"typed": text, "attached": names}
        content = with_files(text, attached, files)
        if self.id is None:
            self.title = title_of(text or ", ".join(names))
            self.id = self.history.create(self.title, self.model)
            if self._system:
                self.append("system", self._system)
        if instead is None:
            return self.append("user", content, meta=meta)
        turn = self.append("user", content, meta=meta, parent=instead.parent_id)
        if instead.id in self.all_turns and not self.has_followers(instead):
            self.remove(instead)
            if not self.titled and self.title == title_of(typed_in(instead)):
                self.rename(title_of(text), titled=0)
        return turn

    def change_answer(self, answer: StoredMessage, text: str) -> StoredMessage:
        """Store `text` as another version of `answer`, with the model as its author."""
        model = answer.meta.get("model", self.model)
        meta = {"model": model, "finish_reason": "stop", "edited": True}
        return self.append("assistant", text, meta=meta, parent=answer.parent_id)

    def drop_question(self) -> None:
        """Remove the last question. Raises UsageError if it was answered or if there is no
        question."""
        old = self.last_question
        if not self.unanswered:
            raise UsageError("the last question has an answer", hint="/edit changes it")
        self.remove(old)

    def remove(self, turn: StoredMessage) -> None:
        """Remove a turn and all that follows it; its next version is shown, or the turn before it.
        The last turn takes the conversation with it."""
        assert self.id is not None
        versions = self.versions(turn)
        at = versions.index(turn)
        others = versions[at + 1 :] + versions[:at][::-1]
        shown = turn in self.turns
        head = None if shown else self.head
        self.history.remove(turn.id)
        self._read(self.id, head=head)
        if shown and others:
            self.show(others[0].id)
        if not self.turns:
            self._system = self.system
            self.history.delete(self.id)
            self._forget()

    def fail_question(self) -> None:
        """Mark the last question as failed: later requests leave it out unless it is retried."""
        old = self.last_question
        if self.unanswered:
            failed = replace(old, meta={**old.meta, "failed": True})
            self._remember(failed)  # the next request must not wait for the disk
            with suppress(HistoryError):
                self.rewrite(failed)

    def context(
        self, last: StoredMessage | None = None, instead: StoredMessage | None = None
    ) -> list[dict[str, str]]:
        """The messages of the conversation as the model gets them; up to and including `last`, if a
        question is to be answered or an answer continued. `instead`: `last` takes the place of this
        turn.

        Questions without an answer are joined with the next one: many templates require alternating
        roles. Failed questions are left out, so that one that is too long does not affect later
        ones.
        """
        turns: Sequence[StoredMessage] = self.sent_turns
        if last is not None:
            before = self._before(instead or last)
            turns = [*(t for t in turns if t.id in before), last]
        messages: list[dict[str, str]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        summary, turns = after_summary(turns)
        if summary is not None:
            messages.append({"role": "user", "content": summary.message()})
        for turn in turns:
            if not turn.content.strip():
                continue
            if messages and messages[-1]["role"] == turn.role:
                messages[-1]["content"] += "\n\n" + turn.content
            else:
                messages.append({"role": turn.role, "content": turn.content})
        return messages

    def _before(self, turn: StoredMessage) -> set[int]:
        ids = [t.id for t in self.turns]
        if turn.id in ids:
            del ids[ids.index(turn.id) :]
        return set(ids)

    def messages_for(
        self,
        text: str,
        attached: Sequence[tuple[str, str]] = (),
        *,
        instead: StoredMessage | None = None,
        without_history: bool = False,
    ) -> list[dict[str, str]]:
        """The messages of a request with this question; `instead`: as a version of this question;
        `without_history`: without the earlier turns."""
        files = ""
        if instead is not None:
            files, _ = files_of(instead)
        question = StoredMessage(0, "user", with_files(text, attached, files))
        if without_history and self.turns:
            return self.context(question, self.turns[0])
        return self.context(question, instead)

    @property
    def sent_turns(self) -> list[StoredMessage]:
        """The turns without questions that failed and were never answered."""
        turns = self.turns
        after = [*turns[1:], None]  # one too many if there are no turns
        return [
            turn
            for turn, then in zip(turns, after, strict=False)
            if not turn.meta.get("failed") or (then is not None and then.role == "assistant")
        ]

    @staticmethod
    def unfinished(turn: StoredMessage) -> bool:
        """True if a turn is an answer that was interrupted, or that the user changed."""
        if turn.role != "assistant" or not turn.content.strip():
            return False
        stopped_itself = turn.complete and turn.meta.get("finish_reason") == "stop"
        return not stopped_itself or bool(turn.meta.get("edited"))

    def other_version(self, turn: StoredMessage, step: int) -> StoredMessage:
        """Show the version `step` places after `turn`, cyclically, and the turns that follow it.
        Raises UsageError if there is no other version."""
        versions = self.versions(turn)
        if len(versions) == 1:
            hint = "/retry makes one" if turn.role == "assistant" else "/edit makes one"
            raise UsageError("this turn has no other version", hint=hint)
        other = versions[(self.place(turn)[0] - 1 + step) % len(versions)]
        self.show(other.id)
        return other

    def place(self, turn: StoredMessage) -> tuple[int, int]:
        """The number of this version of the turn, counted from 1, and the number of its
        versions."""
        versions = [v.id for v in self.versions(turn)]
        return versions.index(turn.id) + 1, len(versions)

    def branch_off(self, turn: StoredMessage) -> Session:
        """Return a new conversation with all turns up to `turn`. This conversation does not
        change."""
        upto = self._before(turn) | {turn.id}
        conv_id = self.history.create(self._branch_title(), self.model)
        self.history.add(conv_id, [*self.systems[-1:], *(t for t in self.turns if t.id in upto)])
        copy = Session(self.history, self.model, conv_id=conv_id, now=self.now)
        if self.compacts:
            copy.set_compacts(True)
        return copy

    def _branch_title(self) -> str:
        """Return a title for a branch that differs from all other titles."""
        used_titles = {c.title for c in self.history.list(self.title, limit=1000)}
        title = f"{self.title} (branch)"
        n = 1
        while title in used_titles:
            n += 1
            title = f"{self.title} (branch {n})"
        return title

    def rename(self, title: str, *, titled: int = 2) -> None:
        """Change the title; `titled`: by a model (1) or the user (2). Raises NotFoundError if the
        conversation is not on disk."""
        self.history.rename(self.id or "", title, titled=titled)
        self.title = title
        self.titled = titled

    @property
    def last_question(self) -> StoredMessage:
        """The newest question. Raises UsageError if there is no question."""
        question = next((t for t in reversed(self.turns) if t.role == "user"), None)
        if question is None:
            raise UsageError("there is no question yet", hint="type a question and press Enter")
        return question

    # -- the tree of turns -------------------------------------------------------------------------

    def versions(self, turn: StoredMessage) -> list[StoredMessage]:
        """Return all versions of a turn, including the turn itself, oldest first."""
        siblings = (self.all_turns[n] for n in self._after[turn.parent_id])
        return [sibling for sibling in siblings if sibling.role == turn.role]

    def has_followers(self, turn: StoredMessage) -> bool:
        """True if any turn follows `turn`, on any branch."""
        return bool(self._after.get(turn.id))

    def show(self, turn_id: int) -> None:
        """Show the most recently continued branch through this turn."""
        if any(t.id == turn_id for t in self.turns):
            return
        head = turn_id
        while self._after.get(head):
            head = max(self._after[head])
        assert self.id is not None
        self.history.set_head(self.id, head)
        self._show_branch(head)

    def append(
        self, role: str, content: str, *, parent: int | None = None, **more: Any
    ) -> StoredMessage:
        """Add a turn after `parent` (None: the head), which becomes the head; or a system prompt,
        which does not. `more` is as the history takes it."""
        assert self.id is not None
        parent = self.head if parent is None else parent
        try:
            n = self.history.append(self.id, role, content, parent=parent, **more)
        except (TurnGoneError, NotFoundError):
            places = self._copy()
            return self.append(role, content, parent=places.get(parent, self.head), **more)
        turn = StoredMessage(n, role, content, created_s=time.time(), parent_id=parent, **more)
        if role == "system":
            self.systems.append(turn)
            return turn
        known = self._after.setdefault(parent, [])
        self.all_turns[n] = turn
        known.append(n)
        if set(self.history.versions(self.id, parent, role)) - set(known):
            self.changed_elsewhere = True
            self._read(self.id, head=n)
        else:
            self._show_branch(n)
        return turn

    def _copy(self) -> dict[int, int]:
        """Copy what is shown into a new conversation and continue there; returns the new id of each
        turn."""
        self.id = self.history.create(self.title, self.model)
        self.copied = True
        places = self.history.add(self.id, [*self.systems, *self.turns])
        self._read(self.id)
        return places

    def rewrite(self, turn: StoredMessage) -> StoredMessage:
        """Write a changed turn. Raises NotFoundError if another window removed it."""
        self.history.update_partial(
            turn.id, turn.content, reasoning=turn.reasoning, meta=turn.meta, complete=turn.complete
        )
        self._remember(turn)
        return turn

    def _remember(self, turn: StoredMessage) -> None:
        """Replace a turn in memory by its new state."""
        self.all_turns[turn.id] = turn
        self.turns = [turn if turn.id == old.id else old for old in self.turns]
