"""The chat without a screen: one answer streamed to stdout, or line by line with the same slash
commands."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

from rich.cells import cell_len

from localllm.conversation.history import StoredMessage
from localllm.errors import ContextLengthError, LocalLLMError
from localllm.plain_output import TerminalLine, raw_write
from localllm_tui.control import commands
from localllm_tui.control.answering import AnswerDisplay, AnswerStream, PendingAnswer
from localllm_tui.control.attachments import typed_in
from localllm_tui.control.chat import ChatController
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.face import Allowed, Face
from localllm_tui.control.formatting import elide, how_many
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import copy_with_tool, copyable, one_line, printable
from localllm_tui.control.wording import note_under

FOUND_SHOWN = 20


class LineFace(Face):
    """A chat on standard output and error; implements control.face.Face."""

    full_screen = False
    option = "--plain"
    after_error = ""

    def __init__(self, options: ChatOptions) -> None:
        self.chat = ChatController(options, self)

    def note(self, text: str) -> None:
        """Print a note that is not part of the conversation."""
        print(text, file=sys.stderr)

    def show(self, text: str) -> None:
        """Print a part of the conversation."""
        lines = WrappedLines(_columns(sys.stdout))
        print(lines.add(text) + lines.end())

    async def pick(self, rows: Sequence[str]) -> int | None:
        """Let the user pick one of the rows. Returns its index, or None."""
        columns = _columns(sys.stderr)
        for n, row in enumerate(rows, 1):
            line = f"{n:>3}  {one_line(row)}"
            if columns:
                line = elide(line, columns)
            self.note(line)
        try:
            picked = input("number, or Enter for none: ").strip()
        except EOFError:
            return None
        if picked.isdigit() and 1 <= int(picked) <= len(rows):
            return int(picked) - 1
        return None

    async def show_note(self, text: str, *, markdown: bool = False) -> None:
        self.note(text)

    async def show_error(self, error: LocalLLMError, next_steps: str = "") -> None:
        text = f"error: {error.message}"
        if error.hint:
            text += f"\nhint: {error.hint}"
        self.note(text + self.after_error)
        if next_steps and isinstance(error, ContextLengthError) and not self.chat.compacts:
            self.note("/compact leaves out the oldest messages and asks again")

    def notify(self, message: str, **_: Any) -> None:
        self.note(message)

    async def show_session(self, at: int, before: str | None) -> None:
        session = self.chat.session
        if session.turns:
            self.note(f"{printable(session.title)}: {len(session.turns)} turns")
            await self.redraw()

    async def redraw(self) -> None:
        if not self.chat.session.turns:
            return
        turn = self.chat.session.turns[-1]
        if turn.role == "assistant":
            self.show(printable(turn.content))
        else:
            self.show(printable(f"> {typed_in(turn)}"))

    async def show_answer(self, keep: PendingAnswer, *, again: bool) -> AnswerDisplay:
        return _Page(sys.stdout, sys.stderr)

    async def end_answer(
        self, shown: AnswerDisplay, stream: PendingAnswer, error: LocalLLMError | None
    ) -> None:
        if stream.turn is not None:
            shown.end(note_under(stream.turn))
        elif error is not None:
            shown.end("")
        else:
            shown.end("no answer: /retry asks again")

    async def _list(self, words: str) -> None:
        """List conversations; a number on the next line opens one."""
        history = self.chat.history
        found = history.list(words or None, limit=FOUND_SHOWN)
        if not found:
            self.note("nothing found")
            return
        picked = await self.pick([printable(summary.title) for summary in found])
        if picked is not None:
            await self.chat.open(Session(history, self.chat.model, conv_id=found[picked].id))

    async def _find(self, words: str) -> None:
        """List the turns with these words. The user picks turns to print, one after the other."""
        if not words:
            self.note("/find WORDS")
            return
        history = self.chat.history
        own = self.chat.session.id or ""
        hits = [hit for hit in history.search(words) if hit.conversation_id == own]
        self.note(how_many(len(hits), "turn"))
        rows = []
        for hit in hits[:FOUND_SHOWN]:
            who = "you" if hit.role == "user" else "answer"
            rows.append(f"{who}: {printable(hit.snippet)}")
        while rows:
            picked = await self.pick(rows)
            if picked is None:
                return
            turn = next(m for m in history.tree(own)[0] if m.id == hits[picked].message_id)
            self.show(printable(turn.content))

    async def approve(self, about: str, *said: str, tool: bool = False) -> Allowed:
        self.note("\n  ".join([f"{about}:", *map(printable, said)]))
        if await self.pick(["yes, and do not ask again in this chat", "no"]) == 0:
            return "always"
        return ""

    def edit(self, turn: StoredMessage) -> None:
        self.note(f"was: {printable(typed_in(turn))}\ntype the new text:")

    async def write(self, text: str) -> None:
        """Send the text: this chat can't put it into a line."""
        self.note(printable(f"> {text}"))
        await self.chat.send(text)

    def copy(self, text: str, name: str) -> None:
        clean, left_out = copyable(text)
        if copy_with_tool(clean):
            self.note(", ".join(filter(None, (f"copied {name}", left_out))))
        else:
            self.note("no clipboard tool is installed (pbcopy, wl-copy, xclip, xsel)")

    async def run_on_screen(self, name: str, argument: str) -> bool:
        command = commands.known(name)
        if name == "list":
            await self._list(argument)
            return True
        if name == "find":
            await self._find(argument)
            return True
        if command is None or command.plain:
            return False
        self.note(f"/{name} needs the full screen: start the chat without {self.option}")
        return True


