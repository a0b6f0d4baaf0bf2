"""Leaving out the oldest turns of a conversation.

The tests check which messages stay, which are removed together, and that a cut never moves back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.conversation.compaction import (
    KEEP,
    NOTE_TOKENS,
    Compacted,
    MessageCost,
    compact,
    note,
)


def _said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def _call(*ids: str) -> list[dict[str, Any]]:
    return [{"id": i, "type": "function", "function": {"name": "f", "arguments": {}}} for i in ids]


@st.composite
def conversations(draw: st.DrawFn, late: bool = False) -> list[dict[str, Any]]:
    """Draw conversations as clients send them.

    They have system texts anywhere, questions, answers, and rounds of calls with their results
    in any order. With `late`, results come after other messages, even after the next question.
    """
    messages: list[dict[str, Any]] = []
    open_calls: list[str] = []
    n = 0
    kinds = ["system", "user", "user", "assistant", "calls", "result", "result"]
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=40)):
        if kind in ("user", "assistant", "calls") and not late:
            open_calls.clear()
        text = f"<{len(messages)}>" + "x" * draw(st.integers(0, 60))
        if kind == "calls":
            ids = [f"c{n + i}" for i in range(draw(st.integers(1, 2)))]
            n += len(ids)
            open_calls += ids
            messages.append(_said("assistant", text, tool_calls=_call(*ids)))
        elif kind == "result":
            if open_calls:
                answered = open_calls.pop(draw(st.integers(0, len(open_calls) - 1)))
                messages.append(_said("tool", text, tool_call_id=answered))
        else:
            thought = (
                {"reasoning_content": "y" * draw(st.integers(0, 60))} if kind == "assistant" else {}
            )
            messages.append(_said(kind, text, **thought))
    return messages or [_said("user", "<0>")]


def _costs(messages: list[dict[str, Any]]) -> list[MessageCost]:
    return [
        MessageCost(len(m["content"]), passing=len(m.get("reasoning_content", "")))
        for m in messages
    ]


def _compact(messages: list[dict[str, Any]], budget: int, fixed: int = 0) -> Compacted:
    return compact(messages, _costs(messages), fixed_tokens=fixed, budget_tokens=budget)


def _place(message: dict[str, Any]) -> str:
    """Return the marker with the message's index in the input, or "" for a note."""
    at = message["content"].find("<")
    return "" if at < 0 else message["content"][at : message["content"].index(">") + 1]


BUDGETS = st.integers(0, 1500)


@given(conversations(), BUDGETS)
def test_system_texts_and_the_newest_question_stay(
    messages: list[dict[str, Any]], budget: int
) -> None:
    kept = _compact(messages, budget)
    assert [m for m in kept.messages if m["role"] == "system"] == [
        m for m in messages if m["role"] == "system"
    ]
    questions = [i for i, m in enumerate(messages) if m["role"] == "user"]
    assert not questions or questions[-1] not in kept.dropped
    places = [_place(m) for m in kept.messages if _place(m)]
    assert places == [_place(m) for i, m in enumerate(messages) if i not in kept.dropped]


@given(conversations(late=True), BUDGETS)
def test_calls_and_their_results_go_together(messages: list[dict[str, Any]], budget: int) -> None:
    kept = _compact(messages, budget)
    calls = {c["id"]: i for i, m in enumerate(messages) for c in m.get("tool_calls", ())}
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            assert (i in kept.dropped) == (calls[message["tool_call_id"]] in kept.dropped)


@given(conversations(), BUDGETS)
def test_whole_turns_are_left_out_oldest_first(messages: list[dict[str, Any]], budget: int) -> None:
    kept = _compact(messages, budget)
    spoken = [i for i, m in enumerate(messages) if m["role"] not in ("system", "tool")]
    questions = [i for i in spoken if messages[i]["role"] == "user"]
    newest = questions[-1] if questions else -1
    earlier = [
        i in kept.dropped for i in spoken if i < newest and messages[i]["role"] == "assistant"
    ]
    assert earlier == sorted(earlier, reverse=True)
    rounds = [i in kept.dropped for i in spoken if i > newest]
    assert rounds == sorted(rounds, reverse=True)
    if any(rounds):  # the newest turn is shortened only if no other is left
        assert all(
            i in kept.dropped for i in spoken if i < newest and messages[i]["role"] == "assistant"
        )


