"""`localllm chat --inline` on terminals.

Each turn is in the scrollback exactly once, after any resizing. The cursor is in the input.
"""

from __future__ import annotations

import fcntl
import os
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from rich.cells import cell_len

from localllm.conversation.history import History
from tui.scripted_sse import Finish, Gate, Refuse, Say, ScriptedServer
from tui.test_chat_command import CHILD, Terminal

pytest.importorskip("prompt_toolkit")
WITHIN_S = 60.0


class Window(Protocol):
    """A terminal that runs the chat: its text with the scrollback, and the position of its
    cursor."""

    def lines(self) -> list[str]: ...
    def row(self) -> str: ...
    def column(self) -> int: ...
    def type(self, keys: str) -> None: ...
    def resize(self, columns: int, rows: int) -> None: ...
    def ended(self) -> bool: ...
    def pid(self) -> int: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class CuttingWindow:
    """A terminal like xterm, emulated by pyte: a narrower window cuts lines off."""

    def __init__(self, *args: str) -> None:
        pyte = pytest.importorskip("pyte")
        self._terminal = Terminal(*args, env={"TMUX": "", "TERM_PROGRAM": ""})
        self._screen = pyte.HistoryScreen(80, 24, history=1000, ratio=1)
        self._screen.write_process_input = self.type
        self._stream = pyte.ByteStream(self._screen)

    def _read(self) -> None:
        while select.select([self._terminal.master], [], [], 0.05)[0]:
            try:
                piece = os.read(self._terminal.master, 65536)
            except OSError:
                return
            self._terminal.seen += piece
            self._stream.feed(piece)

    def lines(self) -> list[str]:
        self._read()
        above = [
            "".join(line[x].data for x in range(self._screen.columns))
            for line in self._screen.history.top
        ]
        return [line.rstrip() for line in [*above, *self._screen.display]]

    def row(self) -> str:
        return str(self.lines()[len(self._screen.history.top) + self._screen.cursor.y])

    def column(self) -> int:
        self._read()
        return int(self._screen.cursor.x)

    def type(self, keys: str) -> None:
        self._terminal.type(keys)

    def resize(self, columns: int, rows: int) -> None:
        self._read()
        self._lower(rows)
        self._screen.resize(rows, columns)
        fcntl.ioctl(
            self._terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0)
        )
        os.kill(self._terminal.child.pid, signal.SIGWINCH)

    def _lower(self, rows: int) -> None:
        """Reduce the height like xterm.

        pyte would drop lines at the top. xterm drops those below the cursor, and then moves the
        top into the scrollback.
        """
        screen, cursor = self._screen, self._screen.cursor
        x, y, less = cursor.x, cursor.y, screen.lines - rows
        if less > 0:
            up = max(0, y - rows + 1)
            cursor.y = screen.lines - 1
            for _ in range(up):
                screen.index()
            cursor.y = 0
            screen.insert_lines(less)
            cursor.x, cursor.y = x, y - up

    def clear(self) -> None:
        self._screen.reset()

    def pid(self) -> int:
        return self._terminal.child.pid

    def ended(self) -> bool:
        self._read()
        return self._terminal.child.poll() is not None

    def close(self) -> None:
        self._terminal.child.kill()
        self._terminal.child.wait(30)
        os.close(self._terminal.master)


class ReflowingWindow:
    """A tmux terminal, which wraps lines again after resizing."""

    def __init__(self, *args: str) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("no tmux here")
        self._socket = f"localllm-test-{os.getpid()}-{time.monotonic_ns()}"
        kept = [f"{name}={os.environ[name]}" for name in os.environ if name.startswith("LOCALLLM_")]
        chat = shlex.join(["env", *kept, sys.executable, "-c", CHILD, *args])
        self._tmux(
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            "80",
            "-y",
            "24",
            f"{chat}; echo chat ended; sleep 600",
        )
        self._tmux("set", "-g", "window-size", "manual")

    def _tmux(self, *args: str) -> str:
        command = ["tmux", "-u", "-L", self._socket, *args]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=WITHIN_S
        ).stdout

    def lines(self) -> list[str]:
        return [
            line.rstrip()
            for line in self._tmux("capture-pane", "-p", "-J", "-S", "-1000").split("\n")
        ]

    def row(self) -> str:
        return self._tmux("capture-pane", "-p").split("\n")[int(self._cursor()[1])].rstrip()

    def column(self) -> int:
        return int(self._cursor()[0])

    def _cursor(self) -> list[str]:
        return self._tmux("list-panes", "-F", "#{cursor_x},#{cursor_y}").strip().split(",")

    def type(self, keys: str) -> None:
        sent = [f"{byte:02x}" for byte in keys.encode()]
        for start in range(0, len(sent), 1000):
            self._tmux("send-keys", "-H", *sent[start : start + 1000])

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def ended(self) -> bool:
        return any("chat ended" in line for line in self.lines())

    def clear(self) -> None:
        self._tmux("send-keys", "-R")

    def pid(self) -> int:
        shell = psutil.Process(int(self._tmux("list-panes", "-F", "#{pane_pid}")))
        return shell.children()[0].pid

    def close(self) -> None:
        self._tmux("kill-server")


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < end, "did not come about"
        select.select([], [], [], 0.02)