def ask_once(
    client: ChatClient,
    model: str,
    messages: list[dict[str, str]],
    stream: AnswerStream,
) -> None:
    """Stream one answer to stdout, ending with a newline, into `stream`, which may keep it.
    Progress goes to stderr if that is a terminal. Raises LocalLLMError, or KeyboardInterrupt on
    Ctrl-C."""

    async def run() -> None:
        client.in_chat = False
        page = _Page(sys.stdout, sys.stderr)
        async with client:
            try:
                await stream.run(client.stream(model, messages), page)
            finally:
                page.end("")
        if stream.reason == "length":
            print("note: the answer was cut at the token limit", file=sys.stderr)
        n = stream.meter.left_out
        if n:
            print(
                f"note: the {n} oldest messages were left out, because of the context size",
                file=sys.stderr,
            )

    asyncio.run(run())


def run_line_chat(options: ChatOptions) -> Session:
    """Read questions and print answers line by line, until end of input. Returns the current
    conversation.

    Ctrl-C stops an answer. Without a running answer it ends the chat.
    """
    print(
        f"{options.model}: an empty line is skipped, /help lists the commands, Ctrl-D quits",
        file=sys.stderr,
    )
    chat = LineFace(options).chat
    asyncio.run(chat.face.show_session(0, None))
    read = _reader()
    while not chat.left:
        try:
            line = read().strip()
        except EOFError:
            print()
            break
        if line:
            asyncio.run(_run_line(chat, line))
    return chat.session


async def _run_line(chat: ChatController, line: str) -> None:
    """Do what was typed, to the end of the answer."""
    async with chat.client:
        await commands.submit(chat, line)
        await chat.answered()
        await chat.compared()


def _reader() -> Callable[[], str]:
    """Reads a line, or all the lines that were pasted at once, up to the Enter after them; raises
    EOFError."""
    if TerminalLine.adds_lines:
        return partial(input, "You: ")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return partial(input, "> ")
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # not every terminal answers
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession("> ", enable_suspend=True)

    def read() -> str:
        return str(session.prompt())

    return read


def _columns(out: TextIO) -> int:
    """Cells of a line on a terminal; 0 elsewhere, and for a screen reader, which wraps lines itself."""
    if out.isatty() and not TerminalLine.adds_lines:
        return shutil.get_terminal_size().columns
    return 0


class WrappedLines:
    """Streamed text, wrapped between words at `columns` cells (0: not wrapped)."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._at = 0
        self._word = ""  # its end has not arrived yet

    def add(self, text: str) -> str:
        """Returns the text that can be written now: without the last word until it is complete, or
        as long as a line."""
        if not self._columns:
            return text
        *complete, self._word = re.split(r"(\s)", self._word + text)
        written = "".join(self._placed(piece) for piece in complete)
        if cell_len(self._word) >= self._columns:
            written += self.end()
        return written

    def end(self) -> str:
        """Returns the last word."""
        word = self._word
        self._word = ""
        return self._placed(word)

    def _placed(self, piece: str) -> str:
        cells = cell_len(piece)
        if piece == "\n":
            self._at = 0
        elif piece.isspace() and self._at + cells >= self._columns:
            self._at = 0
            piece = "\n"
        elif self._at and self._at + cells > self._columns:
            self._at = cells % self._columns
            piece = "\n" + piece
        elif cells > self._columns:
            self._at = (self._at + cells) % self._columns
        else:
            self._at += cells
        return piece


class _Page(AnswerDisplay):
    """An answer on a text stream. On a terminal, progress is one line, which the next report or the
    answer overwrites."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._status = TerminalLine(err)
        # A file or a pipe gets the model's text unchanged. For a terminal, control characters are
        # removed.
        self._shown = printable if out.isatty() else str
        self._write = raw_write(out)
        self._ends_line = True
        self._names_speaker = TerminalLine.adds_lines and out.isatty()
        self._lines = WrappedLines(_columns(out))

    def feed(self, text: str = "", reasoning: str = "") -> None:
        if reasoning:
            self.progress("thinking…")
        if text:
            self.progress("")
            if self._names_speaker:
                self._write("Answer:\n")
                self._names_speaker = False
            self._write(self._lines.add(self._shown(text)))
            self._out.flush()
            self._ends_line = text.endswith("\n")

    def progress(self, name: str) -> None:
        self._status.show(name)

    def end(self, note: str) -> None:
        self.progress("")
        self._write(self._lines.end())
        if not self._ends_line:
            self._out.write("\n")
            self._out.flush()
        if note:
            print(f"({note})", file=sys.stderr)
