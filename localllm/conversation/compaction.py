"""Compaction: decides which messages of a too long conversation to leave out.

The rest must fit, and should stay the same for as long as possible. Compaction only runs on
request; without it, a full context is an error with the token counts. Other servers truncate as
follows. OpenAI's `truncation: "auto"` drops items until the rest fits. llama-server's context shift
drops half of the tokens at any position. LM Studio's rolling window drops the oldest messages. Each
may cut in the middle of a tool call. Dropping one message per turn also changes the beginning of
every prompt, so no prefix cache helps. (OpenAI's Realtime API has a `retention_ratio` for the same
reason.) The rules here are:

- The **oldest complete turns** are dropped first: a question with its answers, calls and results.
  System messages and the newest question stay. If that is not enough (an agent working on one
  question), the oldest rounds of the newest turn are dropped: an assistant message with the results
  of its calls. Calls and their results are never separated, and the newest round stays.
- More is dropped than necessary: down to `KEEP` of the space. The next cut is then some turns away.
  Until then, every prompt begins like the one before.
- The cut depends on the messages alone; the server keeps no record of it. The history is
  **replayed** from its first message: whenever the kept part outgrows the budget, the cut moves. A
  state after message 40 depends only on messages 1 to 40. So the same history always gets the same
  cut, and a longer one the same or a later cut. Dropped messages never come back.
- A line of text replaces the dropped messages. It states their number, so it changes only when the
  cut changes. It is added to the question next to the gap, because a separate message would break
  the alternation of roles that many templates require.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The share of the budget, without the fixed part, that the kept turns may use after a cut. For
# turns of equal size, (1 - KEEP) of the turns that fit can be added before the next cut.
KEEP = 0.6
# Upper limit of the notes' length in tokens: two notes of about a dozen words and a number each (20
# tokens with SmolLM2's vocabulary).
NOTE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class MessageCost:
    """The prompt tokens of a message.

    `passing` of them count only until the next question: reasoning that the template leaves out of
    earlier turns.
    """

    tokens: int
    passing: int = 0


@dataclass(frozen=True, slots=True)
class Compacted:
    """The messages to send, and the indices of the `dropped` ones.

    `exhausted` is True if no further message may be dropped.
    """

    messages: list[dict[str, Any]]
    dropped: frozenset[int]
    exhausted: bool


@dataclass(slots=True)
class _Unit:
    """Messages that are kept or dropped together.

    They are a question, or an assistant message with the results of its calls. `turn` is the number
    of earlier questions.
    """

    turn: int
    asks: bool
    indices: list[int] = field(default_factory=list)
    tokens: int = 0
    passing: int = 0
    dropped: bool = False


class _Replay:
    """Replays the growth of a conversation message by message, and records the dropped messages."""

    def __init__(self, fixed_tokens: int, budget_tokens: int) -> None:
        self._fixed = fixed_tokens + NOTE_TOKENS
        self._budget = budget_tokens
        self._kept: list[_Unit] = []
        self._turn = 0
        self._callers: dict[str, _Unit] = {}
        # of the kept messages; only the newest turn has passing tokens
        self._tokens = self._passing = 0
        self._is_at_head = True
        self.dropped: set[int] = set()

    def next_to_drop(self) -> list[_Unit]:
        """The units to drop next: the oldest turn, or a round if only the newest turn is left.

        It is the oldest round, but never the last one. Empty if no more may be dropped.
        """
        oldest = [unit for unit in self._kept if unit.turn == self._kept[0].turn]
        if oldest and oldest[0].turn < self._turn:
            return oldest
        rounds = [unit for unit in oldest if not unit.asks]
        return rounds[:1] if len(rounds) > 1 else []

    def add(self, index: int, message: Mapping[str, Any], cost: MessageCost) -> None:
        """Add one message, and drop others if it exceeds the budget."""
        if message["role"] == "system":
            if not self._is_at_head:  # the fixed part contains those at the head
                self._fixed += cost.tokens
                self._drop_until_fits()
            return
        self._is_at_head = False
        unit = self._unit_for(message)
        unit.indices.append(index)
        for call in message.get("tool_calls", ()):
            self._callers[call["id"]] = unit
        if unit.dropped:  # a result that came after its call was dropped
            self.dropped.add(index)
            return
        unit.tokens += cost.tokens
        unit.passing += cost.passing
        self._tokens += cost.tokens
        self._passing += cost.passing
        self._drop_until_fits()

    def _unit_for(self, message: Mapping[str, Any]) -> _Unit:
        role = message["role"]
        last = self._kept[-1] if self._kept else None
        if role == "tool":
            caller = self._callers.get(message.get("tool_call_id", ""), last)
            if caller is not None:
                return caller
        asks = role == "user"
        if asks and last is not None:
            if last.asks:
                return last  # context and question in separate messages are one question
            self._turn += 1
            self._passing = 0
        self._kept.append(_Unit(self._turn, asks))
        return self._kept[-1]

    def _drop_until_fits(self) -> None:
        if self._fixed + self._tokens + self._passing <= self._budget:
            return
        goal = int(KEEP * max(0, self._budget - self._fixed))
        dropping = self.next_to_drop()
        while dropping and self._tokens + self._passing > goal:
            for unit in dropping:
                unit.dropped = True
                self.dropped.update(unit.indices)
                self._tokens -= unit.tokens
                if unit.turn == self._turn:
                    self._passing -= unit.passing
            self._kept = [unit for unit in self._kept if not unit.dropped]
            dropping = self.next_to_drop()


def compact(
    messages: Sequence[Mapping[str, Any]],
    costs: Sequence[MessageCost],
    *,
    fixed_tokens: int,
    budget_tokens: int,
) -> Compacted:
    """The part of `messages` to keep within `budget_tokens`.

    The messages come from `conversation.messages.normalise`, and `costs` has one entry per message.
    `fixed_tokens` is the rest of the prompt: tools, the template's own text, and the system
    messages at the head. The messages that can't be dropped may exceed the budget (then
    `exhausted`); the caller counts the real prompt and rejects it.
    """
    replay = _Replay(fixed_tokens, budget_tokens)
    for i, (message, cost) in enumerate(zip(messages, costs, strict=True)):
        replay.add(i, message, cost)
    dropped = frozenset(replay.dropped)
    return Compacted(_with_notes(messages, dropped), dropped, not replay.next_to_drop())


def note(count: int) -> str:
    if count == 1:
        return "[1 earlier message was omitted to fit the context]"
    return f"[{count} earlier messages were omitted to fit the context]"


def _with_notes(
    messages: Sequence[Mapping[str, Any]], dropped: frozenset[int]
) -> list[dict[str, Any]]:
    messages_with_notes: list[dict[str, Any]] = []
    last_kept: dict[str, Any] | None = None  # the last kept message other than a system message
    n_missing = 0
    for i, message in enumerate(messages):
        if i in dropped:
            n_missing += 1
            continue
        copy = dict(message)
        messages_with_notes.append(copy)
        if copy["role"] == "system":
            continue
        if n_missing and copy["role"] == "user":
            copy["content"] = f"{note(n_missing)}\n\n{copy['content']}"
            n_missing = 0
        elif n_missing and last_kept is None:
            messages_with_notes.insert(-1, {"role": "user", "content": note(n_missing)})
            n_missing = 0
        elif n_missing and last_kept is not None and last_kept["role"] == "user":
            last_kept["content"] = f"{last_kept['content']}\n\n{note(n_missing)}"
            n_missing = 0
        last_kept = copy
    return messages_with_notes