both = pytest.mark.parametrize(
    "window", [CuttingWindow, ReflowingWindow], ids=["xterm-like", "tmux"], indirect=True
)


@pytest.fixture
def window(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[Callable[..., Any]]:
    opened: list[Window] = []

    def open_one(*args: str) -> Window:
        how = () if "--plain" in args else ("--inline",)
        opened.append(getattr(request, "param", ReflowingWindow)(server.base_url, *how, *args))
        until(lambda: opened[-1].row() == ">")
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def said(window: Window) -> str:
    return "\n".join(window.lines())


@both
def test_each_turn_is_in_the_scrollback_once_after_any_resize(
    server: ScriptedServer, window: Callable[..., Window]
) -> None:
    gate = Gate()
    prose = [f"word{n} " for n in range(60)]
    code = ["\n\n```python\n", *(f"line{n} = {n}\n" for n in range(30)), "```\n\n"]
    server.play(Say(prose), Say(code), gate, Say(["the ", "end."]), Finish())
    server.answer("another answer")
    w = window()
    w.type("the first question\r")
    until(lambda: "line29 = 29" in said(w))
    for columns, rows in ((60, 24), (41, 24), (41, 12), (100, 30), (80, 24)):
        w.resize(columns, rows)
        until(lambda: w.row().startswith(">"))
    gate.opened.set()
    until(lambda: "the end." in said(w))
    w.type("half a question that is longer than a row of a narrow window, 日本語 in it")
    until(lambda: "in it" in said(w))
    for columns in (50, 33, 90, 80):
        w.resize(columns, 24)
        until(lambda: w.row().rstrip().endswith("in it"))
    assert said(w).replace("\n", " ").count("half a question") == 1
    w.type("\x03second question\r")
    until(lambda: "another answer" in said(w))
    w.type("\x04")
    until(w.ended)
    shown = said(w)
    words = [word for word in shown.split() if word.startswith("word")]
    cut = isinstance(w, CuttingWindow)  # it loses text beyond the narrowest width
    assert words == (
        [word.strip() for word in prose if word.strip() in words]
        if cut
        else [word.strip() for word in prose]
    )
    for once in (
        "> the first question",
        *(f"line{n} = " for n in range(30)),
        "the end.",
        "> second question",
        "another answer",
    ):
        assert shown.count(once) == 1, once
    assert "localllm chat --continue" in shown
    if cut:
        assert len(words) > 20
        return
    assert (
        shown.index("word59")
        < shown.index("line0 = ")
        < shown.index("the end.")
        < shown.index("> second question")
    )
    assert "half a question" not in shown


@both
def test_the_caret_is_after_wide_characters(window: Callable[..., Window]) -> None:
    w, typed = window(), "mixed 日本語 한국어 中文"
    w.type(typed)
    until(lambda: w.row() == f"> {typed}" and w.column() == 2 + cell_len(typed))
    w.type("\x1b[D")
    until(lambda: w.column() == 2 + cell_len(typed[:-1]))
    w.type("\x7f")
    until(lambda: w.row() == f"> {typed[:-2]}{typed[-1]}")


def test_commands_files_and_pastes_work_as_on_the_full_screen(
    server: ScriptedServer,
    window: Callable[..., Window],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "notes.txt").write_text("the secret is 7")
    monkeypatch.chdir(tmp_path)
    server.count = lambda text: len(text.split())
    server.answer("seven")
    w = window()
    w.type("/tit")
    until(lambda: "/title" in said(w) and "show or change the conversation's title" in said(w))
    w.type("\t")
    until(lambda: w.row() == "> /title")
    w.type("\x03what is in @no")
    until(lambda: "notes.txt" in said(w) and "tokens" in said(w))
    w.type("\r")
    until(lambda: "attached notes.txt" in said(w))
    w.type("\x1b[200~\nand\nwhy\x1b[201~\r")
    until(lambda: "seven" in said(w))
    assert server.requests[0]["messages"][0]["content"].endswith("what is in @notes.txt \nand\nwhy")
    assert "the secret is 7" in server.requests[0]["messages"][0]["content"]
    w.type("\x12what")  # Ctrl+R
    until(lambda: "I-search" in said(w))
    w.type("\r\x03/nosuch\r")
    until(lambda: "there is no command /nosuch" in said(w))


def test_keys_clear_the_input_stop_the_answer_and_quit(
    server: ScriptedServer, window: Callable[..., Window]
) -> None:
    gate = Gate()
    server.play(Say(["half an "]), gate, Finish())
    w = window()
    w.type("go on\r")
    until(lambda: "half an" in said(w))
    w.type("next")
    until(lambda: w.row() == "> next")
    w.type("\x03")
    until(lambda: w.row() == ">")
    assert "half an" in said(w)
    w.type("\x03")
    until(lambda: "stopped; /more continues it" in said(w))
    gate.opened.set()
    w.type("\x03")
    until(lambda: "Ctrl+C again quits" in said(w))
    w.type("\x03")
    until(w.ended)
    with History() as history:
        assert [m.content for m in history.messages(history.list()[0].id)] == ["go on", "half an "]


def test_a_resumed_chat_shows_its_input_again(window: Callable[..., Window]) -> None:
    w = window()
    w.type("half a question")
    until(lambda: w.row() == "> half a question")
    for sleep in (signal.SIGTSTP, signal.SIGSTOP):
        os.kill(w.pid(), sleep)
        until(lambda: psutil.Process(w.pid()).status() == psutil.STATUS_STOPPED)
        w.clear()
        os.kill(w.pid(), signal.SIGCONT)
        until(lambda: w.row() == "> half a question")
        w.type("!")
        until(lambda: w.row().endswith("!"))
        w.type("\x7f")
        until(lambda: w.row() == "> half a question")


def test_plain_mode_takes_a_paste_of_any_length_as_one_question(
    server: ScriptedServer, window: Callable[..., Window]
) -> None:
    server.answer("a long answer that goes on " * 5)
    w = window("--plain")
    pasted = "\n".join(["first", "x" * 6000, "", "/help", "last"])
    w.type(f"\x1b[200~{pasted}\x1b[201~")
    until(lambda: "last" in said(w))
    w.type("\r")
    until(lambda: said(w).replace("\n", " ").count("a long answer that goes on") == 5)
    assert [r["messages"][-1]["content"] for r in server.requests] == [pasted]
    assert not any(line.startswith("er that") for line in w.lines())
    w.type("\x04")
    until(lambda: "localllm chat --continue resumes it" in said(w))


def test_plain_mode_does_not_type_the_suspend_key(
    server: ScriptedServer, window: Callable[..., Window]
) -> None:
    """In plain mode Ctrl+Z is not written as a letter.

    The terminal of this test has no shell to return to, so the suspension itself is not tested.
    """
    server.answer("fine")
    w = window("--plain")
    until(lambda: w.row() == ">")
    w.type("half\x1a")
    w.type(" a question\r")
    until(lambda: "fine" in said(w))
    assert server.requests[0]["messages"][-1]["content"] == "half a question"


def test_plain_mode_resumes_below_the_last_turn_and_cuts_lists_to_the_width(
    server: ScriptedServer, window: Callable[..., Window]
) -> None:
    with History() as history:
        conv = history.create("rivers", "scripted")
        history.append(conv, "user", "which river?")
        meta = {"finish_reason": "stop"}
        history.append(conv, "assistant", "words that lead to the Danube " * 8, meta=meta)
    w = window("--plain", "--continue")
    until(lambda: "rivers: 2 turns" in said(w) and w.row() == ">")
    assert said(w).count("Danube") == 8
    w.type("/find danube\r")
    until(lambda: "number, or Enter" in said(w))
    listed = [line for line in w.lines() if line.startswith("  1  ")]
    assert [cell_len(line.rstrip()) <= 80 for line in listed] == [True]
    below = w.lines()[w.lines().index(listed[0]) + 1]
    assert below.startswith("number, or Enter")


def test_an_error_is_shown_and_the_chat_continues(
    server: ScriptedServer, window: Callable[..., Window]
) -> None:
    server.play(
        Refuse(
            400,
            {"message": "too many tokens", "code": "context_length_exceeded", "hint": "say less"},
        )
    )
    server.answer("better")
    w = window()
    w.type("x\r")
    until(lambda: "error: too many tokens" in said(w) and "/compact leaves out" in said(w))
    w.type("/retry\r")
    until(lambda: "better" in said(w))


def test_an_earlier_conversation_is_shown_and_continued(
    server: ScriptedServer, window: Callable[..., Window]
) -> None:
    with History() as history:
        conv = history.create("t", "scripted")
        for n in range(5):
            history.append(conv, "user", f"question {n}")
            history.append(conv, "assistant", f"answer {n}", meta={"finish_reason": "stop"})
    server.answer("more")
    w = window("--continue")
    until(lambda: "answer 4" in said(w))
    assert "4 earlier turns" in said(w)
    assert "answer 1" not in said(w)
    w.type("on\r")
    until(lambda: "more" in said(w).split("answer 4")[1])
    assert len(server.requests[0]["messages"]) == 11
