"""One conversation in step with the history on disk; knows no screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from localllm.conversation.history import History, HistoryError, StoredMessage
from localllm.errors import NotFoundError, UsageError
from localllm_tui.control.attachments import files_of, with_files
from localllm_tui.control.conversation_tree import ConversationTree
from localllm_tui.control.formatting import title_of

# While it streams an answer is written this often; a kill -9 loses no more.
SAVE_EVERY_S = 0.5
# A failed write may have waited for a lock: the next one comes after this many times as long.
WAIT_SHARE = 5.0


class Session:
    """A conversation and its place in `history`. A new one reaches the disk with its first message.

    `turns` are the questions and answers of the branch that is shown, in order. Every method that
    changes something has written the change when it returns.
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
        self.tree = ConversationTree(history, conv_id)
        self._system = system
        stored = history.get(conv_id) if conv_id else None
        self.title = stored.title if stored is not None else ""
        # who made the title: ConversationSummary
        self.titled = stored.titled if stored is not None else 0
        if conv_id and system is not None and system != self.system:
            self.set_system(system)

    @property
    def id(self) -> str | None:
        """Its id in the history; None before anything was said."""
        return self.tree.id

    @property
    def turns(self) -> list[StoredMessage]:
        return self.tree.path

    @property
    def system(self) -> str:
        """The system prompt in force ("" for none): the last one set, on whichever branch."""
        return self.tree.systems[-1].content if self.tree.systems else self._system or ""

    @property
    def last_answer(self) -> StoredMessage | None:
        return next((t for t in reversed(self.turns) if t.role == "assistant"), None)

    @property
    def used_tokens(self) -> int:
        """Context in use after the last answer whose tokens the server counted (0 when there is
        none)."""
        answers = (turn.meta for turn in reversed(self.turns) if turn.role == "assistant")
        counted = next((meta for meta in answers if "prompt_tokens" in meta), {})
        return sum(int(counted.get(f"{part}_tokens") or 0) for part in ("prompt", "completion"))

    @property
    def counted(self) -> bool:
        """Whether `used_tokens` is what the server counted for all that would be sent now."""
        turns = self.sent_turns
        return not turns or (
            turns[-1].role == "assistant"
            and "prompt_tokens" in turns[-1].meta
            and not turns[-1].meta.get("estimated")
        )

    @property
    def unanswered(self) -> bool:
        return any(turn.role == "user" for turn in self.turns[-1:])

    @property
    def compacts(self) -> bool:
        """Whether compaction is on: the oldest messages may be left out of a request that is too
        long. Nothing is removed here."""
        return any(t.meta.get("compact") for t in self.tree.turns.values())

    def set_compacts(self, on: bool) -> None:
        """Allow or forbid compaction; kept with the conversation. Raises UsageError when nothing
        was asked."""
        for turn in [t for t in self.tree.turns.values() if t.meta.get("compact")]:
            meta = {k: v for k, v in turn.meta.items() if k != "compact"}
            self.tree.rewrite(turn, turn.content, turn.reasoning or "", meta, turn.complete)
        if on:
            first = next((t for t in self.turns if t.role == "user"), None) or self.last_question
            self.tree.rewrite(
                first,
                first.content,
                first.reasoning or "",
                {**first.meta, "compact": True},
                first.complete,
            )

    def set_system(self, text: str) -> None:
        """Use `text` as the system prompt from here on; "" for none."""
        if self.id is None:
            self._system = text
        else:
            self.tree.append("system", text)

    def ask(
        self,
        text: str,
        attached: Sequence[tuple[str, str]] = (),
        *,
        instead: StoredMessage | None = None,
    ) -> StoredMessage:
        """Store a question. `attached` are files as (name, text).

        `instead`: as another version of this question, with its files; the old one is removed where
        nothing followed it.
        """
        files, names = files_of(instead) if instead is not None else ("", [])
        names += [name for name, _ in attached]
        meta = {"typed": text, "attached": names} if names else {}
        content = with_files(text, attached, files)
        if self.id is None:
            self.title = title_of(text or ", ".join(names))
            self.tree.create(self.title, self.model)
            if self._system:
                self.tree.append("system", self._system)
        if instead is None:
            return self.tree.append("user", content, meta=meta)
        turn = self.tree.append("user", content, meta=meta, parent=instead.parent_id)
        if instead.id in self.tree.turns and not self.tree.has_followers(instead):
            self.tree.remove(instead)
            if not self.titled and self.title == title_of(
                instead.meta.get("typed", instead.content)
            ):
                self.rename(title_of(text), titled=0)
        return turn

    def change_answer(self, answer: StoredMessage, text: str) -> StoredMessage:
        """Store `text` as another version of `answer`, as if the model had said it."""
        meta = {
            "model": answer.meta.get("model", self.model),
            "finish_reason": "stop",
            "edited": True,
        }
        return self.tree.append("assistant", text, meta=meta, parent=answer.parent_id)

    def drop_question(self) -> None:
        """Remove the last question. Raises UsageError where it was answered, or nothing was
        asked."""
        old = self.last_question
        if not self.unanswered:
            raise UsageError("the last question was answered", hint="/edit asks it differently")
        self.remove(old)

    def remove(self, turn: StoredMessage) -> None:
        """Remove a turn and all that follows it; its other versions stay. The last turn takes the
        conversation with it."""
        self.tree.remove(turn)
        if not self.turns:
            self._system = self.system
            self.tree.forget()
            self.title, self.titled = "", 0

    def fail_question(self) -> None:
        """Mark the last question as failed: it is not sent again unless it is retried."""
        old = self.last_question
        if self.unanswered:
            meta = {**old.meta, "failed": True}
            try:
                self.tree.rewrite(old, old.content, old.reasoning or "", meta, old.complete)
            except HistoryError:
                self.tree.replace(old, meta=meta)  # what is sent next must not wait for the disk

    def context_to(
        self, turn: StoredMessage, instead: StoredMessage | None = None
    ) -> list[dict[str, str]]:
        """The messages up to a turn and with it: what to send so that a question is answered, or an
        answer goes on. `instead`: as if the turn stood in the place of this one.

        Questions that got no answer are joined with the next: many templates insist on alternating
        roles. Those that failed are left out, so that one question too long does not spoil what
        comes after it.
        """
        before = self._before(instead or turn)
        return self._messages([*(t for t in self.sent_turns if t.id in before), turn])

    def _before(self, turn: StoredMessage) -> set[int]:
        ids = [t.id for t in self.turns]
        return set(ids[: ids.index(turn.id)] if turn.id in ids else ids)

    def context(self) -> list[dict[str, str]]:
        """The messages of the conversation as the model gets them, the last answer included."""
        return self._messages(self.sent_turns)

    def would_send(
        self,
        text: str,
        attached: Sequence[tuple[str, str]] = (),
        *,
        instead: StoredMessage | None = None,
        alone: bool = False,
    ) -> list[dict[str, str]]:
        """The messages if this were asked now; `instead`: as a version of this question; `alone`:
        without the earlier turns."""
        files = files_of(instead)[0] if instead is not None else ""
        asked = StoredMessage(0, "user", with_files(text, attached, files))
        return self._messages([asked]) if alone else self.context_to(asked, instead)

    @property
    def sent_turns(self) -> list[StoredMessage]:
        """The turns without questions that failed and were never answered."""
        turns = self.turns
        after = [*turns[1:], None]  # one too many where there is no turn
        return [
            turn
            for turn, then in zip(turns, after, strict=False)
            if not turn.meta.get("failed") or (then is not None and then.role == "assistant")
        ]

    def _messages(self, turns: Sequence[StoredMessage]) -> list[dict[str, str]]:
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

    def answer(
        self, to: StoredMessage | None = None, *, continues: bool = False, model: str = ""
    ) -> PendingAnswer:
        """Begin the answer to a question (None: the last one), beside those it has; `to` may be one
        of these. `model`: of another model than the conversation's.

        `continues`: more of the answer there is, which was stopped, cut or broken off. Raises
        UsageError when nothing was asked, or there is nothing to go on with.
        """
        last = self.turns[-1] if self.turns else None
        if continues:
            begun = self._continued(to or last)
            return PendingAnswer(self, self.tree.turns.get(begun.parent_id, begun), begun)
        to = to or self.last_question
        question = self.tree.turns.get(to.parent_id) if to.role == "assistant" else to
        if question is None:
            raise UsageError(
                "there is no question before this answer", hint="ask one, and it is answered"
            )
        return PendingAnswer(self, question, model=model)

    def _continued(self, turn: StoredMessage | None) -> StoredMessage:
        if turn is None:
            raise UsageError("nothing was asked yet", hint="type a question and press Enter")
        if turn.role != "assistant" or not turn.content.strip():
            raise UsageError("there is no answer to go on with", hint="/retry asks for one")
        if not self.unfinished(turn):
            raise UsageError("the last answer is complete", hint="/retry asks for another")
        return turn

    @staticmethod
    def unfinished(turn: StoredMessage) -> bool:
        """Whether a turn is an answer that did not come to its end by itself, or was changed
        since."""
        ended = (
            turn.complete
            and turn.meta.get("finish_reason") == "stop"
            and not turn.meta.get("edited")
        )
        return turn.role == "assistant" and bool(turn.content.strip()) and not ended

    def other_version(self, turn: StoredMessage, step: int) -> StoredMessage:
        """Show the version `step` places after `turn`, cyclically, and what followed it. Raises
        UsageError where there is no other."""
        versions = self.tree.versions(turn)
        if len(versions) == 1:
            how = "/retry makes one" if turn.role == "assistant" else "/edit makes one"
            raise UsageError("this turn has no other version", hint=how)
        other = versions[(self.place(turn)[0] - 1 + step) % len(versions)]
        self.tree.show(other.id)
        return other

    def place(self, turn: StoredMessage) -> tuple[int, int]:
        """Which of how many versions `turn` is, counted from 1."""
        versions = [v.id for v in self.tree.versions(turn)]
        return versions.index(turn.id) + 1, len(versions)

    def branch_off(self, turn: StoredMessage) -> Session:
        """A new conversation with all turns up to `turn`; this one stays as it is."""
        upto = self._before(turn) | {turn.id}
        copy = Session(self.history, self.model, system=self.system, now=self.now)
        taken = {c.title for c in self.history.list(self.title, limit=1000)}
        names = (f"{self.title} (branch{f' {n}' if n > 1 else ''})" for n in range(1, 1002))
        copy.title = next(name for name in names if name not in taken)
        copy.tree.create(copy.title, self.model)
        copy.tree.add_all([*self.tree.systems[-1:], *(t for t in self.turns if t.id in upto)])
        if self.compacts:
            copy.set_compacts(True)
        return copy

    def rename(self, title: str, *, titled: int = 2) -> None:
        """Change the title; `titled`: by a model (1) or the user (2). Raises NotFoundError where it
        is not on disk."""
        self.history.rename(self.id or "", title, titled=titled)
        self.title, self.titled = title, titled

    @property
    def last_question(self) -> StoredMessage:
        """The newest question. Raises UsageError when nothing was asked."""
        asked = next((t for t in reversed(self.turns) if t.role == "user"), None)
        if asked is None:
            raise UsageError("nothing was asked yet", hint="type a question and press Enter")
        return asked


