"""Two windows at once: no draft is lost, and neither writes between the other's turns."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from localllm.conversation.history import History
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.local_state import Drafts
from localllm_tui.control.session import Session
from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer


def _texts(history: History, conv_id: str | None) -> list[str]:
    assert conv_id is not None
    return [m.content for m in history.messages(conv_id)]


def test_two_windows_have_separate_drafts(tmp_path: Path) -> None:
    first, second = Drafts(tmp_path / "drafts"), Drafts(tmp_path / "drafts")
    first.save(None, "mine")
    assert second.load(None) == ""
    second.save(None, "yours")
    assert first.load(None) == "mine"
    first.save(None, "")
    assert (first.load(None), second.load(None)) == ("", "yours")
    second.save("abc", "of a conversation")
    assert first.load("abc") == ""


def test_the_draft_of_a_closed_window_is_loaded_by_the_next(tmp_path: Path) -> None:
    first, second = Drafts(tmp_path / "drafts"), Drafts(tmp_path / "drafts")
    second.save(None, "left behind")
    second.close()
    assert first.load(None) == "left behind"
    third = Drafts(tmp_path / "drafts")
    assert third.load(None) == ""
    first.close()
    assert Drafts(tmp_path / "drafts").load(None) == "left behind"


def test_a_killed_window_releases_its_draft(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from localllm_tui.control.local_state import Drafts\n"
        "d = Drafts(pathlib.Path(sys.argv[1])); d.save(None, 'typed'); d.load(None); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "drafts")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline().strip() == b"ready"
    beside = Drafts(tmp_path / "drafts")
    assert beside.load(None) == ""
    child.kill()
    child.communicate()
    assert beside.load(None) == "typed"


def test_the_second_window_to_write_continues_on_its_own_branch(history: History) -> None:
    mine = Session(history, "m")
    mine.ask("q")
    yours = Session(history, "m", conv_id=mine.id)
    yours.ask("another")
    answer = PendingAnswer(mine)
    answer.add("a")
    answer.finish({})
    mine.ask("next")
    assert [t.content for t in mine.turns] == ["q", "a", "next"]
    assert [t.content for t in yours.turns] == ["q", "another"]
    third = PendingAnswer(yours)
    third.add("b")
    third.finish({})
    assert _texts(history, mine.id) == ["q", "another", "b"]
    assert len(history.tree(str(mine.id))[0]) == 5


def test_a_turn_removed_by_another_window_is_continued_in_a_copy(history: History) -> None:
    for remove in (lambda s: s.remove(s.turns[0]), lambda s: history.delete(s.id)):
        mine = Session(history, "m", system="Be brief")
        mine.ask("q")
        answer = PendingAnswer(mine)
        answer.add("half ")
        remove(Session(history, "m", conv_id=mine.id))
        answer.add("of it")
        answer.finish({})
        assert mine.copied
        assert _texts(history, mine.id) == ["Be brief", "q", "half of it"]
        mine.ask("next")
        assert [t.content for t in mine.turns] == ["q", "half of it", "next"]
        history.delete(str(mine.id))


def test_a_window_shows_that_another_window_continued_the_conversation(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("one")
    server.answer("two")

    async def play(d: Driver) -> None:
        await d.ask("first")
        with History(history.path) as elsewhere:
            other = Session(elsewhere, "m", conv_id=d.app.chat.session.id)
            await asyncio.to_thread(other.ask, "from the other window")
        await d.ask("second")
        assert "Another window has continued" in " ".join(d.screen().split())
        assert "2/2" in d.screen()

    drive(play)
    assert [m["content"] for m in server.requests[1]["messages"]] == ["first", "one", "second"]
    (conversation,) = history.list()
    assert _texts(history, conversation.id) == ["first", "one", "second", "two"]
