"""`localllm chat` as a command: answers on stdout, pipes, Ctrl-C, kill -9, and a real terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from localllm import paths
from localllm.cli.commands.chat import FIRST_QUESTION, chat
from localllm.conversation.history import History
from localllm.errors import BusyError, LocalLLMError, NotFoundError, UsageError
from support.until import until
from tui.scripted_sse import Finish, Gate, Raw, Refuse, Say, ScriptedServer, UntilGone

# The program of a child process: `localllm chat` against a scripted server.
CHILD = """
import signal, sys, typer
# A test run in the background may have been started with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
url = sys.argv.pop(1)
from localllm.cli.commands.chat import chat
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(chat)
app([*sys.argv[1:], "--url", url])
"""


@pytest.fixture
def served(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Replace the chat's own engine by the scripted server.

    The returned list collects the MODEL arguments of each new engine.
    """
    import localllm.cli.chat.own_server
    from localllm_tui.control.interfaces import EngineProgress

    asked: list[str | None] = []

    class Engine:
        model, api_key, unix_socket, where, ours = "scripted", None, "", "", True
        base_url = server.base_url

        def __init__(self, model: str | None, settings: object) -> None:
            asked.append(model)

        def start(self) -> None:
            pass

        def wait(self, timeout_s: float | None = None) -> bool:
            return True

        def progress(self) -> EngineProgress:
            return EngineProgress()

        def stop(self) -> None:
            pass

    monkeypatch.setattr(localllm.cli.chat.own_server, "OwnEngine", Engine)
    return asked


def run(*args: str, piped: str | bytes = "") -> Any:
    app = typer.Typer()
    app.command()(chat)
    result = CliRunner().invoke(app, list(args), input=piped)
    if isinstance(result.exception, LocalLLMError):
        raise result.exception
    return result


def question(server: ScriptedServer) -> str:
    return str(server.requests[-1]["messages"][-1]["content"])


def test_a_prompt_is_answered_on_stdout(server: ScriptedServer, served: list[str | None]) -> None:
    server.play(Say(["thinking"], field="reasoning_content"), Say(["Par", "is"]), Finish())
    result = run(
        "capital of France?", "-m", "m", "--system", "Be brief", "--temperature", "0", "--seed", "1"
    )
    assert (result.exit_code, result.stdout) == (0, "Paris\n")
    assert served == ["m"]
    sent = server.requests[0]
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "capital of France?"},
    ]
    assert (sent["temperature"], sent["seed"]) == (0, 1)
    assert "max_tokens" not in sent
    # one answer on stdout writes no files
    assert not Path(os.environ["LOCALLLM_DATA_DIR"]).exists()


def test_piped_text_is_the_question(server: ScriptedServer, served: list[str | None]) -> None:
    server.answer("x")
    assert run(piped="what is 6 × 7?\n").exit_code == 0
    assert question(server) == "what is 6 × 7?"


def test_piped_text_goes_before_the_prompt(
    server: ScriptedServer, served: list[str | None]
) -> None:
    server.answer("x")
    run("Summarise this", piped="a long text\n")
    assert question(server) == "a long text\n\nSummarise this"


def test_without_a_terminal_and_a_question_the_default_question_is_sent(
    server: ScriptedServer, served: list[str | None]
) -> None:
    server.answer("Hello!")
    result = run(piped="")
    assert (result.exit_code, result.stdout) == (0, "Hello!\n")
    assert question(server) == FIRST_QUESTION


def test_an_attached_file_is_sent_with_the_question(
    server: ScriptedServer, served: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "n.txt").write_text("seven")
    server.answer("x")
    run("which number?", "--attach", str(tmp_path / "n.txt"))
    assert question(server) == "File n.txt:\n```txt\nseven\n```\n\nwhich number?"


def test_the_text_files_of_an_attached_folder_are_sent_with_the_question(
    server: ScriptedServer, served: list[str | None], tmp_path: Path
) -> None:
    folder = tmp_path / "Ordner mit Ümlaut"
    (folder / "sub").mkdir(parents=True)
    (folder / "n.txt").write_text("seven")
    (folder / "sub" / "m.md").write_text("eight")
    (folder / "x.bin").write_bytes(b"\0\1\2")
    server.answer("x")
    result = run("which numbers?", "--attach", str(folder))
    asked = question(server)
    assert [f"File {folder.name}/n.txt" in asked, f"File {folder.name}/sub/m.md" in asked] == [
        True,
        True,
    ]
    assert "x.bin" not in asked
    assert "1 of 3 files are skipped" in result.stderr