@given(conversations(), BUDGETS, st.integers(0, 100))
def test_the_kept_turns_fit_or_no_more_turns_can_be_left_out(
    messages: list[dict[str, Any]], budget: int, fixed: int
) -> None:
    kept = _compact(messages, budget, fixed)
    costs = _costs(messages)
    newest = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    head = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    size = sum(c.tokens + (c.passing if i > newest else 0)
               for i, c in enumerate(costs) if i >= head and i not in kept.dropped)  # fmt: skip
    assert fixed + NOTE_TOKENS + size <= budget or kept.exhausted


@given(conversations(late=True), BUDGETS)
def test_a_longer_conversation_never_cuts_earlier(
    messages: list[dict[str, Any]], budget: int
) -> None:
    cuts = [_compact(messages[:n], budget).dropped for n in range(1, len(messages) + 1)]
    assert all(before <= after for before, after in pairwise(cuts))


@given(conversations(), BUDGETS)
def test_a_prompt_extends_the_previous_prompt_until_the_cut_moves(
    messages: list[dict[str, Any]], budget: int
) -> None:
    cuts = [_compact(messages[:n], budget) for n in range(1, len(messages) + 1)]
    for before, after in pairwise(cuts):
        if before.dropped == after.dropped:
            assert after.messages[: len(before.messages)] == before.messages


@given(conversations(), BUDGETS)
def test_notes_count_the_omitted_messages(messages: list[dict[str, Any]], budget: int) -> None:
    kept = _compact(messages, budget)
    said = sum(
        int(line[1:].split()[0])
        for m in kept.messages
        for line in m["content"].splitlines()
        if line.startswith("[") and line.endswith("omitted to fit the context]")
    )
    assert said == len(kept.dropped)


def test_a_conversation_that_fits_is_sent_unchanged() -> None:
    messages = [
        _said("system", "s"),
        _said("user", "<1>"),
        _said("assistant", "<2>"),
        _said("user", "<3>"),
    ]
    kept = _compact(messages, 1000)
    assert (kept.messages, kept.dropped) == (messages, frozenset())


def test_the_cut_holds_for_several_turns_and_leaves_room() -> None:
    """A cut holds for several turns and leaves free space.

    The turns have 20 tokens, and the context holds 40 of them. Each cut leaves 24 turns, and the
    next cut comes with the 41st.
    """
    messages: list[dict[str, Any]] = []
    cuts = []
    for _ in range(100):
        messages += [_said("user", "q" * 10), _said("assistant", "a" * 10)]
        cuts.append(len(_compact(messages, NOTE_TOKENS + 800).dropped))
    first = [i for i, (a, b) in enumerate(pairwise(cuts)) if a != b]
    assert len(first) == 4
    assert {b - a for a, b in pairwise(first)} == {int((1 - KEEP) * 40) + 1}


def test_a_note_about_omitted_messages_is_in_the_next_question() -> None:
    messages = [
        _said("system", "be kind"),
        _said("user", "<old>" + "x" * 100),
        _said("assistant", "y" * 100),
        _said("user", "<new>"),
        _said("assistant", "z" * 100, tool_calls=_call("a")),
        _said("tool", "r" * 100, tool_call_id="a"),
        _said("assistant", "", tool_calls=_call("b")),
        _said("tool", "done", tool_call_id="b"),
    ]
    kept = _compact(messages, NOTE_TOKENS + 60)
    assert [m["role"] for m in kept.messages] == ["system", "user", "assistant", "tool"]
    assert kept.messages[1]["content"] == f"{note(2)}\n\n<new>\n\n{note(2)}"
    assert kept.messages[3]["content"] == "done"
    assert messages[3]["content"] == "<new>"  # the caller's messages are unchanged


def test_reasoning_that_the_template_drops_is_not_counted() -> None:
    messages = [_said("user", "<0>"), _said("assistant", "<1>"), _said("user", "<2>")]
    costs = [MessageCost(3), MessageCost(3, passing=500), MessageCost(3)]
    # The reasoning of the first answer counts only until the next question. Before that question
    # there is no older turn to leave out.
    assert not compact(messages, costs, fixed_tokens=0, budget_tokens=NOTE_TOKENS + 100).dropped
    costs[1] = MessageCost(503)
    assert compact(messages, costs, fixed_tokens=0, budget_tokens=NOTE_TOKENS + 100).dropped == {
        0,
        1,
    }


@pytest.mark.parametrize("budget", [0, NOTE_TOKENS, NOTE_TOKENS + 5])
def test_system_texts_and_the_newest_question_stay_with_any_budget(budget: int) -> None:
    messages = [_said("system", "s" * 50), _said("user", "u" * 50)]
    kept = _compact(messages, budget)
    assert kept.messages == messages
    assert kept.exhausted
