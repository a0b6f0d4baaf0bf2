"""The panel of conversations finds text in any turn, and opens the conversation at that turn."""

from __future__ import annotations

import time
from typing import Any

from localllm.conversation.history import History, StoredMessage
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.session import Session
from localllm_tui.screens.picker import ConversationPicker
from localllm_tui.screens.turn_window import TURNS_SHOWN
from localllm_tui.widgets.transcript import TurnView
from localllm_tui.widgets.turns import HiddenTurns
from tui.conftest import Driver, words_of


def _said(history: History, *texts: str) -> Session:
    """Return a conversation of alternating questions and answers."""
    session = Session(history, "scripted")
    for i, text in enumerate(texts):
        if i % 2 == 0:
            session.ask(text)
        else:
            answer = PendingAnswer(session)
            answer.add(text)
            answer.finish({"finish_reason": "stop"})
    return session


def _shown(d: Driver) -> list[str]:
    return [words_of(w) for w in d.app.page.transcript.query(TurnView)]


async def _panel(d: Driver, key: str = "ctrl+o") -> None:
    await d.press(key)
    await d.until(lambda: isinstance(d.app.screen, ConversationPicker))
    await d.pilot.pause()


def test_a_search_hit_is_shown_in_its_turn_and_opened_there(drive: Any, history: History) -> None:
    session = _said(history, "rivers", "the Danube and others", "more")
    # the branch with the Danube is no longer shown
    session.ask("seas", instead=session.turns[0])
    _said(history, "mountains", "the Eiger")

    async def play(d: Driver) -> None:
        await _panel(d)
        assert "2 conversations" in d.screen()
        await d.press(*"danub")
        assert "1 conversation" in d.screen()
        assert "Answer: the Danube and others" in d.screen()
        await d.press("down", "enter")
        await d.until(lambda: not isinstance(d.app.screen, ConversationPicker))
        await d.until(lambda: _shown(d) == ["rivers", "the Danube and others", "more"])
        assert d.app.page.transcript.selected is not None
        assert words_of(d.app.page.transcript.selected) == "the Danube and others"

    drive(play)


def test_find_searches_only_the_open_conversation(drive: Any, history: History) -> None:
    _said(history, "elsewhere", "a needle too")
    session = _said(
        history, *(f"turn {n}" + (" with a needle" if n == 3 else "") for n in range(60))
    )

    async def play(d: Driver) -> None:
        assert "turn 3 with" not in d.screen()
        await _panel(d, "ctrl+f")
        await d.press(*"needle")
        assert "1 turn" in d.screen()
        await d.press("enter")
        await d.until(lambda: d.app.page.transcript.selected is not None)
        await d.until(lambda: "turn 3 with a needle" in d.screen())
        await d.press("escape")
        assert d.app.page.composer.has_focus

    drive(play, resume=session.id)


def test_keys_move_to_the_next_and_previous_hit_and_each_hit_is_marked(
    drive: Any, history: History
) -> None:
    """Keys move to the next and the previous hit, and each hit is marked.

    This includes hits in one long turn, hits outside the turns on screen, and wrapping at both
    ends.
    """
    long = "\n\n".join(f"a NEEDLE in paragraph {n}\n\n" + "hay\n\n" * 20 for n in range(2))
    session = _said(
        history,
        *(
            long if n == 51 else f"turn {n}" + (" with a needle" if n in (2, 40) else "")
            for n in range(60)
        ),
    )

    async def play(d: Driver) -> None:
        await _panel(d, "ctrl+f")
        await d.press(*"needle")
        await d.until(lambda: "3 turns" in d.screen())
        await d.press("enter")  # the newest is first in the list
        await d.until(lambda: "NEEDLE" in d.reversed())
        assert "paragraph 0" in d.screen()
        assert "found “needle”: turn 3 of 3" in d.screen()
        assert "N next" in d.screen()
        assert "Shift+N the one before" in d.screen()
        await d.press("n")
        await d.until(lambda: "paragraph 1" in d.screen() and "NEEDLE" in d.reversed())
        await d.press("n")
        await d.until(lambda: "turn 2 with a needle" in d.screen() and "needle" in d.reversed())
        assert "turn 1 of 3" in d.screen()
        await d.press("n")
        await d.until(lambda: "turn 40 with a needle" in d.screen() and "needle" in d.reversed())
        await d.press("N")
        await d.until(lambda: "turn 2 with a needle" in d.screen() and "needle" in d.reversed())
        await d.press("N")
        await d.until(lambda: "paragraph 1" in d.screen() and "NEEDLE" in d.reversed())
        await d.press("escape")
        await d.until(lambda: "NEEDLE" not in d.reversed())
        assert d.app.page.composer.has_focus
        assert "Enter sends" in d.screen()

    drive(play, resume=session.id, size=(100, 30))


def test_a_conversation_is_listed_with_its_model_its_date_and_its_end(
    drive: Any, history: History
) -> None:
    _said(history, "mountains", "the Eiger")
    _said(history, "rivers", "the Danube and others")

    async def play(d: Driver) -> None:
        await _panel(d)
        assert "scripted · just now · 2 messages" in d.screen()
        await d.until(lambda: "Answer: the Danube and others" in d.screen())
        assert time.strftime("%b %Y") in d.screen()
        await d.press("down")
        await d.until(lambda: "Answer: the Eiger" in d.screen())
        await d.press("ctrl+x")
        assert "again to remove “mountains” permanently" in d.screen()
        await d.press("up", "ctrl+x")  # another conversation, so it must be confirmed again
        assert "again to remove “rivers” permanently" in d.screen()
        assert len(history.list()) == 2

    drive(play, size=(100, 30))


def test_a_narrow_list_shows_the_title_first(drive: Any, history: History) -> None:
    session = Session(history, "scripted")
    session.ask("a title of some words")

    async def play(d: Driver) -> None:
        await d.press("ctrl+o")
        await d.until(lambda: "1 conversation" in d.screen())
        assert "a title of some w…  just now" in d.screen()

    drive(play, size=(40, 20))


def test_an_empty_search_result_opens_or_removes_no_conversation(
    drive: Any, history: History
) -> None:
    async def play(d: Driver) -> None:
        for typed, said in (("", "no conversations yet"), ("x", "nothing found")):
            await _panel(d)
            await d.press(*typed)
            assert said in d.screen()
            await d.press("ctrl+x", "right", "left", "down", "enter", "escape")
            assert not isinstance(d.app.screen, ConversationPicker)
        await d.ask("/find x")
        assert "the conversation has no turns yet" in d.screen()

    drive(play)


def test_only_the_visible_turns_of_a_long_conversation_are_drawn(
    drive: Any, history: History
) -> None:
    conv = history.create("long", "scripted")
    roles = ("assistant", "user")
    turns = [
        StoredMessage(i, roles[i % 2], f"turn {i} " + "words " * 40, parent_id=i - 1)
        for i in range(1, 2001)
    ]
    history.add(conv, turns)

    async def play(d: Driver) -> None:
        await d.send("/continue")
        await d.until(lambda: bool(d.app.page.transcript.views) and "turn 2000" in d.screen())
        assert len(d.app.page.transcript.views) == TURNS_SHOWN
        assert d.app.page.transcript.query_one(HiddenTurns)

    drive(play, size=(120, 40))
