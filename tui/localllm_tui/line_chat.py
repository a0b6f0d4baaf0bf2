"""The chat without a screen: one answer streamed to stdout, or line by line with the same slash commands."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TextIO

from rich.cells import cell_len

from localllm.conversation.history import History, StoredMessage
from localllm.errors import ContextLengthError, LocalLLMError
from localllm.plain_output import obeyed
from localllm_tui.control import commands
from localllm_tui.control.answering import AnswerStream
from localllm_tui.control.attachments import typed_in
from localllm_tui.control.client import ChatClient, ListedModel
from localllm_tui.control.session import PendingAnswer, Session
from localllm_tui.control.terminal import copy_with_tool, printable

FOUND_SHOWN = 20


class LineChat:
    """A chat on standard output and error. An answer that was asked for is `pending`: the caller prints it."""

    def __init__(
        self, client: ChatClient, model: str, session: Session, copy: Callable[[str], bool] = copy_with_tool
    ) -> None:
        self.client = client
        self.model = model
        self.session = session
        self.history: History = session.history
        self.n_ctx: int | None = None
        self.system_asked: str | None = session.system or None
        self.attached: list[tuple[str, str]] = []
        self.answering = self.runs_commands = False
        self.answer_text = ""
        self.pending: PendingAnswer | None = None
        self.left = False
        self._copy = copy
        self._editing: StoredMessage | None = None

    async def ask(self, text: str) -> None:
        """Store a question, or what changes a turn, and want an answer."""
        editing, self._editing = self._editing, None
        if editing is not None and editing.role == "assistant":
            self.session.change_answer(editing, text)
            return
        self.session.ask(text, self.attached, instead=editing)
        self.attached = []
        self.pending = self.session.answer()

    def tell(self, text: str) -> None:
        """Print what is no part of the conversation."""
        print(text, file=sys.stderr)

    def show(self, text: str) -> None:
        """Print a part of the conversation."""
        print(text)

    async def pick(self, rows: Sequence[str]) -> int | None:
        """Let the user pick one of these; None for none of them."""
        for n, row in enumerate(rows, 1):
            self.tell(f"{n:>3}  {row}")
        try:
            picked = input("number, or Enter for none: ").strip()
        except EOFError:
            return None
        return int(picked) - 1 if picked.isdigit() and 1 <= int(picked) <= len(rows) else None

    async def say(self, text: str, *, markdown: bool = False) -> None:
        self.tell(text)

    async def open(self, session: Session, at: int = 0) -> None:
        self.session, self._editing = session, None
        if session.turns:
            await self.say(f"{printable(session.title)}: {len(session.turns)} turns")
            await self.redraw()

    async def choose(self, words: str, *, within: bool = False) -> None:
        """List what was found; a number on the next line opens it. `within`: what was found here is listed alone."""
        if within:
            hits = [h for h in self.history.search(words) if h.conversation_id == self.session.id] if words else []
            for hit in hits[:FOUND_SHOWN]:
                self.tell(f"  {'you' if hit.role == 'user' else 'answer'}: {printable(hit.snippet)}")
            self.tell(f"{len(hits)} turns" if words else "/find WORDS")
            return
        found = self.history.list(words or None, limit=FOUND_SHOWN)
        if not found:
            self.tell("nothing found")
            return
        picked = await self.pick([printable(summary.title) for summary in found])
        if picked is not None:
            await self.open(Session(self.history, self.model, conv_id=found[picked].id))

    async def stop_answer(self) -> bool:
        """Nothing runs while a command is typed."""
        return False

    async def answer_again(self, to: StoredMessage | None = None, *, continues: bool = False, model: str = "") -> None:
        self.pending = self.session.answer(to, continues=continues, model=model)

    async def write(self, text: str) -> None:
        self.tell(f"> {printable(text)}")
        await self.ask(text)

    async def approve(self, about: str, what: str) -> bool:
        self.tell(f"{about}:\n  {printable(what)}")
        return await self.pick(["yes, and do not ask again in this chat", "no"]) == 0

    async def redraw(self) -> None:
        if self.session.turns:
            turn = self.session.turns[-1]
            self.show(printable(turn.content if turn.role == "assistant" else f"> {typed_in(turn)}"))

    def edit(self, turn: StoredMessage) -> None:
        """The next line stands beside `turn`."""
        self._editing = turn
        self.tell(f"was: {printable(typed_in(turn))}\ntype it anew:")

    def attach(self, name: str, text: str) -> None:
        self.attached.append((name, text))
        self.tell(f"attached {printable(name)}: it goes with the next question")

    def detach(self) -> None:
        self.attached = []

    def use_model(self, name: str, models: list[ListedModel]) -> None:
        self.model = self.session.model = name
        self.n_ctx = next((m.n_ctx for m in models if m.name == name), None)

    def to_clipboard(self, text: str, what: str) -> None:
        done = self._copy(text)
        said = f"copied {what}" if done else "this machine has no tool that takes a copy (pbcopy, wl-copy, xclip, xsel)"
        self.tell(said)

    async def leave(self) -> None:
        self.left = True


async def answer_to(
    out: TextIO,
    err: TextIO,
    client: ChatClient,
    model: str,
    messages: list[dict[str, str]],
    keep: PendingAnswer | None = None,
    *,
    compact: bool = False,
) -> None:
    """Stream the answer to `messages` to `out`, ending with a newline; progress goes to `err` if it is a terminal.

    `keep` stores it as it comes. However it ends, what was printed is kept. Raises LocalLLMError.
    """
    answering = AnswerStream(keep)
    page = _Page(out, err)
    continues = keep is not None and keep.continues
    try:
        await answering.run(client.stream(model, messages, compact=compact, continues=continues), page)
    finally:
        page.end()
    if answering.reason == "length":
        print("note: the answer was cut at the token limit", file=err)
    if answering.meter.left_out:
        print(f"note: the {answering.meter.left_out} oldest messages were left out to fit the context", file=err)


def ask_once(
    client: ChatClient,
    model: str,
    messages: list[dict[str, str]],
    keep: PendingAnswer | None = None,
    *,
    compact: bool = False,
) -> None:
    """Print one answer to stdout. Raises LocalLLMError, or KeyboardInterrupt on Ctrl-C."""

    async def run() -> None:
        async with client:
            await answer_to(sys.stdout, sys.stderr, client, model, messages, keep, compact=compact)

    asyncio.run(run())


def talk(client: ChatClient, model: str, session: Session, attached: Sequence[tuple[str, str]] = ()) -> Session:
    """Ask and answer line by line until end of input; returns the conversation of then. `attached` go with the first question.
    Ctrl-C stops an answer, and leaves when there is none."""
    print(f"{model}: an empty line is skipped, /help lists the commands, Ctrl-D leaves", file=sys.stderr)
    chat = LineChat(client, model, session)
    chat.attached = list(attached)
    read = _reader()
    while not chat.left:
        try:
            line = read().strip()
        except EOFError:
            print()
            break
        command = commands.parse(line)
        if command is not None:
            _run_and_report(client, _run_command(chat, *command))
        elif line:
            _run_and_report(client, chat.ask(commands.question(line)))
        while chat.pending is not None and not chat.left:
            keep, chat.pending = chat.pending, None
            _answer(chat, keep)
    return chat.session


def _reader() -> Callable[[], str]:
    """Reads a line, or all the lines that were pasted at once, up to the Enter after them; raises EOFError."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return lambda: input("> ")
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # not every terminal answers
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession("> ")
    return lambda: str(session.prompt())


