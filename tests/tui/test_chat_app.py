"""The chat on a (headless) terminal: typed input, screen, and stored conversations."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.conversation.history import History
from tui.conftest import Driver
from tui.scripted_sse import Comment, Drop, Finish, Gate, Refuse, Say, ScriptedServer, UntilGone


def stored(history: History) -> list[tuple[str, str]]:
    """Return (role, content) of the newest conversation."""
    return [(m.role, m.content) for m in history.messages(history.list()[0].id)]


@pytest.mark.parametrize(
    "size", [(80, 24), pytest.param((160, 50), marks=pytest.mark.long), (40, 12)]
)
def test_an_answer_streams_to_the_screen_and_the_disk(
    drive: Any, server: ScriptedServer, history: History, size: tuple[int, int]
) -> None:
    gate = Gate()
    server.play(Say(["One ", "**two** "]), gate, Say(["three"]), Finish(usage=(11, 3, 5)))

    async def play(d: Driver) -> None:
        await d.send("count")
        await d.until(lambda: "One two" in d.screen())  # Markdown is rendered while it streams
        assert "three" not in d.screen()
        assert d.app.chat.answering
        assert "Esc stops" in d.screen()
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        await d.until(lambda: "One two three" in d.screen())
        assert all(len(line) <= size[0] for line in d.screen().splitlines())
        if size[0] >= 80:
            status = d.screen().splitlines()[-1]
            assert "14/1,000" in status
            assert "cached" in status
            assert "5" in status.split("cached")[1]

    drive(play, size=size)
    assert server.requests[0]["messages"] == [{"role": "user", "content": "count"}]
    assert stored(history) == [("user", "count"), ("assistant", "One **two** three")]


def test_the_follow_up_carries_the_conversation(drive: Any, server: ScriptedServer) -> None:
    server.answer("Paris")
    server.answer("two million")

    async def play(d: Driver) -> None:
        await d.ask("capital of France?")
        await d.ask("how many live there?")

    drive(play)
    assert [m["content"] for m in server.requests[1]["messages"]] == [
        "capital of France?",
        "Paris",
        "how many live there?",
    ]


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
def test_stopping_keeps_the_text_and_closes_the_request_at_the_server(
    drive: Any, server: ScriptedServer, history: History, key: str
) -> None:
    until_gone = UntilGone()
    server.play(Say(["so ", "far"]), until_gone)
    server.answer("fine")

    async def play(d: Driver) -> None:
        await d.send("go on for ever")
        await d.until(lambda: "so far" in d.screen())
        await d.press(key)
        await d.until(lambda: not d.app.chat.answering)
        assert "so far" in d.screen()
        assert "stopped" in d.screen()
        assert "/1,000" not in d.screen()  # the tokens of the question are not known
        await d.until(until_gone.gone.is_set)
        await d.ask("and now?")  # the next request contains the partial answer
        assert d.app.is_running

    drive(play)
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "so far"}
    answer = history.messages(history.list()[0].id)[1]
    assert (answer.complete, answer.meta["finish_reason"]) == (True, "stopped")


def test_stopping_before_the_first_token_leaves_the_question(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    until_gone = UntilGone()
    server.play(Comment("prefill 512/2048 tokens, 0 cached"), until_gone)

    async def play(d: Driver) -> None:
        await d.send("long prompt")
        await d.until(lambda: "512 of 2,048" in d.screen())
        await d.press("escape")
        await d.until(lambda: "/retry" in d.screen())

    drive(play)
    assert stored(history) == [("user", "long prompt")]


def test_ctrl_c_quits_only_when_pressed_twice(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.press("ctrl+c")
        assert d.app.is_running
        assert d.app.return_code is None
        await d.press("ctrl+c")
        assert d.app.return_code == 0

    drive(play)


@pytest.mark.parametrize("key", ["ctrl+d", "ctrl+q"])
def test_quitting_in_mid_answer_keeps_the_text(
    drive: Any, server: ScriptedServer, history: History, key: str
) -> None:
    until_gone = UntilGone()
    server.play(Say(["half an ", "answer"]), until_gone)

    async def play(d: Driver) -> None:
        await d.send("tell me")
        await d.until(lambda: "half an answer" in d.screen())
        await d.press(key)

    drive(play)
    assert stored(history)[1] == ("assistant", "half an answer")
    assert until_gone.gone.wait(60)


def test_enter_sends_and_ctrl_j_breaks_the_line(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.press("a", "ctrl+j", "b", "enter")
        await d.until(lambda: not d.app.chat.answering)

    drive(play)
    assert server.requests[0]["messages"][0]["content"] == "a\nb"


def test_a_question_sent_during_an_answer_waits_for_its_end(
    drive: Any, server: ScriptedServer
) -> None:
    gate = Gate()
    server.play(Say(["slow"]), gate, Finish())
    server.answer("second")

    async def play(d: Driver) -> None:
        await d.send("first?")
        await d.until(lambda: "slow" in d.screen())
        await d.send("second?")
        assert d.app.page.composer.text == "second?"
        assert "sent when this answer ends" in d.screen()
        gate.opened.set()
        await d.until(lambda: len(server.requests) == 2 and not d.app.chat.answering)
        assert d.app.page.composer.text == ""

    drive(play)
    assert [m["content"] for m in server.requests[1]["messages"]] == ["first?", "slow", "second?"]


@pytest.mark.parametrize("key", ["escape", "x"])
def test_a_waiting_question_is_not_sent_once_it_is_changed_or_the_answer_stopped(
    drive: Any, server: ScriptedServer, key: str
) -> None:
    gate = Gate()
    server.play(Say(["slow"]), gate, Finish())

    async def play(d: Driver) -> None:
        await d.send("first?")
        await d.until(lambda: "slow" in d.screen())
        await d.send("second?")
        await d.press(key)
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        await d.pilot.pause()
        assert d.app.page.composer.text.startswith("second?")

    drive(play)
    assert len(server.requests) == 1


def test_a_short_conversation_begins_at_the_top_and_a_long_one_is_followed_to_its_end(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("short")
    server.play(Say([f"line {i}\n\n" for i in range(60)]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("a")
        assert "You" in d.screen().splitlines()[2]  # below the header line
        await d.ask("b")
        await d.until(lambda: "line 59" in d.screen())
        await d.press("pageup", "pageup")
        await d.until(lambda: "line 59" not in d.screen())

    drive(play)


def test_scrolling_up_is_respected_while_text_arrives(drive: Any, server: ScriptedServer) -> None:
    gate = Gate()
    server.play(Say([f"line {i}\n\n" for i in range(60)]), gate, Say(["the very end"]), Finish())

    async def play(d: Driver) -> None:
        await d.send("b")
        await d.until(lambda: "line 59" in d.screen())
        await d.press("pageup", "pageup")
        await d.until(lambda: "line 59" not in d.screen())
        before = d.app.page.transcript.scroll_y
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        await d.pilot.pause()
        assert d.app.page.transcript.scroll_y == before
        await d.press("pagedown", "pagedown", "pagedown")
        await d.until(lambda: "the very end" in d.screen())

    drive(play)


def test_progress_is_replaced_by_the_text(drive: Any, server: ScriptedServer) -> None:
    server.play(
        Comment("loading"), Say(["text"]), Comment("prefill 24/42 tokens, 0 cached"), Finish()
    )

    async def play(d: Driver) -> None:
        await d.ask("a")
        assert "text" in d.screen()
        assert "reading" not in d.screen()

    drive(play)


def test_reasoning_is_folded_until_asked_for(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(Say(["let me ", "ponder"], field="reasoning_content"), Say(["42"]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("why?")
        assert "42" in d.screen()
        assert "ponder" not in d.screen()
        await d.press("ctrl+t")
        assert "ponder" in d.screen()

    drive(play)
    answer = history.messages(history.list()[0].id)[1]
    assert (answer.content, answer.reasoning) == ("42", "let me ponder")


def test_a_refused_request_shows_the_reason_and_a_solution(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    error = {
        "message": "the prompt has 9 tokens too many",
        "code": "context_length_exceeded",
        "hint": "say less",
    }
    server.play(Refuse(400, error))
    server.answer("better")

    async def play(d: Driver) -> None:
        await d.ask("x")
        assert "Error: the prompt has 9 tokens too many" in d.screen()
        assert "Hint: say less" in d.screen()
        assert "/retry" in d.screen()
        await d.ask("/retry")
        assert "better" in d.screen()
        assert "Error" not in d.screen()

    drive(play)
    assert stored(history) == [("user", "x"), ("assistant", "better")]


def test_a_server_that_dies_during_an_answer_loses_only_the_rest(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(Say(["begun "]), Drop())

    async def play(d: Driver) -> None:
        await d.ask("x")
        assert "begun" in d.screen()
        assert "Error:" in d.screen()

    drive(play)
    assert stored(history) == [("user", "x"), ("assistant", "begun ")]
