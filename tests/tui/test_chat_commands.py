"""Slash commands and their effect on the conversation, on a (headless) terminal.

They open, remove, retry, edit, copy and save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm.conversation.history import History
from localllm_tui.screens.picker import ConversationPicker
from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.turns import QuestionView
from tui.conftest import Driver, words_of
from tui.scripted_sse import Finish, Refuse, Say, ScriptedServer


def stored(history: History) -> list[tuple[str, str]]:
    """Return (role, content) of the newest conversation."""
    return [(m.role, m.content) for m in history.messages(history.list()[0].id)]


def test_the_last_conversation_is_offered_and_resumed(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("Bonjour")
    server.answer("encore")

    async def first(d: Driver) -> None:
        await d.ask("Say hello in French")

    async def second(d: Driver) -> None:
        assert "Say hello in French" in d.screen()
        await d.send("/continue")
        await d.until(lambda: "Bonjour" in d.screen())
        # after the server has reported the context's length
        await d.until(lambda: "18/1,000" in d.screen())
        await d.ask("again")

    drive(first)
    drive(second)
    assert len(history.list()) == 1
    assert [m["content"] for m in server.requests[1]["messages"]] == [
        "Say hello in French",
        "Bonjour",
        "again",
    ]


def test_list_searches_texts_and_opens_the_choice(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    for title, said in (("rivers", "the Danube"), ("mountains", "the Eiger"), ("lakes", "Baikal")):
        conv = history.create(title, "scripted")
        history.append(conv, "user", title)
        history.append(conv, "assistant", said)

    async def play(d: Driver) -> None:
        await d.send("/list")
        await d.until(lambda: isinstance(d.app.screen, ConversationPicker))
        assert "3 conversations" in d.screen()
        await d.press(*"eiger")
        assert "1 conversation" in d.screen()
        assert "rivers" not in d.screen()
        await d.press("enter")
        await d.until(lambda: "the Eiger" in d.screen())
        assert d.app.chat.session.title == "mountains"

    drive(play)


def test_list_removes_only_when_asked_twice(drive: Any, history: History) -> None:
    history.append(history.create("first", "m"), "user", "x")
    history.append(history.create("second", "m"), "user", "y")

    async def play(d: Driver) -> None:
        await d.send("/list")
        await d.until(lambda: isinstance(d.app.screen, ConversationPicker))
        await d.press("down", "ctrl+x")
        assert len(history.list()) == 2
        await d.press("ctrl+x")
        assert [c.title for c in history.list()] == ["second"]
        await d.press("escape")
        assert not isinstance(d.app.screen, ConversationPicker)

    drive(play)


def test_removing_the_open_conversation_starts_a_new_one(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("a")
    server.answer("b")

    async def play(d: Driver) -> None:
        await d.ask("one")
        await d.send("/list")
        await d.until(lambda: isinstance(d.app.screen, ConversationPicker))
        await d.press("ctrl+x", "ctrl+x", "escape")
        await d.until(lambda: not d.app.chat.session.turns)
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
        assert "◂ 2/2 ▸" in d.screen()
        await d.ask("/earlier")
        assert "◂ 1/2 ▸" in d.screen()
        assert "heads" in d.screen()
        assert "tails" not in d.screen()

    drive(play)
    assert server.requests[0]["messages"] == server.requests[1]["messages"]
    assert stored(history) == [("user", "toss a coin"), ("assistant", "heads")]


def test_a_retry_that_fails_leaves_the_answer_there_was(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("good answer")
    server.play(Refuse(503, {"message": "busy", "code": "server_busy"}))

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.ask("/retry")
        assert "good answer" in d.screen()
        assert "busy" in d.screen()

    drive(play)
    assert stored(history) == [("user", "q"), ("assistant", "good answer")]


def test_edit_sends_a_changed_question_and_keeps_the_old_one_as_a_version(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    for answer in ("one", "two", "three"):
        server.answer(answer)

    async def play(d: Driver) -> None:
        await d.ask("a")
        await d.ask("b")
        await d.type("a draft")
        d.app.page.composer.replace_text("")
        await d.send("/edit last")
        assert d.app.page.composer.text == "b"
        await d.ask("!")
        assert [words_of(w) for w in d.app.page.transcript.query(QuestionView)] == ["a", "b!"]
        assert [words_of(w) for w in d.app.page.transcript.query(AnswerView)] == ["one", "three"]
        assert "◂ 2/2 ▸" in d.screen()
        assert d.app.page.composer.text == ""  # and no command is left in the input

    drive(play)
    assert len(history.list()) == 1
    assert [c for _, c in stored(history)] == ["a", "one", "b!", "three"]
    assert len(history.tree(history.list()[0].id)[0]) == 6
    assert [m["content"] for m in server.requests[2]["messages"]] == ["a", "one", "b!"]


def test_an_edit_given_up_changes_nothing(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("one")

    async def play(d: Driver) -> None:
        await d.ask("a")
        await d.send("/edit")
        await d.press("escape")
        assert d.app.page.composer.text == ""
        await d.ask("/new")
        await d.ask("/continue")
        assert d.app.page.composer.text == ""

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


def test_save_writes_markdown_and_overwrites_only_when_told(
    drive: Any, server: ScriptedServer, tmp_path: Path
) -> None:
    file = tmp_path / "my chat.md"
    server.answer("an answer")

    async def play(d: Driver) -> None:
        await d.ask("a question")
        await d.ask(f"/save {file}")
        assert "an answer" in file.read_text()
        file.write_text("mine")
        await d.ask(f"/save {file}")
        await d.until(lambda: "exists already" in " ".join(d.screen().replace("║", " ").split()))
        assert file.read_text() == "mine"
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


def test_model_switches_between_the_served_models(drive: Any, server: ScriptedServer) -> None:
    server.models = [
        {"id": "scripted", "context_length": 1000},
        {"id": "other", "context_length": 50},
    ]
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


def test_attached_files_go_with_the_next_question_only(
    drive: Any, server: ScriptedServer, tmp_path: Path
) -> None:
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
        await d.until(lambda: d.app.chat.listed.n_ctx == 1000)
        await d.ask(f"/attach {file}")
        assert "can't fit in a context of 1,000 tokens" in d.screen().replace("\n", " ")

    drive(play, size=(160, 50))


def test_an_unsent_draft_is_restored_at_the_next_start(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok")

    async def first(d: Driver) -> None:
        await d.type("half a thou")
        await d.press("ctrl+q")

    async def second(d: Driver) -> None:
        assert d.app.page.composer.text == "half a thou"
        await d.ask("ght")
        await d.type("more")
        await d.send("/unused")  # a command that contains the draft is not a question

    async def third(d: Driver) -> None:
        assert d.app.page.composer.text == ""

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
        await d.press(*"/mod", "tab")
        assert d.app.page.composer.text == "/model "
        await d.press("ctrl+u", *"/mod", "down", "tab")
        assert d.app.page.composer.text == "/models"

    drive(play)


def test_up_recalls_earlier_questions_and_down_returns(drive: Any, server: ScriptedServer) -> None:
    server.answer("1")
    server.answer("2")

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("second")
        await d.press("up")
        assert d.app.page.composer.text == "second"
        await d.press("up")
        assert d.app.page.composer.text == "first"
        await d.press("down", "down")
        assert d.app.page.composer.text == ""
        await d.type("mine")
        await d.press("up")
        assert d.app.page.composer.text == "mine"

    drive(play)


def test_the_models_text_cannot_steer_the_terminal(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(Say(["safe\x1b]52;c;ZXZpbA==\x07\x1b[2J text \x9b31m"]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "safe" in d.screen()
        assert not any(c in d.screen() for c in "\x1b\x07\x9b")

    drive(play)


def test_a_nearly_full_context_causes_a_warning(drive: Any, server: ScriptedServer) -> None:
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
