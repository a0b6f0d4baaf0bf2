"""The conversation in memory and on disk agree.

No message is lost, and no earlier one is overwritten.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.conversation.history import History, StoredMessage
from localllm.errors import UsageError
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.attachments import code_blocks, fenced
from localllm_tui.control.formatting import TITLE_CHARS, title_of
from localllm_tui.control.local_state import Drafts
from localllm_tui.control.session import Session


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def session(history: History, clock: Clock) -> Session:
    return Session(history, "m", now=clock)


def on_disk(history: History) -> list[tuple[str, str, bool]]:
    """Return the messages that another process would read now."""
    with History(history.path) as other:
        return [(m.role, m.content, m.complete) for m in other.messages(other.list()[0].id)]


def test_an_empty_conversation_leaves_no_trace(session: Session, history: History) -> None:
    session.set_system("Be brief")
    assert history.list() == []


def test_a_question_is_on_disk_when_ask_returns(session: Session, history: History) -> None:
    session.ask("hello")
    assert on_disk(history) == [("user", "hello", True)]


def test_an_answer_is_written_at_once_and_then_at_most_twice_a_second(
    session: Session, history: History, clock: Clock
) -> None:
    session.ask("q")
    answer = PendingAnswer(session)
    answer.add("a")
    assert on_disk(history)[1] == ("assistant", "a", False)
    clock.now = 0.4
    answer.add("b")
    assert on_disk(history)[1] == ("assistant", "a", False)
    clock.now = 0.5
    answer.save_if_due()  # no more text comes, so the timer must save it
    assert on_disk(history)[1] == ("assistant", "ab", False)
    answer.add("c")
    answer.finish({"finish_reason": "stop"})
    assert on_disk(history)[1] == ("assistant", "abc", True)


def test_an_answer_without_text_is_not_a_message(session: Session, history: History) -> None:
    session.ask("q")
    assert PendingAnswer(session).finish({}) is None
    assert on_disk(history) == [("user", "q", True)]


def _answered(session: Session, text: str, **meta: Any) -> StoredMessage:
    answer = PendingAnswer(session)
    answer.add(text)
    turn = answer.finish({"finish_reason": "stop", **meta})
    assert turn is not None
    return turn


def test_a_retry_never_loses_the_earlier_answers(session: Session, history: History) -> None:
    session.ask("q")
    for text in ("one", "two", "three"):
        _answered(session, text)
    last = session.last_answer
    assert last is not None
    assert session.place(last) == (3, 3)
    seen = [last.content]
    for _ in range(3):
        last = session.other_version(last, -1)
        seen.append(last.content)
    assert seen == ["three", "two", "one", "three"]
    session.other_version(last, 1)
    reopened = Session(history, "m", conv_id=session.id)
    assert [t.content for t in reopened.turns] == ["q", "one"]


def test_any_turn_has_versions_and_the_turns_after_each_version_are_restored(
    session: Session, history: History
) -> None:
    first = session.ask("a")
    _answered(session, "one")
    session.ask("b")
    _answered(session, "two")
    changed = session.ask("A", instead=first)
    assert [t.content for t in session.turns] == ["A"]
    _answered(session, "three")
    assert session.context(session.last_question) == [{"role": "user", "content": "A"}]
    assert session.place(changed) == (2, 2)
    session.other_version(changed, -1)
    assert [t.content for t in session.turns] == ["a", "one", "b", "two"]
    session.change_answer(session.turns[1], "ONE")
    assert [t.content for t in session.turns] == ["a", "ONE"]
    assert len(history.list()) == 1


def test_an_answer_in_the_middle_can_be_continued_or_generated_again_as_a_new_version(
    session: Session,
) -> None:
    session.ask("a")
    stopped = _answered(session, "one", finish_reason="stopped")
    session.ask("b")
    _answered(session, "two")
    more = PendingAnswer(session, stopped, continues=True)
    assert more.messages[-1] == {"role": "assistant", "content": "one"}
    more.add(" and more")
    more.finish({})
    assert [t.content for t in session.turns] == ["a", "one and more"]
    session.other_version(session.turns[1], -1)
    assert [t.content for t in session.turns] == ["a", "one", "b", "two"]
    again = PendingAnswer(session, session.turns[1])
    assert again.messages == [{"role": "user", "content": "a"}]
    again.add("anew")
    again.finish({})
    assert [t.content for t in session.turns] == ["a", "anew"]


def test_removing_a_turn_shows_its_other_version(session: Session, history: History) -> None:
    session.ask("a")
    _answered(session, "one")
    session.ask("b")
    PendingAnswer(session, session.turns[1])
    again = PendingAnswer(session, session.turns[0])
    again.add("two")
    gone = again.finish({})
    assert gone is not None
    session.remove(gone)
    assert [t.content for t in session.turns] == ["a", "one", "b"]
    session.remove(session.turns[1])
    assert [t.content for t in session.turns] == ["a"]
    session.remove(session.turns[0])
    assert history.list() == []


def test_a_separate_branch_has_its_own_title(session: Session, history: History) -> None:
    session.set_system("Be brief")
    session.ask("a", [("f.txt", "x")])
    _answered(session, "one")
    session.ask("b")
    branches = [session.branch_off(session.turns[1]) for _ in range(2)]
    assert [b.title for b in branches] == ["a (branch)", "a (branch 2)"]
    assert len({c.title for c in history.list()}) == 3
    for branch in branches:
        assert [t.content for t in branch.turns] == [t.content for t in session.turns[:2]]
        assert branch.system == "Be brief"
        branch.ask("elsewhere")
    assert session.turns[-1].content == "b"


def test_a_retry_without_text_changes_no_turn(session: Session, history: History) -> None:
    session.ask("q")
    answer = PendingAnswer(session)
    answer.add("good")
    answer.finish({})
    PendingAnswer(session).finish({})
    assert on_disk(history)[1] == ("assistant", "good", True)


def test_a_retry_is_asked_without_the_answer_it_replaces(session: Session) -> None:
    session.ask("q")
    answer = PendingAnswer(session)
    answer.add("a")
    answer.finish({})
    assert session.context(session.last_question) == [{"role": "user", "content": "q"}]


def test_unanswered_questions_are_sent_as_one(session: Session) -> None:
    session.ask("first")
    session.ask("second")
    assert session.context(session.last_question) == [
        {"role": "user", "content": "first\n\nsecond"}
    ]


def test_a_changed_question_keeps_its_files(session: Session, history: History) -> None:
    old = session.ask("sum it up", [("a.txt", "one"), ("b.txt", "two")])
    _answered(session, "a")
    new = session.ask("shorter", [("c.txt", "three")], instead=old)
    assert new.content.endswith("\n\nshorter")
    assert "sum it up" not in new.content
    assert code_blocks(new.content) == ["one", "two", "three"]
    assert new.meta["attached"] == ["a.txt", "b.txt", "c.txt"]
    assert len(history.list()) == 1


def test_an_answer_without_a_question_is_refused(session: Session) -> None:
    for action in (lambda: PendingAnswer(session), lambda: PendingAnswer(session, continues=True)):
        with pytest.raises(UsageError):
            action()
    turn = session.ask("q")
    with pytest.raises(UsageError):
        session.other_version(turn, 1)


def test_the_tokens_in_use_are_those_of_the_last_counted_answer(session: Session) -> None:
    session.ask("q")
    answer = PendingAnswer(session)
    answer.add("a")
    answer.finish({"prompt_tokens": 10, "completion_tokens": 5})
    session.ask("r")
    answer = PendingAnswer(session)
    answer.add("b")
    answer.finish({"finish_reason": "error"})
    assert session.used_tokens == 15


@given(st.text())
def test_a_title_is_one_short_line(text: str) -> None:
    title = title_of(text)
    assert title
    assert len(title) <= TITLE_CHARS
    assert len(title.splitlines()) == 1


@given(st.lists(st.text(alphabet="ab`~ \n#", max_size=40), max_size=3))
def test_any_file_content_is_kept_inside_its_code_block(bodies: list[str]) -> None:
    message = "\n\n".join(
        [*(fenced(f"f{i}.md", body) for i, body in enumerate(bodies)), "question"]
    )
    assert code_blocks(message) == [body.rstrip() for body in bodies]


def test_an_unclosed_code_block_is_found() -> None:
    assert code_blocks("x\n```py\na = 1\nb") == ["a = 1\nb"]


def test_drafts_are_stored_separately_and_removed_when_empty(tmp_path: Path) -> None:
    drafts = Drafts(tmp_path / "drafts")
    assert drafts.load(None) == ""
    drafts.save(None, "new")
    drafts.save("abc", "täglich\n")
    assert (drafts.load(None), drafts.load("abc")) == ("new", "täglich\n")
    drafts.save(None, "  ")
    assert drafts.load(None) == ""
    assert [f.name for f in (tmp_path / "drafts").iterdir()] == ["abc.txt"]
    assert (tmp_path / "drafts" / "abc.txt").stat().st_mode & 0o077 == 0


def test_a_slow_disk_delays_no_key_and_the_newest_draft_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, turns, replaced = Drafts(tmp_path / "drafts"), threading.Event(), os.replace
    written: list[str] = []

    def slow(new: Path, file: Path) -> None:
        assert turns.wait(30)
        written.append(new.read_text())
        replaced(new, file)

    monkeypatch.setattr("os.replace", slow)
    for n in range(1, 200):
        drafts.save(None, "a" * n)  # each call returns before any draft is written
    assert written == []
    turns.set()
    drafts.close()
    assert written[-1] == "a" * 199
    assert len(written) <= 3  # all drafts of the meantime are one write
    assert Drafts(tmp_path / "drafts").load(None) == "a" * 199


def test_a_disk_that_refuses_a_draft_does_not_stop_the_chat(tmp_path: Path) -> None:
    (tmp_path / "drafts").write_text("a file where the folder should be")
    drafts = Drafts(tmp_path / "drafts")
    drafts.save(None, "text")
    assert drafts.load(None) == ""
