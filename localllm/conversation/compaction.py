"""Compaction: which messages of a too long conversation to leave out, so that the rest fits and
stays the same for long.

Asked for, never done unasked: without it a full context is an error with the counts. What peers do:
OpenAI's `truncation: "auto"` drops items until the rest fits, llama-server's context shift drops
half of the tokens wherever that cuts, LM Studio's rolling window drops the oldest: each may end in
the middle of a tool call, and what drops one message per turn changes the beginning of every
prompt, which no prefix cache survives. (OpenAI's Realtime API has a `retention_ratio` for the same
reason.) So, here:

* The **oldest whole turns** go first: a question with the answers, calls and results behind it.
  System messages and the newest question stay. When that is not enough (an agent at work on one
  question), the oldest rounds of the newest turn
  go: an assistant message with the results of its calls. No result is left without its call, nor a
  call without its result; the newest round stays.
* What goes is more than needed: down to `KEEP` of the room. The next cut is then some turns away,
  and until then every prompt begins like the one before.
* The cut follows from the messages alone, though the server keeps no record of it. The history is
  **replayed** from its first message: whenever what is kept outgrows the budget, the cut moves.
  What happened after message 40 depends on messages 1 to 40 only, so the same history has the same
  cut whenever it comes back, a longer one the same or a later one, never an earlier: what once was
  left out stays left out.
* A line of text stands where messages were left out. It counts them, and so changes only when the
  cut does. It is put into the question beside the gap: a message of its own would break the
  alternation that many templates insist on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Share of the room beside the fixed part that the kept turns have after a cut. With turns of a
# size, the number of turns between two cuts is (1 - KEEP) of those that fit.
KEEP = 0.6
# What the notes cost at most, in tokens: two of them, of about a dozen words and a number (20
# tokens with SmolLM2's vocabulary).
NOTE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class MessageCost:
    """What a message adds to the prompt, in tokens. `passing` of them only until the next question
    is asked: reasoning that the template leaves out of earlier turns."""

    tokens: int
    passing: int = 0


@dataclass(frozen=True, slots=True)
class Compacted:
    """The messages to send. `dropped` are the indices of those left out; `exhausted` says that no
    more may be."""

    messages: list[dict[str, Any]]
    dropped: frozenset[int]
    exhausted: bool


@dataclass(slots=True)
class _Unit:
    """Messages that go or stay together: a question, or an assistant message with the results of
    its calls. `turn`: how many questions there were then."""

    turn: int
    asks: bool
    indices: list[int] = field(default_factory=list)
    tokens: int = 0
    passing: int = 0
    dropped: bool = False


class _Replay:
    """The conversation as it grew, one message at a time, and what was left out on the way."""

    def __init__(self, fixed_tokens: int, budget_tokens: int) -> None:
        self._fixed = fixed_tokens + NOTE_TOKENS
        self._budget = budget_tokens
        self._kept: list[_Unit] = []
        self._turn = 0
        self._callers: dict[str, _Unit] = {}
        self._tokens = self._passing = 0  # of what is kept; only the newest turn's pass
        self._at_head = True
        self.dropped: set[int] = set()

    def next_to_go(self) -> list[_Unit]:
        """The units to drop next: the oldest turn, or if only the newest turn is left, its oldest
        round, but not its last. Empty if no more may be dropped."""
        oldest = [unit for unit in self._kept if unit.turn == self._kept[0].turn]
        if oldest and oldest[0].turn < self._turn:
            return oldest
        rounds = [unit for unit in oldest if not unit.asks]
        return rounds[:1] if len(rounds) > 1 else []

    def add(self, index: int, message: Mapping[str, Any], cost: MessageCost) -> None:
        """One message more; whatever it pushes out is dropped."""
        if message["role"] == "system":
            if not self._at_head:  # those at the head are in the fixed part
                self._fixed += cost.tokens
                self._make_room()
            return
        self._at_head = False
        unit = self._unit_for(message)
        unit.indices.append(index)
        for call in message.get("tool_calls", ()):
            self._callers[call["id"]] = unit
        if unit.dropped:  # a result that came after its call was left out
            self.dropped.add(index)
            return
        unit.tokens += cost.tokens
        unit.passing += cost.passing
        self._tokens += cost.tokens
        self._passing += cost.passing
        self._make_room()

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
                return last  # context and question sent apart are one question
            self._turn += 1
            self._passing = 0
        self._kept.append(_Unit(self._turn, asks))
        return self._kept[-1]

    def _make_room(self) -> None:
        if self._fixed + self._tokens + self._passing <= self._budget:
            return
        goal = int(KEEP * max(0, self._budget - self._fixed))
        going = self.next_to_go()
        while going and self._tokens + self._passing > goal:
            for unit in going:
                unit.dropped = True
                self.dropped.update(unit.indices)
                self._tokens -= unit.tokens
                if unit.turn == self._turn:
                    self._passing -= unit.passing
            self._kept = [unit for unit in self._kept if not unit.dropped]
            going = self.next_to_go()


def compact(
    messages: Sequence[Mapping[str, Any]],
    costs: Sequence[MessageCost],
    *,
    fixed_tokens: int,
    budget_tokens: int,
) -> Compacted:
    """What to keep of `messages` (as `conversation.messages.normalise` gives them) within
    `budget_tokens`.

    `costs` has one entry per message. `fixed_tokens` is what the prompt has beside them: tools, the
    template's own words, and the system messages at the head. What can't be dropped may be larger
    than the budget (`exhausted` then): the caller counts the real prompt and refuses.
    """
    replay = _Replay(fixed_tokens, budget_tokens)
    for i, (message, cost) in enumerate(zip(messages, costs, strict=True)):
        replay.add(i, message, cost)
    dropped = frozenset(replay.dropped)
    return Compacted(_with_notes(messages, dropped), dropped, not replay.next_to_go())


def note(count: int) -> str:
    if count == 1:
        return "[1 earlier message was left out to fit the context]"
    return f"[{count} earlier messages were left out to fit the context]"


def _with_notes(
    messages: Sequence[Mapping[str, Any]], dropped: frozenset[int]
) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    spoken: dict[str, Any] | None = None  # the last kept message that is not a system text
    missing = 0
    for i, message in enumerate(messages):
        if i in dropped:
            missing += 1
            continue
        plain = dict(message)
        kept.append(plain)
        if plain["role"] == "system":
            continue
        if missing and plain["role"] == "user":
            plain["content"] = f"{note(missing)}\n\n{plain['content']}"
            missing = 0
        elif missing and spoken is None:
            kept.insert(-1, {"role": "user", "content": note(missing)})
            missing = 0
        elif missing and spoken is not None and spoken["role"] == "user":
            spoken["content"] = f"{spoken['content']}\n\n{note(missing)}"
            missing = 0
        spoken = plain
    return kept