async def _run_command(chat: LineChat, name: str, argument: str) -> None:
    if commands.needs_screen(name):
        await chat.say(f"/{name} needs the screen: start the chat without --plain")
        return
    await commands.run(chat, name, argument)


def _run_and_report(client: ChatClient, what: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        async with client:
            await what

    try:
        asyncio.run(run())
    except LocalLLMError as e:
        _say_error(e)


def _answer(chat: LineChat, keep: PendingAnswer) -> None:
    compacts = chat.client.compacts or chat.session.compacts
    try:
        ask_once(chat.client, keep.model, keep.messages, keep, compact=compacts)
    except KeyboardInterrupt:
        print("(stopped; /more goes on)", file=sys.stderr)
    except LocalLLMError as e:
        _say_error(e)
        if chat.session.unanswered:
            chat.session.fail_question()
        if isinstance(e, ContextLengthError) and not compacts:
            print("/compact leaves out the oldest messages and asks again", file=sys.stderr)


def _say_error(e: LocalLLMError) -> None:
    print(f"error: {e.message}" + (f"\nhint: {e.hint}" if e.hint else ""), file=sys.stderr)


class WrappedLines:
    """Text that comes in pieces, broken between words at `columns` cells; 0: nowhere."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._at = 0
        self._word = ""  # its end has not come yet

    def add(self, text: str) -> str:
        """What can be written now; a word waits until it is whole, or as long as a line."""
        if not self._columns:
            return text
        *whole, self._word = re.split(r"(\s)", self._word + text)
        written = "".join(self._placed(piece) for piece in whole)
        if cell_len(self._word) >= self._columns:
            written += self.rest()
        return written

    def rest(self) -> str:
        """The word that was waited for."""
        word, self._word = self._word, ""
        return self._placed(word)

    def _placed(self, piece: str) -> str:
        cells = cell_len(piece)
        if piece == "\n":
            self._at = 0
        elif piece.isspace() and self._at + cells >= self._columns:
            self._at, piece = 0, "\n"
        elif self._at and self._at + cells > self._columns:
            self._at, piece = cells % self._columns, "\n" + piece
        else:
            self._at = (self._at + cells) % self._columns if cells > self._columns else self._at + cells
        return piece


class _Page:
    """An answer on a stream of text. Progress is one line on a terminal that the next one, or the answer, replaces."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err if err.isatty() else None
        # Bytes of the model's own for a file or a pipe; a terminal would obey its control characters.
        self._shown = printable if out.isatty() else str
        self._write = obeyed(out)
        self._said = ""
        self._ends_line = True
        self._lines = WrappedLines(shutil.get_terminal_size().columns if out.isatty() else 0)

    def feed(self, text: str = "", reasoning: str = "") -> None:
        if reasoning:
            self.progress("thinking…")
        if text:
            self.progress("")
            self._write(self._lines.add(self._shown(text)))
            self._out.flush()
            self._ends_line = text.endswith("\n")

    def progress(self, what: str) -> None:
        if self._err is not None and what != self._said:
            obeyed(self._err)("\r\x1b[K")
            self._err.write(what)
            self._err.flush()
            self._said = what

    def end(self) -> None:
        self.progress("")
        self._write(self._lines.rest())
        if not self._ends_line:
            self._out.write("\n")
            self._out.flush()
