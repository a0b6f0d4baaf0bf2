"""A conversation that is too long for the context, in the chat.

No typed text is lost, and /compact makes the conversation fit.
"""

from __future__ import annotations

import io
from typing import Any

import pytest

from localllm.conversation.history import History
from localllm_tui import line_chat
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.session import Session
from tui.conftest import Driver
from tui.scripted_sse import Comment, Finish, Refuse, Say, ScriptedServer

FULL = Refuse(
    400,
    {
        "message": "the prompt has 1200 tokens and the served context is 1000",
        "code": "context_length_exceeded",
    },
)
LEFT_OUT = Comment("compacted 4 messages, 345 tokens")


def _stored(history: History) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in history.messages(history.list()[0].id)]


def test_a_question_refused_for_a_full_context_is_answered_after_compact(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("one")
    server.play(FULL)
    server.play(LEFT_OUT, Say(["two"]), Finish())
    server.answer("three")

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("second")
        assert "1200 tokens and the served context is 1000" in d.screen()
        assert "/compact leaves out the oldest messages" in d.screen()
        assert _stored(history)[-1] == ("user", "second")
        await d.ask("/compact")
        await d.until(lambda: "4 oldest messages were left out" in " ".join(d.screen().split()))
        assert "Error" not in d.screen()
        await d.ask("third")

    drive(play, size=(120, 40))
    assert [r.get("truncation") for r in server.requests] == [None, None, "auto", "auto"]
    # every message is sent
    assert [m["content"] for m in server.requests[2]["messages"]] == ["first", "one", "second"]
    assert [text for _, text in _stored(history)] == [
        "first",
        "one",
        "second",
        "two",
        "third",
        "three",
    ]


def test_compacting_is_stored_with_the_conversation_and_can_be_turned_off(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(FULL)
    server.answer("one")
    server.answer("two")
    server.answer("three")

    async def before(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/compact")

    async def after(d: Driver) -> None:
        await d.ask("second")
        await d.ask("/compact off")
        await d.ask("third")

    drive(before, size=(120, 40))
    drive(after, size=(120, 40), resume=history.list()[0].id)
    assert [r.get("truncation") for r in server.requests] == [None, "auto", "auto", None]


def test_the_model_gets_a_summary_in_place_of_the_earlier_messages(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("The plates are copper.", usage=(700, 50, 0))
    server.answer("The user wants copper plates.", usage=(820, 40, 700))
    server.answer("two")
    server.answer("It is about copper.", usage=(300, 30, 0))
    server.answer("three")

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/compact the plates")
        await d.until(lambda: "gets a summary in place" in " ".join(d.screen().split()))
        shown = " ".join(d.screen().split())
        assert "120 prompt tokens (700 more were cached) and 40 output tokens" in shown
        assert "The plates are copper." in shown
        await d.ask("second")
        await d.ask("/compact")
        await d.until(lambda: len(server.requests) == 4)
        await d.ask("third")

    async def undone(d: Driver) -> None:
        await d.ask("/compact off")
        await d.ask("fourth")

    drive(play, size=(120, 50))
    asked = server.requests[1]["messages"]
    assert [m["role"] for m in asked] == ["user", "assistant", "user"]
    assert "Keep in any case: the plates" in asked[-1]["content"]
    (after,) = server.requests[2]["messages"]
    assert "The user wants copper plates." in after["content"]
    assert after["content"].endswith("second")
    assert "The plates are copper." not in after["content"]
    (third,) = server.requests[4]["messages"]
    text = third["content"]
    assert ("It is about copper." in text, "user wants copper" in text) == (True, False)
    assert (text.count("first"), text.count("second"), text.count("third")) == (1, 1, 1)
    server.answer("four")
    drive(undone, size=(120, 50), resume=history.list()[0].id)
    sent = [m["content"] for m in server.requests[-1]["messages"]]
    assert sent == ["first", "The plates are copper.", "second", "two", "third", "three", "fourth"]


def test_lasting_facts_are_in_a_file_that_the_user_can_edit(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("one")
    server.answer("- The port is 8080.\n- The name is Ada.\nThe plates are done.")
    server.answer("two")
    server.answer("- the port is 8080\n- Copper is blue.\nAll is done.")
    server.answer("three")
    shown: list[str] = []

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/compact")
        await d.until(lambda: "2 lasting facts" in " ".join(d.screen().split()))
        (file,) = (history.path.parent / "facts").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        text = file.read_text()
        assert "- The port is 8080.\n- The name is Ada.\n" in text
        file.write_text(text.replace("Ada", "Grace"))
        await d.ask("second")
        await d.ask("/compact")
        await d.until(lambda: "3 lasting facts" in " ".join(d.screen().split()))
        shown.append(file.read_text())
        await d.ask("third")

    drive(play, size=(120, 50))
    first = server.requests[2]["messages"][0]["content"]
    assert "The plates are done.\n\n[Lasting facts]\n- The port is 8080.\n" in first
    assert "- The name is Grace." in server.requests[3]["messages"][-1]["content"]
    second = server.requests[4]["messages"][0]["content"]
    facts = "- The port is 8080.\n- The name is Grace.\n- Copper is blue."
    assert f"All is done.\n\n[Lasting facts]\n{facts}\n" in second
    assert facts in shown[0]
    (conversation,) = history.list()
    history.delete(conversation.id)
    assert [*(history.path.parent / "facts").iterdir()] == []


def test_a_summary_is_prepared_while_the_user_is_idle(drive: Any, server: ScriptedServer) -> None:
    server.answer("one", usage=(880, 20, 0))
    server.answer("A title of it")
    server.answer("- The port is 8080.\nAll is done.", usage=(910, 40, 880))
    server.answer("two")

    async def play(d: Driver) -> None:
        await d.ask("first")
        d.app.chat.idle_after_s = 0.0
        await d.until(lambda: bool(d.app.chat.idle_writing.summary.text))
        d.app.chat.idle_after_s = None
        assert len(server.requests) == 3
        await d.ask("/compact")
        await d.until(
            lambda: "30 prompt tokens (880 more were cached)" in " ".join(d.screen().split())
        )
        assert len(server.requests) == 3
        await d.ask("second")

    drive(play, size=(120, 50))
    assert server.requests[2]["service_tier"] == "flex"
    (sent,) = server.requests[3]["messages"]
    assert "All is done." in sent["content"]
    assert "- The port is 8080." in sent["content"]


def test_an_empty_summary_changes_no_message(drive: Any, server: ScriptedServer) -> None:
    server.answer("one")
    server.answer(" ")
    server.answer("two")

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/compact")
        await d.until(lambda: "wrote no summary" in d.screen())
        await d.ask("second")

    drive(play, size=(120, 40))
    assert [m["content"] for m in server.requests[2]["messages"]] == ["first", "one", "second"]


def test_a_damaged_summary_is_left_out(history: History) -> None:
    session = Session(history, "m")
    session.ask("first")
    PendingAnswer(session).finish({})
    wrong = ['{"text": 5}', '{"text": "a", "questions": 5}', '{"text": "a", "left_out": [5]}']
    for damaged in ("", "{}", "[1]", "x", *wrong):
        answer = session.append("assistant", "one", meta={"summary": damaged})
        assert [m["content"] for m in session.context()][:1] == ["first"]
        session.remove(answer)


def test_an_edited_question_stays_compacted(history: History) -> None:
    session = Session(history, "m")
    session.ask("first")
    session.set_compacts(True)
    PendingAnswer(session).finish({})
    session.ask("second")
    session.ask("first, differently", instead=session.turns[0])
    assert session.compacts
    assert session.branch_off(session.turns[0]).compacts
    assert not Session(history, "m").compacts


def test_compact_before_any_question_is_refused(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.ask("/compact")
        assert "there is no question yet" in d.screen()

    drive(play)


def test_compact_is_not_offered_again_after_it_did_not_help(
    drive: Any, server: ScriptedServer
) -> None:
    server.play(FULL)
    server.play(FULL)

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/compact")
        assert "Error: the prompt has 1200 tokens" in d.screen()
        assert "/compact" not in d.screen()
        assert "/edit" in d.screen()

    drive(play)


def test_no_warning_of_a_full_context_if_it_is_compacted(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("ok", usage=(900, 50, 0))
    server.answer("ok", usage=(900, 60, 0))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "Compact it? /compact replaces the earlier" in " ".join(d.screen().split())

    async def compacted(d: Driver) -> None:
        d.app.chat.client.sampling = {"truncation": "auto"}
        await d.ask("hi")
        assert "% full" not in d.screen()

    drive(play)
    drive(compacted)
    assert server.requests[1]["truncation"] == "auto"


def test_line_by_line_compact_asks_again(
    server: ScriptedServer,
    history: History,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.play(FULL)
    server.play(LEFT_OUT, Say(["two"]), Finish())
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n/compact\n/quit\n"))
    line_chat.run_line_chat(ChatOptions(ChatClient(server.base_url), history, "scripted"))
    out = capsys.readouterr()
    assert "two" in out.out
    assert "/compact leaves out the oldest messages and asks again" in out.err
    assert "the 4 oldest messages were left out" in out.err
    assert [r.get("truncation") for r in server.requests] == [None, "auto"]
