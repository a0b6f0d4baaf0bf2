"""The chat without a screen: one answer streamed to stdout, or line by line for terminals that can do no more."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import TextIO

from localllm.errors import ContextLengthError, LocalLLMError
from localllm_tui.control import commands
from localllm_tui.control.answering import Answering
from localllm_tui.control.client import ChatClient
from localllm_tui.control.session import Answer, Session
from localllm_tui.control.terminal import printable


async def answer_to(
    out: TextIO,
    err: TextIO,
    client: ChatClient,
    model: str,
    messages: list[dict[str, str]],
    keep: Answer | None = None,
    *,
    compact: bool = False,
) -> None:
    """Stream the answer to `messages` to `out`, ending with a newline; progress goes to `err` if it is a terminal.

    `keep` stores it as it comes. However it ends, what was printed is kept. Raises LocalLLMError.
    """
    answering = Answering(keep)
    page = _Page(out, err)
    try:
        await answering.run(client.stream(model, messages, compact=compact), page)
    finally:
        page.end()
    if answering.reason == "length":
        print("note: the answer was cut at the token limit", file=err)
    if answering.meter.left_out:
        print(f"note: the {answering.meter.left_out} oldest messages were left out to fit the context", file=err)


def ask_once(
    client: ChatClient, model: str, messages: list[dict[str, str]], keep: Answer | None = None, *, compact: bool = False
) -> None:
    """Print one answer to stdout. Raises LocalLLMError, or KeyboardInterrupt on Ctrl-C."""

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? and not a traceback

    async def run() -> None:
        async with client:
            await answer_to(sys.stdout, sys.stderr, client, model, messages, keep, compact=compact)

    asyncio.run(run())


def talk(client: ChatClient, model: str, session: Session) -> None:
    """Ask and answer line by line until end of input. Ctrl-C stops an answer, and leaves when there is none."""
    print(f"{model}: an empty line is skipped, /new starts afresh, Ctrl-D leaves", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        command = commands.parse(line)
        if command == ("quit", ""):
            return
        if command == ("new", ""):
            session = Session(session.history, model, system=session.system)
        elif command == ("compact", "") and session.id is not None:
            session.set_compacts(True)
            print("the oldest messages are left out once not all fit; all of them stay on disk", file=sys.stderr)
            if session.dialogue[-1].role == "user":
                _answer(client, model, session)
        elif command is not None:
            print(f"here only {_known()} work; without --plain the chat has more", file=sys.stderr)
        elif line:
            session.ask(commands.question(line))
            _answer(client, model, session)


def _known() -> str:
    """The commands there are here, in words."""
    *names, last = (f"/{c.name}" for c in commands.COMMANDS if c.plain)
    return f"{', '.join(names)} and {last}"


def _answer(client: ChatClient, model: str, session: Session) -> None:
    """Answer the last question; what goes wrong is printed."""
    compacts = client.compacts or session.compacts
    try:
        ask_once(client, model, session.payload(), session.answer(), compact=compacts)
    except KeyboardInterrupt:
        print("(stopped)", file=sys.stderr)
    except LocalLLMError as e:
        print(f"error: {e.message}" + (f"\nhint: {e.hint}" if e.hint else ""), file=sys.stderr)
        if isinstance(e, ContextLengthError) and not compacts:
            print("/compact leaves out the oldest messages and asks again", file=sys.stderr)


class _Page:
    """An answer on a stream of text. Progress is one line on a terminal that the next one, or the answer, replaces."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err if err.isatty() else None
        # Bytes of the model's own for a file or a pipe; a terminal would obey its control characters.
        self._shown = printable if out.isatty() else str
        self._said = ""
        self._ends_line = True

    def feed(self, text: str = "", reasoning: str = "") -> None:
        if reasoning:
            self.progress("thinking…")
        if text:
            self.progress("")
            self._out.write(self._shown(text))
            self._out.flush()
            self._ends_line = text.endswith("\n")

    def progress(self, what: str) -> None:
        if self._err is not None and what != self._said:
            self._err.write(f"\r\x1b[K{what}")
            self._err.flush()
            self._said = what

    def end(self) -> None:
        """The answer is over: end its last line."""
        self.progress("")
        if not self._ends_line:
            self._out.write("\n")
            self._out.flush()
