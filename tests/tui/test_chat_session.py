"""A conversation in step with the disk: nothing said is lost, nothing earlier is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.conversation.history import History
from localllm.errors import UsageError
from localllm_tui.control.drafts import Drafts
from localllm_tui.control.session import TITLE_CHARS, Session, code_blocks, fenced, title_of


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
    """What another process would read now."""
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
    answer = session.answer()
    answer.add("a")
    assert on_disk(history)[1] == ("assistant", "a", False)
    clock.now = 0.4
    answer.add("b")
    assert on_disk(history)[1] == ("assistant", "a", False)
    clock.now = 0.5
    answer.save_if_due()  # no more text comes; the timer alone must save it
    assert on_disk(history)[1] == ("assistant", "ab", False)
    answer.add("c")
    answer.finish({"finish_reason": "stop"})
    assert on_disk(history)[1] == ("assistant", "abc", True)


def test_an_answer_without_text_is_not_a_message(session: Session, history: History) -> None:
    session.ask("q")
    assert session.answer().finish({}) is None
    assert on_disk(history) == [("user", "q", True)]


def test_a_retry_never_loses_the_earlier_answers(session: Session, history: History) -> None:
    session.ask("q")
    for text in ("one", "two", "three"):
        answer = session.answer()
        answer.add(text)
        answer.finish({})
    seen = {session.last_answer.content}  # type: ignore[union-attr]
    for _ in range(2):
        seen.add(session.swap_earlier().content)
    assert seen == {"one", "two", "three"}
    assert session.swap_earlier().content == "three"
    reopened = Session(history, "m", conv_id=session.id)
    assert reopened.swap_earlier().content in {"one", "two"}


def test_a_retry_that_gave_nothing_changes_nothing(session: Session, history: History) -> None:
    session.ask("q")
    answer = session.answer()
    answer.add("good")
    answer.finish({})
    session.answer().finish({})
    assert on_disk(history)[1] == ("assistant", "good", True)


def test_a_retry_is_asked_without_the_answer_it_replaces(session: Session) -> None:
    session.ask("q")
    answer = session.answer()
    answer.add("a")
    answer.finish({})
    assert session.payload() == [{"role": "user", "content": "q"}]


def test_unanswered_questions_are_sent_as_one(session: Session) -> None:
    session.ask("first")
    session.ask("second")
    assert session.payload() == [{"role": "user", "content": "first\n\nsecond"}]


def test_a_branch_keeps_the_files_of_the_question(session: Session, history: History) -> None:
    session.ask("sum it up", [("a.txt", "one"), ("b.txt", "two")])
    copy, old = session.branch()
    new = copy.ask("shorter", [("c.txt", "three")], like=old)
    assert new.content.endswith("\n\nshorter")
    assert "sum it up" not in new.content
    assert code_blocks(new.content) == ["one", "two", "three"]
    assert new.meta["attached"] == ["a.txt", "b.txt", "c.txt"]
    assert len(history.list()) == 2


def test_nothing_to_answer_edit_or_swap_is_said(session: Session) -> None:
    for action in (session.answer, session.branch, session.swap_earlier):
        with pytest.raises(UsageError):
            action()


def test_the_tokens_in_use_are_those_of_the_last_counted_answer(session: Session) -> None:
    session.ask("q")
    answer = session.answer()
    answer.add("a")
    answer.finish({"prompt_tokens": 10, "completion_tokens": 5})
    session.ask("r")
    answer = session.answer()
    answer.add("b")
    answer.finish({"finish_reason": "error"})
    assert session.used_tokens == 15


def test_markdown_holds_the_whole_conversation(session: Session) -> None:
    session.set_system("Be brief")
    session.ask("what?")
    answer = session.answer()
    answer.add("that")
    answer.finish({})
    assert session.to_markdown() == "# what?\n\n## System\n\nBe brief\n\n## You\n\nwhat?\n\n## m\n\nthat\n"


@given(st.text())
def test_a_title_is_one_short_line(text: str) -> None:
    title = title_of(text)
    assert title
    assert len(title) <= TITLE_CHARS
    assert len(title.splitlines()) == 1


@given(st.lists(st.text(alphabet="ab`~ \n#", max_size=40), max_size=3))
def test_any_file_survives_its_fence(bodies: list[str]) -> None:
    message = "\n\n".join([*(fenced(f"f{i}.md", body) for i, body in enumerate(bodies)), "question"])
    assert code_blocks(message) == [body.rstrip() for body in bodies]


def test_an_unclosed_code_block_counts() -> None:
    assert code_blocks("x\n```py\na = 1\nb") == ["a = 1\nb"]


def test_drafts_are_kept_apart_and_removed_when_empty(tmp_path: Path) -> None:
    drafts = Drafts(tmp_path / "drafts")
    assert drafts.load(None) == ""
    drafts.save(None, "new")
    drafts.save("abc", "täglich\n")
    assert (drafts.load(None), drafts.load("abc")) == ("new", "täglich\n")
    drafts.save(None, "  ")
    assert drafts.load(None) == ""
    assert [f.name for f in (tmp_path / "drafts").iterdir()] == ["abc.txt"]
    assert (tmp_path / "drafts" / "abc.txt").stat().st_mode & 0o077 == 0


def test_a_disk_that_refuses_a_draft_does_not_stop_the_chat(tmp_path: Path) -> None:
    (tmp_path / "drafts").write_text("a file where the folder should be")
    drafts = Drafts(tmp_path / "drafts")
    drafts.save(None, "text")
    assert drafts.load(None) == ""