class PendingAnswer:
    """An answer while it streams. Nothing is stored, and no other version touched, before its first
    text."""

    def __init__(
        self,
        session: Session,
        question: StoredMessage,
        begun: StoredMessage | None = None,
        *,
        model: str = "",
    ) -> None:
        self.session = session
        self.model = model or session.model
        self.continues = begun is not None
        self.question = question
        self._begun = begun
        # More of an answer is written in its place, unless the conversation has gone on from it.
        self._message = (
            begun if begun is not None and not session.tree.has_followers(begun) else None
        )
        self.text = begun.content if begun is not None else ""
        self.reasoning = (begun.reasoning or "") if begun is not None else ""
        self._grown = self.unsaved = False
        self._meta: dict[str, Any] | None = None  # what is known at its end
        self._next_save_s = float("-inf")

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.session.context_to(self._begun or self.question)

    def add(self, text: str = "", reasoning: str = "") -> None:
        """Take a new piece, and write if the last write is SAVE_EVERY_S ago."""
        self.text += text
        self.reasoning += reasoning
        self.unsaved = self._grown = True
        self.save_if_due()

    @property
    def due(self) -> bool:
        """Whether to write again: every SAVE_EVERY_S seconds, later where the disk refuses."""
        return self.unsaved and self.session.now() >= self._next_save_s

    def save_if_due(self) -> None:
        """Write what is unsaved, if it is time (call it from a timer: a stream may stall)."""
        if self.due:
            self.save()

    def finish(self, meta: dict[str, Any]) -> StoredMessage | None:
        """Write the last of it with `meta`. None when nothing came."""
        self._meta, self.unsaved = meta, self._grown
        return self.save()

    def save(self) -> StoredMessage | None:
        """Write what is unsaved now; returns the turn. Raises HistoryError, and is then due later."""
        if not self.unsaved:
            return self._message
        began_s = self.session.now()
        try:
            return self._save(self._meta or {}, complete=self._meta is not None)
        except HistoryError:
            ended_s = self.session.now()
            self._next_save_s = ended_s + max(SAVE_EVERY_S, WAIT_SHARE * (ended_s - began_s))
            raise

    def _save(self, meta: dict[str, Any], *, complete: bool) -> StoredMessage:
        tree = self.session.tree
        meta = {"model": self.model, **meta}
        if self._message is not None:
            try:
                return self._saved(
                    tree.rewrite(self._message, self.text, self.reasoning, meta, complete)
                )
            except NotFoundError:
                pass  # another window removed it: store the text as a new turn
        parent = self._begun.parent_id if self._begun is not None else self.question.id
        turn = tree.append(
            "assistant",
            self.text,
            parent=parent,
            reasoning=self.reasoning,
            meta=meta,
            complete=complete,
        )
        return self._saved(turn)

    def _saved(self, message: StoredMessage) -> StoredMessage:
        self._message, self.unsaved = message, False
        self._next_save_s = self.session.now() + SAVE_EVERY_S
        return message
