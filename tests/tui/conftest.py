"""Common parts of the chat's tests: a scripted server, a history on disk, and a driver of the
app."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.strip import Strip
from textual.widget import Widget

from localllm.conversation.history import History
from localllm_tui.app import ChatApp
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.widgets.text import GrowingText
from tui.scripted_sse import ScriptedServer

MOST_TURNS = 2500


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Record every database connection that is opened, in order."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remembered(*args: Any, **more: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **more))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", remembered)
    return opened


@pytest.fixture
def disk(connections: list[sqlite3.Connection], history: History) -> Disk:
    """Return the disk under `history`."""
    return Disk(next(c for c in connections if _file_of(c) == str(history.path)))


class Disk:
    """A disk that can be full: after `fill`, SQLite fails with "database or disk is full"."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def fill(self) -> None:
        pages = self._connection.execute("PRAGMA page_count").fetchone()[0]
        self._connection.execute(f"PRAGMA max_page_count={pages}")

    def free(self) -> None:
        self._connection.execute("PRAGMA max_page_count=1000000")


def _file_of(connection: sqlite3.Connection) -> str:
    return str(connection.execute("PRAGMA database_list").fetchone()[2])


@pytest.fixture
def history(tmp_path: Path, connections: list[sqlite3.Connection]) -> Iterator[History]:
    with History(tmp_path / "conversations.db") as store:
        yield store


def words_of(view: Widget) -> str:
    """Return the text of a turn on screen, without its reasoning."""
    texts = [*view.query(GrowingText)]
    return texts[-1].source if texts else ""


class Driver:
    """A running app and its keyboard."""

    def __init__(self, app: ChatApp, pilot: Any) -> None:
        self.app = app
        self.pilot = pilot

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait until `what` holds, while the app continues to run.

        The limit is a number of event-loop turns, so a busy machine gets as many as an idle one.
        Raises TimeoutError after about a minute's turns of an idle machine.
        """
        for _ in range(MOST_TURNS):
            if what():
                return
            await self.pilot.pause()
        raise TimeoutError

    async def type(self, text: str) -> None:
        self.app.page.composer.insert(text)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def ask(self, text: str) -> None:
        """Type and send `text`, and wait for the complete answer."""
        await self.send(text)
        await self.until(lambda: not self.app.chat.answering)
        await self.pilot.pause()

    async def send(self, text: str) -> None:
        await self.type(text)
        await self.press("enter")

    def strips(self) -> list[Strip]:
        """Return the rows that the terminal shows, with their styles."""
        return self.app.screen._compositor.render_strips()

    def reversed(self) -> str:
        """Return the text that the terminal shows in reverse, such as a cursor without colour."""
        lines = self.strips()
        return "\n".join(
            "".join(s.text for s in line if s.style is not None and s.style.reverse)
            for line in lines
        )

    def screen(self) -> str:
        """Return the text that the terminal shows, line by line."""
        from rich.segment import Segment

        lines = self.strips()
        return "\n".join(
            "".join(s.text for s in Segment.strip_styles(line)).rstrip() for line in lines
        )


@pytest.fixture
def drive(
    server: ScriptedServer, history: History, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that runs `await play(driver)` against an app on the scripted server.

    Keyword arguments go to ChatApp.
    """
    monkeypatch.setenv("COLORTERM", "truecolor")

    def run(
        play: Callable[[Driver], Awaitable[None]],
        *,
        size: tuple[int, int] = (80, 24),
        toasts: bool = False,
        **options: Any,
    ) -> None:
        async def main() -> None:
            copy = options.pop("copy", lambda _: True)
            attached = tuple(options.pop("attach", ()))
            engine = options.pop("engine", None)
            base_url = options.pop("server_", server).base_url
            kept = options.pop("history_", history)
            async with ChatClient(base_url, engine=engine) as client:
                idle_after_s = options.pop("idle_after_s", None)
                app = ChatApp(
                    ChatOptions(client, kept, "scripted", attached=attached, **options), copy
                )
                app.chat.idle_after_s = idle_after_s
                async with app.run_test(size=size, notifications=toasts) as pilot:
                    await pilot.pause()
                    await play(Driver(app, pilot))

        asyncio.run(main())

    return run