@pytest.mark.parametrize(
    ("args", "piped", "why"),
    [
        (["q", "--attach", "/nowhere.txt"], "", "can't be read"),
        (["--attach", __file__], "", "needs a question"),
        ([], b"\xff\xfe", "not UTF-8"),
    ],
)
def test_wrong_usage_is_an_error_before_a_model_is_loaded(
    served: list[str | None], args: list[str], piped: str | bytes, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        run(*args, piped=piped)
    assert served == []


def test_a_server_error_ends_the_command_with_that_error(
    server: ScriptedServer, served: list[str | None]
) -> None:
    server.play(Refuse(503, {"message": "busy", "code": "server_busy"}))
    with pytest.raises(BusyError):
        run("q")


def test_text_before_an_error_is_printed(server: ScriptedServer, served: list[str | None]) -> None:
    server.play(
        Say(["so far"]), Raw(b'data: {"error": {"message": "died", "code": "worker_died"}}\n\n')
    )
    command = [sys.executable, "-c", CHILD, server.base_url, "q"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "so far\n"
    assert done.returncode != 0
    assert "died" in done.stderr


def test_continue_resumes_the_last_conversation(
    server: ScriptedServer, served: list[str | None]
) -> None:
    with History() as history:
        conv = history.create("t", "their-model")
        history.append(conv, "user", "a")
        history.append(conv, "assistant", "b")
    server.answer("d")
    run("c", "--continue")
    assert served == ["their-model"]
    assert [m["content"] for m in server.requests[0]["messages"]] == ["a", "b", "c"]
    with History() as history:
        assert [m.content for m in history.messages(conv)] == ["a", "b", "c", "d"]


def test_continue_without_a_conversation_is_an_error(served: list[str | None]) -> None:
    with pytest.raises(NotFoundError):
        run("c", "--continue")
    assert served == []


def test_ctrl_c_exits_130_with_the_text_so_far(server: ScriptedServer) -> None:
    until_gone = UntilGone()
    server.play(Say(["so far"]), until_gone)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, server.base_url, "q"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(6) == b"so far"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, b"\n", b"")
    assert until_gone.gone.wait(60)


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = (
        "import sys, typer; had = set(sys.modules); import localllm.cli.commands.chat, "
        "localllm_tui; "
    )
    code += (
        "print(*sorted({'textual', 'httpx', 'sqlite3', 'llama_cpp', 'asyncio'} & "
        "(set(sys.modules) - had)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


pty = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")


class Terminal:
    """`localllm chat` in a child process on its own terminal of 80×24."""

    def __init__(self, *args: str, env: dict[str, str]) -> None:
        import fcntl
        import struct
        import termios

        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **env},
        )
        os.close(slave)
        self.seen = b""

    def until(self, text: str) -> None:
        """Read until `text` was printed. If it never is, the test's own timeout applies."""
        while text.encode() not in self.seen:
            self.seen += os.read(self.master, 65536)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def rest(self) -> int:
        """Read to the end and return the exit code."""
        try:
            while piece := os.read(self.master, 65536):
                self.seen += piece
        except OSError:  # Linux's error if the other end closed
            pass
        return self.child.wait(30)


@pytest.fixture
def terminal(server: ScriptedServer) -> Iterator[Callable[..., Terminal]]:
    """Return a function that opens the chat on its own terminal.

    Chats that a failing test leaves running are killed.
    """
    opened: list[Terminal] = []

    def open_one(*args: str, **env: str) -> Terminal:
        opened.append(Terminal(server.base_url, *args, env=env))
        return opened[-1]

    yield open_one
    for one in opened:
        one.child.kill()
        one.child.wait(30)
        os.close(one.master)


@pty
def test_on_a_terminal_the_screen_opens_and_the_conversation_is_kept(
    server: ScriptedServer, terminal: Callable[..., Terminal]
) -> None:
    server.answer("Bonjour")
    first = terminal()
    first.until("Enter sends")
    first.type("hello in French\r")
    first.until("Bonjour")
    first.type("\x11")  # Ctrl+Q
    assert first.rest() == 0
    assert b"\x1b[?1049l" in first.seen  # the terminal is restored
    again = terminal("--continue")
    again.until("Bonjour")
    again.type("\x11")
    assert again.rest() == 0


