"""The tree of one conversation in memory, in step with the disk: the branch shown, the versions of
a turn."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from localllm.conversation.history import History, StoredMessage, TurnGoneError
from localllm.errors import NotFoundError


class ConversationTree:
    """A conversation of `history`; a new one (`conv_id` None) has no place there before `create`.

    Every method that changes something has written the change when it returns. `turns` are those of
    all branches by their ids, `path` is the branch that is shown, its first turn first; `systems`
    are the system prompts that were set, which belong to no branch.
    """

    def __init__(self, history: History, conv_id: str | None) -> None:
        self.history = history
        self.id: str | None = None
        self.copied = False  # continued in a copy, because another window removed the parent turn
        self.beside = False  # another window has added turns since these were read
        self._empty()
        if conv_id is not None:
            self._read(conv_id)

    def _empty(self) -> None:
        self.turns: dict[int, StoredMessage] = {}
        self._after: dict[int, list[int]] = {}  # the versions of what follows a turn, oldest first
        self.path: list[StoredMessage] = []
        self.systems: list[StoredMessage] = []

    def _read(self, conv_id: str, *, head: int | None = None) -> None:
        everything, stored_head = self.history.tree(conv_id)
        self._empty()
        self.id = conv_id
        for m in everything:
            if m.role == "system":
                self.systems.append(m)
            else:
                self.turns[m.id] = m
                self._after.setdefault(m.parent_id, []).append(m.id)
        for versions in self._after.values():
            versions.sort(key=lambda n: (self.turns[n].created_s, n))
        self._set_path(stored_head if head is None else head)

    def _set_path(self, head: int) -> None:
        path: dict[int, StoredMessage] = {}
        while head in self.turns and head not in path:
            path[head] = self.turns[head]
            head = path[head].parent_id
        self.path = [*path.values()][::-1]

    @property
    def head(self) -> int:
        """The id of the last turn of the branch that is shown; 0 for none."""
        return self.path[-1].id if self.path else 0

    def create(self, title: str, model: str) -> None:
        self.id = self.history.create(title, model)

    def forget(self) -> None:
        """Delete the conversation from the disk and begin a new one."""
        if self.id is not None:
            self.history.delete(self.id)
        self.id = None
        self._empty()

    def versions(self, turn: StoredMessage) -> list[StoredMessage]:
        """The versions of a turn, itself among them, oldest first."""
        return [
            self.turns[n] for n in self._after[turn.parent_id] if self.turns[n].role == turn.role
        ]

    def has_followers(self, turn: StoredMessage) -> bool:
        """Whether any turn follows `turn`, on any branch."""
        return bool(self._after.get(turn.id))

    def show(self, turn_id: int) -> None:
        """Show the most recently continued branch through this turn."""
        if any(t.id == turn_id for t in self.path):
            return
        head = turn_id
        while self._after.get(head):
            head = max(self._after[head])
        assert self.id is not None
        self.history.set_head(self.id, head)
        self._set_path(head)

    def append(
        self,
        role: str,
        content: str,
        *,
        parent: int | None = None,
        reasoning: str | None = None,
        meta: dict[str, Any] | None = None,
        complete: bool = True,
    ) -> StoredMessage:
        """Add a turn after `parent` (None: the head), which becomes the head; or a system prompt,
        which does not."""
        assert self.id is not None
        parent = self.head if parent is None else parent
        meta = meta or {}
        try:
            n = self.history.append(
                self.id,
                role,
                content,
                reasoning=reasoning,
                meta=meta,
                complete=complete,
                parent=parent,
            )
        except (TurnGoneError, NotFoundError):
            places = self._copy()
            return self.append(
                role,
                content,
                parent=places.get(parent, self.head),
                reasoning=reasoning,
                meta=meta,
                complete=complete,
            )
        turn = StoredMessage(n, role, content, reasoning, meta, complete, time.time(), parent)
        if role == "system":
            self.systems.append(turn)
            return turn
        known = self._after.setdefault(parent, [])
        self.turns[n] = turn
        known.append(n)
        if set(self.history.versions(self.id, parent, role)) - set(known):
            self.beside = True
            self._read(self.id, head=n)
        else:
            self._set_path(n)
        return turn

    def _copy(self) -> dict[int, int]:
        """Copy what is shown into a new conversation and continue there; returns the new id of each
        turn."""
        old, title, model = [*self.systems, *self.path], "Untitled", ""
        if self.id is not None and self.history.holds(self.id):
            was = self.history.get(self.id)
            title, model = was.title, was.model
        self._empty()
        self.create(title, model)
        self.copied = True
        return self.add_all(old)

    def add_all(self, turns: Iterable[StoredMessage]) -> dict[int, int]:
        """Add turns of another conversation, parents first; returns the new id of each old one."""
        assert self.id is not None
        places = self.history.add(self.id, sorted(turns, key=lambda t: t.id))
        self._read(self.id)
        return places

    def rewrite(
        self, old: StoredMessage, content: str, reasoning: str, meta: dict[str, Any], complete: bool
    ) -> StoredMessage:
        """Change a turn in its place. Raises NotFoundError where another window removed it."""
        self.history.update_partial(
            old.id, content, reasoning=reasoning, meta=meta, complete=complete
        )
        return self.replace(old, content=content, reasoning=reasoning, meta=meta, complete=complete)

    def replace(self, old: StoredMessage, **changes: Any) -> StoredMessage:
        """Change a turn in memory alone."""
        new = replace(old, **changes)
        self.turns[old.id] = new
        self.path = [new if turn.id == old.id else turn for turn in self.path]
        return new

    def remove(self, turn: StoredMessage) -> None:
        """Remove a turn with all that follows it; its next version is shown, or the turn before
        it."""
        assert self.id is not None
        versions = self.versions(turn)
        at = versions.index(turn)
        others = [v.id for v in (versions[at + 1 :] + versions[:at][::-1])]
        shown = turn in self.path
        with_it = self.head if not shown else None
        self.history.remove(turn.id)
        self._read(self.id, head=with_it)
        if shown and others:
            self.show(others[0])
