"""Any turn can be selected, and then edited, retried, continued, copied, branched or removed."""

from __future__ import annotations

from typing import Any

import pytest
from textual import events

from localllm.conversation.history import History
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.session import Session
from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.transcript import TurnView
from tui.conftest import Driver, words_of
from tui.scripted_sse import Finish, Gate, Refuse, Say, ScriptedServer, UntilGone


@pytest.fixture
def conversation(history: History) -> str:
    """Store the turns q1, a1, q2 and a2, and return the conversation's id."""
    session = Session(history, "scripted")
    for n in (1, 2):
        session.ask(f"q{n}")
        answer = PendingAnswer(session)
        answer.add(f"a{n}\n```\ncode {n}\n```\n```\nmore {n}\n```")
        answer.finish({"finish_reason": "stop", "prompt_tokens": 10, "completion_tokens": 2})
    assert session.id is not None
    return session.id


def _shown(d: Driver) -> list[str]:
    return [words_of(w).partition("\n")[0] for w in d.app.page.transcript.query(TurnView)]


def _selected(d: Driver) -> str:
    view = d.app.page.transcript.selected
    return words_of(view).partition("\n")[0] if view is not None else ""


def test_showing_another_version_stops_the_running_answer_with_a_note(
    drive: Any, server: ScriptedServer, conversation: str
) -> None:
    server.answer("another")
    server.play(Say("half of it"), UntilGone())

    async def play(d: Driver) -> None:
        await d.press("f2", "r")
        await d.until(lambda: "another" in d.screen() and not d.app.chat.answering)
        await d.send("and now?")
        await d.until(lambda: "half of it" in d.screen())
        await d.press("f2", "up")
        await d.until(lambda: "←→ version" in d.screen())
        await d.press("left")
        await d.until(
            lambda: "was stopped; g at its turn continues it" in " ".join(d.screen().split())
        )
        assert not d.app.chat.answering
        await d.press("right")
        await d.until(lambda: "half of it" in d.screen())

    drive(play, resume=conversation)


def test_a_turn_is_selected_and_the_window_resized_while_an_answer_streams(
    drive: Any, server: ScriptedServer, conversation: str
) -> None:
    copied: list[str] = []
    gate = Gate()
    server.play(Say(["half ", "of it "]), gate, Say(["and the rest"]), Finish())

    async def play(d: Driver) -> None:
        await d.send("and now?")
        await d.until(lambda: "half of it" in d.screen())
        await d.press("f2")
        assert _selected(d) == "and now?"
        await d.pilot.resize_terminal(40, 20)
        await d.until(lambda: "a turn is selected" in d.screen())
        await d.press("up")
        await d.pilot.resize_terminal(120, 40)
        await d.press("c")
        assert _selected(d) == "a2"
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        assert _shown(d) == ["q1", "a1", "q2", "a2", "and now?", "half of it and the rest"]
        assert _selected(d) == "a2"
        await d.press("escape")
        assert d.app.page.composer.has_focus

    drive(
        play,
        resume=conversation,
        copy=lambda text: copied.append(text) or True,
        size=(120, 40),
    )
    assert copied == ["a2\n```\ncode 2\n```\n```\nmore 2\n```"]


def test_keys_move_between_turns_and_back_to_the_input(drive: Any, conversation: str) -> None:
    async def play(d: Driver) -> None:
        await d.press("f2")
        assert _selected(d) == "a2"
        assert "E edit" in d.screen()
        assert "Esc back" in d.screen()
        await d.press("up", "up", "up", "up")
        assert _selected(d) == "q1"
        await d.press("down")
        assert _selected(d) == "a1"
        await d.press("escape", *"hi")
        assert _selected(d) == ""
        assert d.app.page.composer.text == "hi"
        await d.press("ctrl+up", "down", *"!")
        assert d.app.page.composer.text == "hi!"

    drive(play, resume=conversation)


def test_an_edited_question_in_the_middle_makes_a_second_branch(
    drive: Any, server: ScriptedServer, history: History, conversation: str
) -> None:
    server.answer("anew")

    async def play(d: Driver) -> None:
        await d.type("a draft")
        await d.press("f2", "up", "up", "up", "e")
        assert d.app.page.composer.text == "q1"
        await d.ask("!")
        assert _shown(d) == ["q1!", "anew"]
        assert "◂ 2/2 ▸" in d.screen()
        assert d.app.page.composer.text == "a draft"  # the draft is restored
        await d.press("f2", "up", "left")
        assert _shown(d) == ["q1", "a1", "q2", "a2"]
        assert _selected(d) == "q1"
        await d.press("right")
        assert _shown(d) == ["q1!", "anew"]

    drive(play, resume=conversation)
    assert [m["content"] for m in server.requests[0]["messages"]] == ["q1!"]
    assert len(history.list()) == 1
    assert [m.content for m in history.messages(conversation)] == ["q1!", "anew"]


