"""The chat on a (headless) terminal: what is typed, what is shown, what is on disk afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.conversation.history import History
from localllm_tui.picker import Picker
from localllm_tui.transcript import AnswerView, Question
from tui.conftest import Driver
from tui.scripted_sse import Comment, Drop, Finish, Gate, Refuse, Say, ScriptedServer, UntilGone


def stored(history: History) -> list[tuple[str, str]]:
    """(role, content) of the newest conversation."""
    return [(m.role, m.content) for m in history.messages(history.list()[0].id)]


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (40, 12)])
def test_an_answer_streams_to_the_screen_and_the_disk(
    drive: Any, server: ScriptedServer, history: History, size: tuple[int, int]
) -> None:
    gate = Gate()
    server.play(Say(["One ", "**two** "]), gate, Say(["three"]), Finish(usage=(11, 3, 5)))

    async def play(d: Driver) -> None:
        await d.send("count")
        await d.until(lambda: "One two" in d.screen())  # Markdown is rendered while it streams
        assert "three" not in d.screen()
        assert d.app.answering
        assert "Esc stops" in d.screen()
        gate.opened.set()
        await d.until(lambda: not d.app.answering)
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
def test_stopping_keeps_the_text_and_tells_the_server(
    drive: Any, server: ScriptedServer, history: History, key: str
) -> None:
    until_gone = UntilGone()
    server.play(Say(["so ", "far"]), until_gone)
    server.answer("fine")

    async def play(d: Driver) -> None:
        await d.send("go on for ever")
        await d.until(lambda: "so far" in d.screen())
        await d.press(key)
        await d.until(lambda: not d.app.answering)
        assert "so far" in d.screen()
        assert "stopped" in d.screen()
        assert "2/1,000" in d.screen()  # no usage came: the tokens seen
        await d.until(until_gone.gone.is_set)
        await d.ask("and now?")  # the chat goes on, with the half answer in its context
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
        assert d.app._exit is False
        await d.press("ctrl+c")
        assert d.app._exit is True

    drive(play)


@pytest.mark.parametrize("key", ["ctrl+d", "ctrl+q"])
def test_quitting_in_mid_answer_keeps_the_text(drive: Any, server: ScriptedServer, history: History, key: str) -> None:
    until_gone = UntilGone()
    server.play(Say(["half an ", "answer"]), until_gone)

    async def play(d: Driver) -> None:
        await d.send("tell me")
        await d.until(lambda: "half an answer" in d.screen())
        await d.press(key)

    drive(play)
    assert stored(history)[1] == ("assistant", "half an answer")
    assert until_gone.gone.wait(10)


def test_enter_sends_and_ctrl_j_breaks_the_line(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.press("a", "ctrl+j", "b", "enter")
        await d.until(lambda: not d.app.answering)

    drive(play)
    assert server.requests[0]["messages"][0]["content"] == "a\nb"


def test_a_question_sent_during_an_answer_waits_for_its_end(drive: Any, server: ScriptedServer) -> None:
    gate = Gate()
    server.play(Say(["slow"]), gate, Finish())
    server.answer("second")

    async def play(d: Driver) -> None:
        await d.send("first?")
        await d.until(lambda: "slow" in d.screen())
        await d.send("second?")
        assert d.app.composer.text == "second?"
        assert "sent when this answer ends" in d.screen()
        gate.opened.set()
        await d.until(lambda: len(server.requests) == 2 and not d.app.answering)
        assert d.app.composer.text == ""

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
        await d.until(lambda: not d.app.answering)
        await d.pilot.pause()
        assert d.app.composer.text.startswith("second?")

    drive(play)
    assert len(server.requests) == 1


def test_a_short_conversation_begins_at_the_top_and_a_long_one_is_followed_to_its_end(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("short")
    server.play(Say([f"line {i}\n\n" for i in range(60)]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("a")
        assert "You" in d.screen().splitlines()[1]
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
        before = d.app.transcript.scroll_y
        gate.opened.set()
        await d.until(lambda: not d.app.answering)
        await d.pilot.pause()
        assert d.app.transcript.scroll_y == before
        await d.press("pagedown", "pagedown", "pagedown")
        await d.until(lambda: "the very end" in d.screen())

    drive(play)


def test_progress_gives_way_to_the_text(drive: Any, server: ScriptedServer) -> None:
    server.play(Comment("loading"), Say(["text"]), Comment("prefill 24/42 tokens, 0 cached"), Finish())

    async def play(d: Driver) -> None:
        await d.ask("a")
        assert "text" in d.screen()
        assert "reading" not in d.screen()

    drive(play)


def test_reasoning_is_folded_until_asked_for(drive: Any, server: ScriptedServer, history: History) -> None:
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


def test_a_refused_request_shows_the_reason_and_the_way_on(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    error = {"message": "the prompt has 9 tokens too many", "code": "context_length_exceeded", "hint": "say less"}
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


def test_a_server_that_dies_in_mid_answer_costs_the_rest_only(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(Say(["begun "]), Drop())

    async def play(d: Driver) -> None:
        await d.ask("x")
        assert "begun" in d.screen()
        assert "Error:" in d.screen()

    drive(play)
    assert stored(history) == [("user", "x"), ("assistant", "begun ")]


def test_the_last_conversation_is_offered_and_resumed(drive: Any, server: ScriptedServer, history: History) -> None:
    server.answer("Bonjour")
    server.answer("encore")

    async def first(d: Driver) -> None:
        await d.ask("Say hello in French")

    async def second(d: Driver) -> None:
        assert "Say hello in French" in d.screen()
        await d.send("/continue")
        await d.until(lambda: "Bonjour" in d.screen())
        await d.until(lambda: "18/1,000" in d.screen())  # once the server told how long the context is
        await d.ask("again")

    drive(first)
    drive(second)
    assert len(history.list()) == 1
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Say hello in French", "Bonjour", "again"]


def test_list_searches_texts_and_opens_the_choice(drive: Any, server: ScriptedServer, history: History) -> None:
    for title, said in (("rivers", "the Danube"), ("mountains", "the Eiger"), ("lakes", "Baikal")):
        conv = history.create(title, "scripted")
        history.append(conv, "user", title)
        history.append(conv, "assistant", said)

    async def play(d: Driver) -> None:
        await d.send("/list")
        await d.until(lambda: isinstance(d.app.screen, Picker))
        assert "3 conversations" in d.screen()
        await d.press(*"eiger")
        assert "1 conversation" in d.screen()
        assert "rivers" not in d.screen()
        await d.press("enter")
        await d.until(lambda: "the Eiger" in d.screen())
        assert d.app.session.title == "mountains"

    drive(play)


def test_list_removes_only_when_asked_twice(drive: Any, history: History) -> None:
    history.append(history.create("first", "m"), "user", "x")
    history.append(history.create("second", "m"), "user", "y")

    async def play(d: Driver) -> None:
        await d.send("/list")
        await d.until(lambda: isinstance(d.app.screen, Picker))
        await d.press("down", "ctrl+x")
        assert len(history.list()) == 2
        await d.press("ctrl+x")
        assert [c.title for c in history.list()] == ["second"]
        await d.press("escape")
        assert not isinstance(d.app.screen, Picker)

    drive(play)


def test_removing_the_open_conversation_starts_a_new_one(drive: Any, server: ScriptedServer, history: History) -> None:
    server.answer("a")
    server.answer("b")

    async def play(d: Driver) -> None:
        await d.ask("one")
        await d.send("/list")
        await d.until(lambda: isinstance(d.app.screen, Picker))
        await d.press("ctrl+x", "ctrl+x", "escape")
        await d.until(lambda: not d.app.session.turns)
        await d.ask("two")

    drive(play)
    assert stored(history) == [("user", "two"), ("assistant", "b")]


def test_retry_keeps_the_earlier_answer_and_earlier_brings_it_back(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("heads")
    server.answer("tails")

    async def play(d: Driver) -> None:
        await d.ask("toss a coin")
        await d.ask("/retry")
        assert "tails" in d.screen()
        assert "heads" not in d.screen()
        await d.ask("/earlier")
        assert "heads" in d.screen()
        assert "tails" not in d.screen()

    drive(play)
    assert server.requests[0]["messages"] == server.requests[1]["messages"]
    assert stored(history) == [("user", "toss a coin"), ("assistant", "heads")]


def test_a_retry_that_fails_leaves_the_answer_there_was(drive: Any, server: ScriptedServer, history: History) -> None:
    server.answer("good answer")
    server.play(Refuse(503, {"message": "busy", "code": "server_busy"}))

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.ask("/retry")
        assert "good answer" in d.screen()
        assert "busy" in d.screen()

    drive(play)
    assert stored(history) == [("user", "q"), ("assistant", "good answer")]


def test_edit_asks_differently_in_a_copy(drive: Any, server: ScriptedServer, history: History) -> None:
    for answer in ("one", "two", "three"):
        server.answer(answer)

    async def play(d: Driver) -> None:
        await d.ask("a")
        await d.ask("b")
        await d.send("/edit last")
        assert d.app.composer.text == "b"
        await d.ask("!")
        assert [w.text for w in d.app.transcript.query(Question)] == ["a", "b!"]
        assert [w.text for w in d.app.transcript.query(AnswerView)] == ["one", "three"]

    drive(play)
    new, old = history.list()
    assert [m.content for m in history.messages(new.id)] == ["a", "one", "b!", "three"]
    assert [m.content for m in history.messages(old.id)] == ["a", "one", "b", "two"]
    assert [m["content"] for m in server.requests[2]["messages"]] == ["a", "one", "b!"]


def test_an_edit_given_up_changes_nothing(drive: Any, server: ScriptedServer, history: History) -> None:
    server.answer("one")

    async def play(d: Driver) -> None:
        await d.ask("a")
        await d.send("/edit")
        await d.press("escape")
        assert d.app.composer.text == ""

    drive(play)
    assert len(history.list()) == 1
    assert stored(history) == [("user", "a"), ("assistant", "one")]


def test_copy_takes_the_answer_or_a_code_block(drive: Any, server: ScriptedServer) -> None:
    copied: list[str] = []
    server.play(Say(["Look:\n```py\nx = 1\n```\nor\n```\ny\n```\n"]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("code")
        await d.ask("/copy")
        await d.ask("/copy code")
        await d.ask("/copy code 1")
        await d.ask("/copy code 3")
        assert "has 2 code blocks" in d.screen()

    drive(play, copy=lambda text: copied.append(text) or True)
    assert copied == ["Look:\n```py\nx = 1\n```\nor\n```\ny\n```\n", "y", "x = 1"]


def test_save_writes_markdown_and_overwrites_only_when_told(drive: Any, server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "my chat.md"
    server.answer("an answer")

    async def play(d: Driver) -> None:
        await d.ask("a question")
        await d.ask(f"/save {file}")
        assert "an answer" in file.read_text()
        file.write_text("mine")
        await d.ask(f"/save {file}")
        assert file.read_text() == "mine"
        assert "exists already" in d.screen().replace("\n", " ")
        await d.ask(f"/save! {file}")
        assert "a question" in file.read_text()

    drive(play, size=(160, 50))


def test_the_system_prompt_is_sent_first_and_can_change(drive: Any, server: ScriptedServer) -> None:
    for _ in range(3):
        server.answer("ok")

    async def play(d: Driver) -> None:
        await d.ask("a")
        await d.ask("/system Answer in rhyme")
        await d.ask("b")
        await d.ask("/system -")
        await d.ask("c")

    drive(play, system="Be brief")
    firsts = [r["messages"][0] for r in server.requests]
    assert firsts[0] == {"role": "system", "content": "Be brief"}
    assert firsts[1] == {"role": "system", "content": "Answer in rhyme"}
    assert firsts[2] == {"role": "user", "content": "a"}


def test_model_switches_among_those_served(drive: Any, server: ScriptedServer) -> None:
    server.models = [{"id": "scripted", "context_length": 1000}, {"id": "other", "context_length": 50}]
    server.answer("hi")

    async def play(d: Driver) -> None:
        await d.ask("/model")
        assert "> scripted" in d.screen()
        await d.ask("/model nothing")
        assert "no model 'nothing'" in d.screen()
        await d.ask("/model other")
        await d.ask("hello")
        assert "18/50" in d.screen()

    drive(play)
    assert server.requests[0]["model"] == "other"


def test_attached_files_go_with_the_next_question_only(drive: Any, server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("the secret is 7")
    server.answer("ok")
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.ask(f"/attach {file}")
        assert "notes.txt" in d.screen()
        await d.ask("what is the secret?")
        assert "attached: notes.txt" in d.screen()
        assert "the secret is 7" not in d.screen()
        await d.ask("sure?")

    drive(play)
    first, _, second = (m["content"] for m in server.requests[1]["messages"])
    assert first == "File notes.txt:\n```txt\nthe secret is 7\n```\n\nwhat is the secret?"
    assert second == "sure?"


def test_a_file_too_large_for_the_context_is_refused_at_once(drive: Any, tmp_path: Path) -> None:
    file = tmp_path / "big.txt"
    file.write_text("x" * 9000)

    async def play(d: Driver) -> None:
        await d.until(lambda: d.app.n_ctx == 1000)
        await d.ask(f"/attach {file}")
        assert "can't fit in a context of 1,000 tokens" in d.screen().replace("\n", " ")

    drive(play, size=(160, 50))


def test_an_unsent_draft_survives(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok")

    async def first(d: Driver) -> None:
        await d.type("half a thou")
        await d.press("ctrl+q")

    async def second(d: Driver) -> None:
        assert d.app.composer.text == "half a thou"
        await d.ask("ght")
        await d.type("more")
        await d.send("/unused")  # a command with the draft in it is not a question

    async def third(d: Driver) -> None:
        assert d.app.composer.text == ""

    drive(first)
    drive(second)
    drive(third)
    assert server.requests[0]["messages"][0]["content"] == "half a thought"


def test_an_unknown_command_is_explained_and_never_sent(drive: Any, server: ScriptedServer) -> None:
    async def play(d: Driver) -> None:
        await d.ask("/retyr")
        assert "did you mean /retry?" in d.screen()

    drive(play)
    assert server.requests == []


def test_tab_completes_a_command(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.press("/", "s", "a", "tab")
        assert d.app.composer.text == "/save "

    drive(play)


def test_up_brings_back_questions_and_down_leaves_them(drive: Any, server: ScriptedServer) -> None:
    server.answer("1")
    server.answer("2")

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("second")
        await d.press("up")
        assert d.app.composer.text == "second"
        await d.press("up")
        assert d.app.composer.text == "first"
        await d.press("down", "down")
        assert d.app.composer.text == ""
        await d.type("mine")
        await d.press("up")
        assert d.app.composer.text == "mine"

    drive(play)


def test_the_models_text_cannot_steer_the_terminal(drive: Any, server: ScriptedServer, history: History) -> None:
    server.play(Say(["safe\x1b]52;c;ZXZpbA==\x07\x1b[2J text \x9b31m"]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "safe" in d.screen()
        assert not any(c in d.screen() for c in "\x1b\x07\x9b")

    drive(play)


def test_a_full_context_is_announced_before_it_hurts(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok", usage=(900, 50, 0))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "95% full" in d.screen()

    drive(play)


def test_questions_are_shown_as_typed(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.ask("[bold]x[/bold] **y** //z")
        assert "[bold]x[/bold] **y** //z" in d.screen()

    drive(play)


def test_the_palette_offers_the_commands(drive: Any) -> None:
    async def play(d: Driver) -> None:
        titles = [c.title for c in d.app.get_system_commands(d.app.screen)]
        assert "New conversation" in titles
        assert "Find a conversation" in titles

    drive(play)