@pty
def test_in_screen_reader_mode_lines_are_only_added(
    server: ScriptedServer, terminal: Callable[..., Terminal]
) -> None:
    server.play(
        Say(["hm"], "reasoning_content"),
        Say(["Bonjour, ", "and a line that is longer " * 8]),
        Finish(),
    )
    chat = terminal("--screen-reader")
    chat.until("You: ")
    chat.type("hello in French\r")
    chat.until("You: hello in French")
    chat.until("thinking…\r\nAnswer:\r\nBonjour, and a line" + " that is longer and a line" * 7)
    chat.until("You: ")
    chat.type("\x04")  # Ctrl+D
    assert chat.rest() == 0
    assert b"\x1b[" not in chat.seen.replace(b"\x1b[?2004h", b"").replace(b"\x1b[?2004l", b"")


@pty
def test_a_paste_with_escapes_and_invalid_bytes_is_one_question(
    server: ScriptedServer, terminal: Callable[..., Terminal]
) -> None:
    server.answer("Bonjour")
    chat = terminal()
    chat.until("Enter sends")
    pasted = b"log \x1b[31mERROR\x1b[0m \xff\x11\x04 line 3\nnext line"
    os.write(chat.master, b"\x1b[200~" + pasted + b"\x1b[201~\r")
    chat.until("Bonjour")
    chat.type("\x11")
    assert chat.rest() == 0
    sent = server.requests[0]["messages"][0]["content"]
    assert sent == "log [31mERROR[0m \ufffd line 3\nnext line"


def drafts() -> list[str]:
    """Return the saved drafts of messages that were not sent."""
    return [file.read_text() for file in (paths.data_dir() / "drafts").glob("*.txt")]


@pty
def test_kill_9_in_mid_answer_loses_nothing_that_was_shown(
    server: ScriptedServer, terminal: Callable[..., Terminal]
) -> None:
    gate = Gate()
    server.play(Say(["the first half"]), gate, Finish())
    chat_ = terminal()
    chat_.until("Enter sends")
    chat_.type("tell me\r")
    chat_.until("first half")
    chat_.type("a draft")
    until(lambda: "a draft" in drafts(), "what is typed is not saved")
    os.kill(chat_.child.pid, signal.SIGKILL)
    assert chat_.rest() == -signal.SIGKILL
    gate.opened.set()
    with History() as history:
        (conv,) = history.list()
        said = [(m.role, m.content, m.complete) for m in history.messages(conv.id)]
    assert said == [("user", "tell me", True), ("assistant", "the first half", False)]
    again = terminal("--continue")
    again.until("the first half")
    again.until("the chat ended before")
    again.until("a draft")
    again.type("\x11")
    assert again.rest() == 0


@pty
def test_a_closed_terminal_ends_the_chat_with_the_answer_kept(
    server: ScriptedServer, terminal: Callable[..., Terminal]
) -> None:
    until_gone = UntilGone()
    server.play(Say(["half"]), until_gone)
    chat_ = terminal()
    chat_.until("Enter sends")
    chat_.type("q\r")
    chat_.until("half")
    chat_.child.send_signal(signal.SIGHUP)
    assert chat_.rest() == 0
    with History() as history:
        assert history.messages(history.list()[0].id)[1].meta["finish_reason"] == "stopped"


@pty
def test_no_colour_is_printed_with_no_color_set(
    server: ScriptedServer, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hues(chat_: Terminal) -> list[tuple[int, int, int]]:
        chat_.until("Enter sends")
        chat_.type("\x11")
        assert chat_.rest() == 0
        return [c for c in _colours(chat_.seen) if len(set(c)) > 1]

    assert hues(terminal(NO_COLOR="1")) == []
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert hues(terminal())


@pty
def test_a_dumb_terminal_gets_a_line_based_chat(
    server: ScriptedServer, terminal: Callable[..., Terminal]
) -> None:
    server.answer("one\x1b[2J")
    server.answer("two")
    chat_ = terminal(TERM="dumb")
    chat_.until("> ")
    chat_.type("first\n")
    chat_.until("one[2J")
    chat_.type("second\n")
    chat_.until("two")
    chat_.type("\x04")
    assert chat_.rest() == 0
    assert [m["content"] for m in server.requests[1]["messages"]] == [
        "first",
        "one\x1b[2J",
        "second",
    ]


def _colours(output: bytes) -> list[tuple[int, int, int]]:
    """Return all colours in the SGR sequences as (r, g, b).

    They are 24-bit colours and entries of the 216-colour cube.
    """
    import re

    found = []
    for r, g, b in re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)", output):
        found.append((int(r), int(g), int(b)))
    for n in re.findall(rb"[34]8;5;(\d+)", output):
        if 16 <= int(n) <= 231:
            cube = int(n) - 16
            found.append((cube // 36, cube // 6 % 6, cube % 6))
    return found
