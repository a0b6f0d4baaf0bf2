"""A running answer, without a screen: display, counts and storage for every way it can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from localllm.conversation.history import History, HistoryError, StoredMessage
from localllm.errors import BusyError
from localllm_tui.control.answering import AnswerStream, PendingAnswer
from localllm_tui.control.repetition import RepetitionGuard
from localllm_tui.control.session import Session
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerUsage,
    IdenticalCalls,
    MessagesLeftOut,
    PromptProgress,
    StreamEvent,
    TextDelta,
    WaitNote,
)
from localllm_tui.control.wording import note_under
from tui.conftest import Disk


class Page:
    """A display that records what an answer shows."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def feed(self, text: str = "", reasoning: str = "") -> None:
        self.seen.append(text or f"({reasoning})")

    def progress(self, what: str) -> None:
        self.seen.append(f"[{what}]")


@pytest.fixture
def session(history: History) -> Session:
    session = Session(history, "m")
    session.ask("q")
    return session


def on_disk(session: Session) -> StoredMessage:
    assert session.id is not None
    return session.history.messages(session.id)[-1]


async def said(*events: StreamEvent | Exception) -> AsyncGenerator[StreamEvent, None]:
    for event in events:
        if isinstance(event, Exception):
            raise event
        yield event


def test_text_is_shown_and_stored_and_progress_ends_with_the_first_piece(session: Session) -> None:
    answering, page = PendingAnswer(session), Page()
    events = (
        WaitNote("loading"), PromptProgress(5, 20), MessagesLeftOut(4),
        IdenticalCalls("look", 3), TextDelta("", "hm"),
        PromptProgress(20, 20), TextDelta("a"), WaitNote("busy"),
        TextDelta("b"), AnswerDone("length", AnswerUsage(20, 9)),
    )  # fmt: skip
    asyncio.run(answering.run(said(*events), page))
    assert page.seen == [
        "[loading…]",
        "[reading the prompt… 5 of 20 tokens]",
        "[]",
        "(hm)",
        "a",
        "b",
    ]
    kept = on_disk(session)
    assert (kept.content, kept.reasoning, kept.complete) == ("ab", "hm", True)
    assert answering.turn == session.turns[-1]
    assert (kept.meta["finish_reason"], kept.meta["left_out"]) == ("length", 4)
    assert "same result: look 3 times" in note_under(kept)
    assert (kept.meta["prompt_tokens"], kept.meta["completion_tokens"]) == (20, 9)


def test_an_error_is_raised_and_the_text_so_far_is_stored(session: Session) -> None:
    answering = PendingAnswer(session)
    with pytest.raises(BusyError):
        asyncio.run(answering.run(said(TextDelta("half"), BusyError("busy")), Page()))
    assert (answering.reason, on_disk(session).content) == ("error", "half")
    assert on_disk(session).meta["finish_reason"] == "error"


def test_a_cancelled_answer_closes_the_stream_and_is_stored_with_an_estimate(
    session: Session,
) -> None:
    answering = PendingAnswer(session)
    closed = False

    async def endless(reached: asyncio.Event) -> AsyncGenerator[StreamEvent, None]:
        nonlocal closed
        try:
            yield TextDelta("so ")
            yield TextDelta("far")
            reached.set()
            await asyncio.Event().wait()
        finally:
            closed = True

    async def main() -> None:
        reached = asyncio.Event()
        task = asyncio.create_task(answering.run(endless(reached), Page()))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert closed
    kept = on_disk(session)
    assert (kept.content, kept.complete, kept.meta["finish_reason"]) == ("so far", True, "stopped")
    assert (kept.meta["completion_tokens"], kept.meta["estimated"]) == (2, True)


def test_an_answer_without_text_adds_no_turn(session: Session) -> None:
    answering = PendingAnswer(session)
    asyncio.run(answering.run(said(AnswerDone("stop", None)), Page()))
    assert (answering.turn, answering.reason, on_disk(session).role) == (None, "stop", "user")


def test_a_closed_answer_keeps_its_text_and_later_events_change_no_data(session: Session) -> None:
    answering = PendingAnswer(session)

    async def left() -> AsyncGenerator[StreamEvent, None]:
        yield TextDelta("half")
        answering.close()
        yield AnswerDone("stop", AnswerUsage(1, 1))

    asyncio.run(answering.run(left(), Page()))
    assert (on_disk(session).content, on_disk(session).meta["finish_reason"]) == ("half", "stopped")


def test_an_answer_on_a_full_disk_is_shown_and_stored_once_there_is_room(
    session: Session, disk: Disk
) -> None:
    answering, page = PendingAnswer(session), Page()
    disk.fill()
    long = "a" * 100_000
    asyncio.run(
        answering.run(
            said(TextDelta(long), TextDelta("b"), AnswerDone("stop", AnswerUsage(3, 2))), page
        )
    )
    answering.save_if_due()
    assert page.seen == ["[]", long, "b"]
    assert answering.refused is not None
    assert "full" in answering.refused.message
    assert answering.turn is not None
    assert answering.turn.content == f"{long}b"
    with pytest.raises(HistoryError):
        answering.save()
    disk.free()
    assert answering.save() == answering.turn
    assert (answering.refused, on_disk(session).content) == (None, f"{long}b")


def test_an_answer_that_is_not_stored_is_shown_and_counted() -> None:
    answering, page = AnswerStream(), Page()
    asyncio.run(answering.run(said(TextDelta("a"), AnswerDone("stop", AnswerUsage(3, 1))), page))
    assert (page.seen, answering.reason, answering.meter.used) == (["[]", "a"], "stop", 4)


ANIMALS = ("chat", "chien", "cheval", "oiseau", "lapin", "souris")
LOOPS = {
    "a list with small changes": [f"- Le {ANIMALS[n * n % 6]} noir\n" for n in range(400)],
    "a numbered list": [f"{n}. Le Petit Prince\n" for n in range(1, 400)],
    "one line without end": [f"le {ANIMALS[n * 7 % 5]}, " for n in range(400)],
    "without spaces": ["私は猫が好きです。" for _ in range(100)],
}
TEXTS = {
    "counting": "".join(f"{n}\n" for n in range(1, 400)),
    "a multiplication table": "".join(f"7 x {n} = {7 * n}\n" for n in range(1, 200)),
    "a plan": "".join(f"Day {n}: run {n % 9 + 1} km\n" for n in range(1, 100)),
    "code": "```py\n" + "x = 0\n" * 400 + "```\n",
    "a table": "| a | b |\n|---|---|\n" + "| 0 | 0 |\n" * 400,
    "prose": (Path(__file__).parents[2] / "docs" / "chat.md").read_text("utf-8"),
}


@pytest.mark.parametrize("pieces", LOOPS.values(), ids=LOOPS)
def test_an_answer_that_repeats_itself_is_ended(session: Session, pieces: list[str]) -> None:
    answering = PendingAnswer(session)
    events = [TextDelta(piece) for piece in pieces]
    asyncio.run(answering.run(said(*events, AnswerDone("length", AnswerUsage(1, 9))), Page()))
    assert answering.reason == "repetition"
    kept = on_disk(session)
    assert "repeats itself; /more continues it" in note_under(kept)
    assert len(kept.content) < len("".join(pieces)) * 0.8


@pytest.mark.parametrize("size", [1, 7, 5000])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_answer_with_similar_lines_is_not_ended(session: Session, text: str, size: int) -> None:
    guard = RepetitionGuard()
    assert not any(guard.loops(text[at : at + size]) for at in range(0, len(text), size))