def test_an_edited_answer_is_sent_with_the_next_question(
    drive: Any, server: ScriptedServer, conversation: str
) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.press("f2", "up", "up", "e")
        d.app.page.composer.replace_text("changed")
        await d.press("enter")
        await d.pilot.pause()
        assert _shown(d) == ["q1", "changed"]
        assert "changed by you" in d.screen()
        assert server.requests == []
        await d.ask("next")

    drive(play, resume=conversation)
    assert [m["content"] for m in server.requests[0]["messages"]] == ["q1", "changed", "next"]


def test_an_answer_in_the_middle_is_asked_for_again(
    drive: Any, server: ScriptedServer, history: History, conversation: str
) -> None:
    server.play(Refuse(503, {"message": "busy", "code": "server_busy"}))
    server.answer("again")

    async def play(d: Driver) -> None:
        for _ in range(2):
            await d.press("f2")
            while _selected(d) != "a1":
                await d.press("up")
            await d.press("r")
            await d.until(lambda: not d.app.chat.answering)
            await d.pilot.pause()
            if len(server.requests) == 1:  # refused: no text is lost
                assert _shown(d) == ["q1", "a1", "q2", "a2"]
        assert _shown(d) == ["q1", "again"]

    drive(play, resume=conversation)
    assert server.requests[1]["messages"] == [{"role": "user", "content": "q1"}]
    assert len(history.tree(conversation)[0]) == 5


def test_a_key_continues_a_stopped_answer(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(Say(["half"]), Finish("length"))
    server.answer(" way")

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.press("f2", "g")
        await d.until(lambda: not d.app.chat.answering)
        assert _shown(d) == ["q", "half way"]

    drive(play)


def test_turns_and_their_code_are_copied(drive: Any, conversation: str) -> None:
    copied: list[str] = []

    async def play(d: Driver) -> None:
        await d.press("f2", "1", "2", "3")
        await d.until(lambda: "2 code blocks, not 3" in " ".join(d.screen().split()))
        await d.press("up", "c", "up", "1")

    drive(
        play,
        resume=conversation,
        copy=lambda text: copied.append(text) or True,
        size=(120, 40),
        toasts=True,
    )
    assert copied == ["code 2", "more 2", "q2", "code 1"]


def test_a_turn_is_removed_when_asked_twice(
    drive: Any, history: History, conversation: str
) -> None:
    async def play(d: Driver) -> None:
        await d.press("f2", "up", "d")
        assert "D again removes this turn and the 1 after it" in d.screen()
        await d.press("up", "d")  # another turn, so it must be confirmed again
        assert len(_shown(d)) == 4
        await d.press("down", "d", "d")
        assert _shown(d) == ["q1", "a1"]
        assert _selected(d) == "a1"

    drive(play, resume=conversation)
    assert len(history.tree(conversation)[0]) == 2


def test_a_key_branches_off_a_separate_conversation(
    drive: Any, server: ScriptedServer, history: History, conversation: str
) -> None:
    server.answer("elsewhere")

    async def play(d: Driver) -> None:
        await d.press("f2", "up", "up", "b")
        await d.until(lambda: _shown(d) == ["q1", "a1"])
        await d.ask("other")

    drive(play, resume=conversation)
    branch, original = history.list()
    assert (branch.title, original.title) == ("q1 (branch)", "q1")
    assert [m.content for m in history.messages(original.id)][2] == "q2"


def test_a_long_conversation_opens_at_its_end_and_scrolls_up_to_its_start(
    drive: Any, history: History
) -> None:
    session = Session(history, "scripted")
    for n in range(50):
        session.ask(f"number {n}")

    async def play(d: Driver) -> None:
        assert "number 49" in d.screen()
        assert len(_shown(d)) == 24
        for _ in range(30):
            await d.press("pageup")
            if "number 0 " in d.screen():
                break
        assert len(_shown(d)) == 50
        assert "earlier turns" not in d.screen()
        await d.press("f2")
        assert _selected(d) == "number 49"

    drive(play, resume=session.id)


def test_turn_keys_without_turns_have_no_effect(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.press("f2", "e", "up")
        assert d.app.page.composer.has_focus
        assert not d.app.page.transcript.query(AnswerView)

    drive(play)


def test_a_paste_while_a_turn_is_selected_goes_to_the_input(
    drive: Any, server: ScriptedServer, conversation: str
) -> None:
    async def play(d: Driver) -> None:
        await d.press("f2", "up")
        await d.until(lambda: _selected(d) != "")
        d.app.post_message(events.Paste("and then?"))
        await d.until(lambda: d.app.page.composer.text == "and then?")
        assert _selected(d) == ""

    drive(play, resume=conversation)
