"""`localllm chat --inline`: questions are typed below while answers go into the terminal's own
scrollback."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from localllm.conversation.history import StoredMessage
from localllm_tui.control import commands
from localllm_tui.control.answering import AnswerDisplay, PendingAnswer
from localllm_tui.control.attachments import files_and_folders, names_like, typed_in
from localllm_tui.control.chat import QUIT_WITHIN_S
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.meter import file_cost
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import (
    on_signals,
    one_line,
    printable,
    reflows_lines,
    typed_text,
)
from localllm_tui.control.wording import note_under
from localllm_tui.inline.page import InlinePage, Offer
from localllm_tui.line_chat import LineFace
from localllm_tui.widgets.code import palette
from localllm_tui.widgets.markdown import MarkdownRows

# Turns shown of an opened conversation. The full screen shows all.
TURNS_SHOWN = 6
PROSE_COLUMNS = 100
_FILES_OFFERED = 50
_EARLIER_QUESTIONS = 200
# The terminal's own colours, which fit any background.
_COLOURS = {"primary": "ansi_blue", "text-primary": "ansi_blue", "text-accent": "ansi_magenta",
    "text-success": "ansi_green",
            "text-warning": "ansi_yellow", "text-error": "ansi_red",
            "text-secondary": "ansi_cyan"}  # fmt: skip
_AT = re.compile(r"(?:^|\s)@(\S*)$")


class InlineAnswer(AnswerDisplay):
    """An answer while it streams: finished blocks are written to the scrollback, the last block is
    drawn above the input."""

    def __init__(self, page: InlinePage, look: Console) -> None:
        self._page = page
        self._look = look
        # kept, because written lines are not laid out again
        self._width = max(20, min(PROSE_COLUMNS, page.columns - 1))
        self._rows = MarkdownRows()
        self._written = 0

    def feed(self, text: str = "", reasoning: str = "") -> None:
        if reasoning and not self._rows.source:
            self.progress("thinking…")
        if not text:
            return
        self._rows.add(printable(text))
        rows = self._rows.at(self._width)
        if self._rows.finished > self._written:
            self._page.write(self._drawn(self._written, self._rows.finished))
            self._written = self._rows.finished
        self._page.tail = self._drawn(self._written, len(rows))
        self._page.changed()

    def progress(self, text: str) -> None:
        if not self._rows.source:
            self._page.tail = text
            self._page.changed()

    def end(self, note: str) -> None:
        """Write what is left of it, and a line about how it ended."""
        self._page.tail = ""
        rest = self._drawn(self._written, len(self._rows.at(self._width)))
        if note and rest:
            rest += f"\n({note})"
        elif note:
            rest = f"({note})"
        self._page.write(f"{rest}\n\n")

    def _drawn(self, first: int, last: int) -> str:
        with self._look.capture() as captured:
            for row in self._rows.at(self._width)[first:last]:
                self._look.print(row.text, soft_wrap=True, highlight=False, markup=False)
        return captured.get().removesuffix("\n")


class InlineFace(LineFace):
    """The chat of `--plain` with an input at the bottom: its output goes above the input, and the
    user can type while an answer streams."""

    option = "--inline"
    after_error = "\n"

    def __init__(self, options: ChatOptions, *, reflows: bool, typed: str) -> None:
        super().__init__(options)
        self._interrupted_s = float("-inf")
        self._picking: tuple[Sequence[str], asyncio.Future[int | None]] | None = None
        self._files: list[str] | None = None
        self._costs: dict[str, str] = {}
        self._look = palette(_COLOURS)
        self.page = InlinePage(
            submit=self._submit,
            offers=self._offers,
            status=self._status,
            keys=self._keys(),
            reflows=reflows,
            typed=typed,
            questions=[*reversed(options.history.typed_questions(limit=_EARLIER_QUESTIONS))],
        )

    async def run(self) -> None:
        """Until the user leaves, or the terminal goes."""
        async with self.chat.client:
            model = one_line(self.chat.model)
            self.note(f"{model}: Enter sends, / lists commands, @ files, Ctrl+D quits")
            await self.show_session(0, None)
            with suppress(EOFError):
                await self.page.app.run_async(pre_run=self._on_signals)
            await self.chat.stop_answer()

    # -- what is otherwise than line by line -------------------------------------------------------

    def note(self, text: str) -> None:
        self.page.write("\n".join(printable(line) for line in text.split("\n")) + "\n")

    show = note

    def changed(self, *, recount: bool = False) -> None:
        self.page.changed()

    async def pick(self, rows: Sequence[str]) -> int | None:
        self._picking = (rows, asyncio.get_running_loop().create_future())
        self.page.replace("")
        self.page.offer()
        return await self._picking[1]

    async def write(self, text: str) -> None:
        self.page.replace(text)

    def edit(self, turn: StoredMessage) -> None:
        self.page.replace(typed_in(turn))

    async def show_session(self, at: int, before: str | None) -> None:
        turns = self.chat.session.turns
        if len(turns) > TURNS_SHOWN:
            self.note(f"… {len(turns) - TURNS_SHOWN:,} earlier turns: localllm chat shows them all")
        for turn in turns[-TURNS_SHOWN:]:
            self._write_turn(turn)

    async def redraw(self) -> None:
        if self.chat.session.turns:
            self._write_turn(self.chat.session.turns[-1])

    async def show_question(self, turn: StoredMessage, *, edited: bool) -> None:
        if turn.role == "user":
            self._write_turn(turn)

    async def show_answer(self, keep: PendingAnswer, *, again: bool) -> AnswerDisplay:
        return InlineAnswer(self.page, self._look)

    def submit_queued(self, text: str) -> None:
        if typed_text(self.page.buffer.text.strip()) == text:
            self._submit(text)

    async def close(self) -> None:
        self.page.app.exit()

    # -- questions and answers ---------------------------------------------------------------------

    def _write_turn(self, turn: StoredMessage) -> None:
        if turn.role == "assistant":
            answer = InlineAnswer(self.page, self._look)
            answer.feed(turn.content)
            answer.end(note_under(turn))
            return
        shown = printable(typed_in(turn)).replace("\n", "\n  ")
        names = ", ".join(str(name) for name in turn.meta.get("attached", ()))
        if names:
            shown += f"  [{one_line(names)}]"
        with self._look.capture() as captured:
            self._look.print(Text(f"> {shown}", "bold"), soft_wrap=True, highlight=False)
        self.page.write(captured.get() + "\n")

    def _submit(self, text: str) -> None:
        text = text.strip()
        if self._picking is not None or not (text or self.chat.attached):
            return
        if commands.parse(text) is not None or not self.chat.answering:
            self.page.buffer.append_to_history()
            self.page.replace("")
        self._start(commands.submit(self.chat, text))

    def _start(self, text: Coroutine[Any, Any, object]) -> None:
        self.page.app.create_background_task(self.chat.reporting(text))

    # -- the lines below ---------------------------------------------------------------------------

    def _status(self) -> str:
        return " " + " · ".join(self._status_parts())[: max(10, self.page.columns - 2)]

    def _status_parts(self) -> Iterator[str]:
        chat = self.chat
        yield one_line(chat.model)
        used = chat.session.used_tokens
        if used:
            yield f"{used:,} tokens"
        if chat.stream is not None and chat.stream.meter.tok_s:
            yield f"{chat.stream.meter.tok_s:.1f} tok/s"
        if chat.attached:
            yield "+ " + ", ".join(one_line(name) for name, _ in chat.attached)
        if chat.answering:
            yield "Esc stops"
        if chat.answering and chat.queued:
            yield "sent when this answer ends"
        if chat.editing is not None:
            yield "Enter asks again; the old version is kept"

    def _offers(self, page: InlinePage) -> Sequence[Offer]:
        if self._picking is not None:
            return self._rows_to_pick(self._picking[0], page.buffer.text.lower())
        at = _AT.search(page.buffer.document.text_before_cursor)
        if at is not None:
            return self._files_like(at.group(1))
        return [self._of_command(command) for command in commands.offered(page.buffer.text)]

    def _of_command(self, command: commands.Command) -> Offer:
        fill = partial(self.page.replace, command.completed)
        run = fill
        if not command.needs_argument:
            run = partial(self._submit, f"/{command.name}")
        return Offer(command.usage, command.help, fill, run)

    def _rows_to_pick(self, rows: Sequence[str], words: str) -> Sequence[Offer]:
        offers = []
        for n, row in enumerate(rows):
            if words in row.lower():
                pick = partial(self._picked, n)
                offers.append(Offer(one_line(row), "", pick, pick))
        return offers

    def _picked(self, n: int | None) -> None:
        if self._picking is None:
            return
        _, picked = self._picking
        self._picking = None
        self.page.replace("")
        self.page.offer()
        if not picked.done():
            picked.set_result(n)

    def _files_like(self, letters: str) -> Sequence[Offer]:
        if self._files is None:
            self._files = []
            self._start(self._read_files())
        found = names_like(letters, self._files)[:_FILES_OFFERED]
        if found and found[0] not in self._costs:
            self._costs[found[0]] = ""
            self._start(self._count(found[0]))
        offers = []
        for name in found:
            take = partial(self._take, name)
            offers.append(Offer(one_line(name), self._costs.get(name, ""), take, take))
        return offers

    async def _read_files(self) -> None:
        self._files = await asyncio.to_thread(files_and_folders, Path.cwd())
        self.page.offer()

    async def _count(self, name: str) -> None:
        self._costs[name], _ = await file_cost(
            self.chat.client, self.chat.model, Path(name), self.chat.listed.n_ctx
        )
        self.page.offer()

    def _take(self, name: str) -> None:
        buffer = self.page.buffer
        at = _AT.search(buffer.document.text_before_cursor)
        if at is not None:
            buffer.delete_before_cursor(len(at.group(1)))
            buffer.insert_text(f"{Path(name).name} ")
            self._start(commands.run_and_report(self.chat, "attach", name))

    # -- keys and signals --------------------------------------------------------------------------

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        keys.add("c-c")(self._interrupt)
        keys.add("escape")(self._escape)
        keys.add("c-d")(self._delete_or_leave)
        keys.add("c-q")(self._leave)
        return keys

    def _leave(self, _: KeyPressEvent) -> None:
        self._start(self.chat.leave())

    def _delete_or_leave(self, event: KeyPressEvent) -> None:
        if self.page.buffer.text:
            self.page.buffer.delete()
        else:
            self._leave(event)

    def _escape(self, _: KeyPressEvent) -> None:
        self.chat.queued = ""
        self.chat.editing = None
        if self._picking is not None:
            self._picked(None)
        elif self.chat.answering:
            self._start(self.chat.stop_answer())

    def _interrupt(self, event: KeyPressEvent) -> None:
        now = asyncio.get_running_loop().time()
        self.chat.queued = ""
        if self._picking is not None:
            self._picked(None)
        elif self.page.buffer.text:
            self.page.replace("")
        elif self.chat.answering:
            self._start(self.chat.stop_answer())
        elif now - self._interrupted_s < QUIT_WITHIN_S:
            self._leave(event)
        else:
            self._interrupted_s = now
            self.page.hint("Ctrl+C again quits")

    def _on_signals(self) -> None:
        """SIGHUP and SIGTERM leave; a sleep (SIGTSTP, SIGSTOP) gives the terminal back and takes it
        again."""
        on_signals(self.chat.leave)
        # after the terminal is restored
        asyncio.get_running_loop().call_soon(self.page.keep_terminal_over_sleep)


def run_inline_chat(options: ChatOptions) -> Session:
    """Chat in the scrollback until the user quits. Returns the last conversation."""
    # The cursor's position is not needed, and not every terminal reports it.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    reflows, typed = reflows_lines()
    face = InlineFace(options, reflows=reflows, typed=typed)
    asyncio.run(face.run())
    return face.chat.session
