"""The layer of the chat's screen that sends questions and streams answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from textual.worker import Worker, WorkerCancelled

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control import commands
from localllm_tui.control.answering import AnswerStream, UnsavedAnswers
from localllm_tui.control.chat import ChatOptions
from localllm_tui.control.client import ToolCall
from localllm_tui.control.interfaces import ToolSpec
from localllm_tui.control.meter import UnsentMessage, check_fits
from localllm_tui.control.session import PendingAnswer
from localllm_tui.control.terminal import printable
from localllm_tui.control.tools import stream_with_tools
from localllm_tui.control.wording import CONTINUED_BESIDE, CONTINUED_ELSEWHERE, full_context, note_under, way_on
from localllm_tui.messages import QuestionSubmitted
from localllm_tui.screens.background import start
from localllm_tui.screens.chat_view import ChatViewScreen
from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.glass import GlassPanel
from localllm_tui.widgets.turns import ChatNote, QuestionView

CONTEXT_WARNING = 0.9
# Of an answer that took so long one may look elsewhere meanwhile.
LONG_S = 10.0
# The server knows how the model performs after an answer or two.
NOTICE_ASKS = 8


class ChatStreamingScreen(ChatViewScreen):
    def __init__(self, options: ChatOptions) -> None:
        super().__init__(options)
        self._worker: Worker[None] | None = None
        self._leaving = self._save_failed = False
        self._notice_asks = NOTICE_ASKS
        self._unsaved = UnsavedAnswers()
        self._energy = options.energy

    @property
    def answering(self) -> bool:
        """Whether an answer is on its way, or being drawn to its end."""
        return self._worker is not None

    @property
    def answer_text(self) -> str:
        """The text of the answer in progress; "" when there is none."""
        return self._answering.text if self._answering is not None and not self._answering.closed else ""

    async def run_command(self, name: str, argument: str) -> None:
        """Do what a slash command says, or say why not."""
        raise NotImplementedError

    async def on_question_submitted(self, event: QuestionSubmitted) -> None:
        text = event.text.strip()
        command = commands.parse(text)
        if command is not None:
            self.composer.replace_text("")
            await self.run_command(*command)
        elif self.answering:
            self._queued = bool(text)
            self._show_state()
        elif text or self.attached:
            await self._send(commands.question(text))

    async def _send(self, text: str) -> None:
        editing = self._editing
        try:
            self._unsaved.write_all()
            if editing is not None and editing.role == "assistant":
                self.session.change_answer(editing, text)
                await self._end_edit()
                return
            typed = UnsentMessage(text, tuple(self.attached), editing)
            await check_fits(self.client, self.model, self.session, typed, self.n_ctx)
            before = self.session.id
            if editing is None:
                await self._ensure_shown(0)
            turn = self.session.ask(text, self.attached, instead=editing)
            self.attached = []
            if editing is not None:
                await self._end_edit()
                await self.transcript.query(ChatNote).remove()  # its "no answer yet"
            else:
                self._drafts.save(before, "")
                self.composer.replace_text("")
                await self._remove_welcome()
                await self.transcript.mount(QuestionView.of(turn, place=self.session.place(turn)))
        except LocalLLMError as e:
            await self.trouble(e, "What you typed is still in the input.")
            return
        self.composer.earlier_questions.append(text)
        await self._say_if_elsewhere()
        await self._start_answer(self.session.answer())

    async def _end_edit(self) -> None:
        """Show the branch that an edit made, and what was in the input before."""
        self._editing = None
        self.composer.replace_text(self._draft)
        self._choose_window(self.session.turns[-1].id)
        await self.redraw()
        self.transcript.follow(always=True)

    async def _ensure_shown(self, turn_id: int) -> None:
        """Make sure this turn is among those on screen (0: the last one)."""
        shown = any(v.turn_id == turn_id for v in self.transcript.views)
        if not shown if turn_id else self._last is not None:
            self._choose_window(turn_id)
            await self.redraw()

    async def _say_if_elsewhere(self) -> None:
        tree = self.session.tree
        if tree.copied or tree.beside:
            said = CONTINUED_ELSEWHERE if tree.copied else CONTINUED_BESIDE
            tree.copied = tree.beside = False
            await self.say(said)

    async def _remove_welcome(self) -> None:
        if len(self.session.turns) == 1:
            await self.transcript.query(ChatNote).remove()

    async def _start_answer(self, keep: PendingAnswer) -> None:
        view = AnswerView(keep.model, keep.text, keep.reasoning)
        self._answering = AnswerStream(keep, self._not_saved, view.tool)
        await self.transcript.mount(view)
        view.start()
        view.progress("waiting for the first token…")
        self.transcript.follow(always=True)
        self._worker = self.run_worker(partial(self._stream, keep, self._answering, view), group="answer")
        if not self._compacts:  # with compaction the server may send less
            start(self, partial(self._count_prompt, keep, self._answering), "prompt")
        self._show_state()
        self._show_numbers()

    async def _count_prompt(self, keep: PendingAnswer, answering: AnswerStream) -> None:
        """Tell the meter of an answer on its way how long the prompt is; the server does so only at the end."""
        tokens = await self.client.count(keep.model, keep.messages)
        if tokens and not answering.closed and not answering.meter.prompt_tokens:
            answering.meter.prompt_tokens = tokens

    async def _stream(self, keep: PendingAnswer, answering: AnswerStream, view: AnswerView) -> None:
        """Stream one answer; however it ends, the screen says how."""
        trouble: LocalLLMError | None = None
        try:
            compact = self.session.compacts
            if self.tools.on and not keep.continues:
                stream = stream_with_tools(
                    self.client, keep.model, keep.messages, self.tools, self._ask_approval, compact=compact
                )
            else:
                stream = self.client.stream(keep.model, keep.messages, compact=compact, continues=keep.continues)
            async with self._measured(answering):
                await answering.run(stream, view)
        except LocalLLMError as e:
            trouble = e
        except asyncio.CancelledError:
            # Stopped by the user: the rest is an ordinary end, so the cancellation stops here.
            pass
        try:
            if not self._leaving:
                await self._show_end(view, answering, trouble)
        finally:
            self._worker = None
        self._counting.afresh()
        self.show_counts()
        if self._queued and trouble is None and not self._leaving:
            self.call_later(self._send_queued)

    @asynccontextmanager
    async def _measured(self, answering: AnswerStream) -> AsyncIterator[None]:
        """Measure its energy for the panel that shows it. In threads: some sources are programs."""
        meter = self._energy() if self._energy is not None and self.query_one(GlassPanel).wanted else None
        if meter is None:
            yield
            return
        await asyncio.to_thread(meter.__enter__)
        try:
            yield
        finally:
            await asyncio.to_thread(meter.__exit__, None, None, None)
            answering.energy = meter.use

    async def _ask_approval(self, call: ToolCall, spec: ToolSpec) -> bool:
        """Ask the user. Stopping the answer closes the dialog."""
        from localllm_tui.screens.dialogs import ToolApproval

        asked = ToolApproval(call, spec)
        try:
            said: bool = await self.app.push_screen(asked, wait_for_dismiss=True)
            return said is True
        finally:
            if asked.is_attached and self.app.screen is asked:
                asked.dismiss(False)

    async def _send_queued(self) -> None:
        """Send the queued question, unless it was edited or removed since."""
        if self._queued and not self.answering:
            self._queued = False
            await self.on_question_submitted(QuestionSubmitted(self.composer.text))

    def tell_elsewhere(self, text: str) -> None:
        """Tell somebody who looks at another window."""

    async def _show_end(self, view: AnswerView, answering: AnswerStream, trouble: LocalLLMError | None) -> None:
        turn = answering.turn
        if answering.meter.took_s >= LONG_S:
            self.tell_elsewhere(f"{'no answer' if trouble is not None else 'answered'}: {self.session.title}")
        if turn is not None:
            if self.session.tree.holds(turn.id):
                view.show_place(turn.id, self.session.place(turn))
            await view.settle("" if trouble is not None else note_under(turn))
            self._unsaved.add(answering, partial(self._show_written, view))
        else:
            await view.remove()
            await self.redraw()  # an empty retry keeps the earlier answer
            await self.transcript.query(ChatNote).remove()
            if trouble is None:
                stopped = answering.reason == "stopped"
                how = "Stopped before the answer began" if stopped else "The model gave an empty answer"
                await self.say(f"{how}: /retry asks again, /edit changes the question, /drop removes it")
        await self._say_if_elsewhere()
        if trouble is not None:
            if turn is None:
                self.session.fail_question()
            alone = self._compacts or not self.session.sent_turns
            await self.trouble(trouble, way_on(trouble, kept=turn is not None, alone=alone))
        elif self.n_ctx is None or self.physics is None:  # a server may know it only once the model is loaded
            await self._ask_models()
        if trouble is None:
            await self._ask_notice()
        await self._warn_of_full_context()
        self.transcript.follow()

    def _show_written(self, view: AnswerView, turn: StoredMessage) -> None:
        """Show that an unsaved answer is written now."""
        self._save_failed = False
        self.notify("the answer is on disk now", title="saved", timeout=4, markup=False)
        if view.is_attached and self.session.tree.holds(turn.id):
            view.show_place(turn.id, self.session.place(turn))

    async def _ask_notice(self) -> None:
        """Ask whether the server has a notice about how the model runs: it has one after an answer or two, or never."""
        if not self._notice_asks:
            return
        self._notice_asks -= 1
        with suppress(LocalLLMError):
            found = next((m.notice for m in await self.client.models() if m.name == self.model), "")
            if found:
                self._notice_asks = 0
                await self.say(printable(found))

    async def _warn_of_full_context(self) -> None:
        used = self.session.used_tokens
        if self.n_ctx and used >= CONTEXT_WARNING * self.n_ctx and not self._warned and not self._compacts:
            self._warned = True
            await self.say(full_context(used, self.n_ctx))

    @property
    def _compacts(self) -> bool:
        return self.client.compacts or self.session.compacts

    async def stop_answer(self) -> bool:
        """Stop the answer in progress and wait until it is on disk. Returns whether there was one."""
        worker, answering = self._worker, self._answering
        if worker is None or answering is None:
            return False
        being_written = not answering.closed  # else only the drawing is left
        if being_written:
            worker.cancel()
        with suppress(WorkerCancelled):
            await worker.wait()
        return being_written

    def _not_saved(self, e: LocalLLMError) -> None:
        """Say once that the disk refuses; the answer on screen goes on."""
        if not self._save_failed:
            self._save_failed = True
            self.notify(f"{e.message}. {e.hint}", title="not saved", severity="error", timeout=15, markup=False)


async def switch_tools(chat: ChatStreamingScreen, what: str) -> None:
    """/tools: on, off, or which there are."""
    word, _, name = what.partition(" ")
    if word not in ("", "on", "off"):
        raise UsageError(f"/tools {what} is not known", hint="use /tools, /tools on, /tools on NAME or /tools off")
    if word == "off":
        await chat.tools.switch_off()
    elif word == "on":
        await chat.tools.switch_on(name.strip())
    asks = "\nEach call waits for your yes, with its arguments shown" if chat.tools.on else "\n/tools on starts them"
    await chat.say(chat.tools.said() + (asks if chat.tools.names else ""))
