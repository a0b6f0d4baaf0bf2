"""The chat without a user interface: one conversation, its model, and requests that are streamed,
stopped, counted and warned of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from functools import partial

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control import wording
from localllm_tui.control.answering import AnswerDisplay, PendingAnswer
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ListedModel
from localllm_tui.control.face import Face
from localllm_tui.control.idle_writing import IdleWriting
from localllm_tui.control.interfaces import (
    ChatEngine,
    EngineProgress,
    PlanList,
    PlanRequest,
    ToolSpec,
)
from localllm_tui.control.meter import check_fits
from localllm_tui.control.model_list import FirstRun, Pulls
from localllm_tui.control.physics import AnswerSpeed
from localllm_tui.control.session import Session
from localllm_tui.control.stream_events import StreamEvent, ToolCall
from localllm_tui.control.terminal import one_line, printable
from localllm_tui.control.tools import ToolBox, approval_texts, stream_with_tools

CONTEXT_WARNING = 0.85
# Interval of the checks whether the engine is loaded.
POLL_S = 0.2
# Ctrl+C quits if it is pressed twice within this time.
QUIT_WITHIN_S = 2.0
# The server knows how the model performs after an answer or two.
NOTICE_ASKS = 8
# Long enough that the user is not about to ask, short enough that titles exist when the list of
# conversations is opened.
IDLE_AFTER_S = 20.0


class ChatController:
    """One conversation and the model that answers it. `face` shows the events.

    `listed`: the server's entry for the model. `attached`: files for the next question. `editing`:
    the turn that gets another version. `queued`: a question that waits for the answer to end.
    `idle_after_s`: seconds without activity until a title or a summary is generated (None: never).
    `plans`: the plans made so far.
    """

    def __init__(self, options: ChatOptions, face: Face) -> None:
        self.options = options
        self.face = face
        self.client = options.client
        self.history = options.history
        self.model = options.model
        self.session = Session(
            options.history, options.model, conv_id=options.resume, system=options.system
        )
        self.attached: list[tuple[str, str]] = list(options.attached)
        self.listed = ListedModel(options.model)
        self.tools = ToolBox(options.tools)
        self.runs_commands = False  # True after the user's permission
        self.editing: StoredMessage | None = None
        self.queued = ""
        self.recent: dict[str, str] = {}  # the ids of the conversations that are listed, by number
        self.stream: PendingAnswer | None = None
        self.left = False
        self.idle_after_s: float | None = IDLE_AFTER_S
        self.busy()
        self.plans: dict[PlanRequest, PlanList] = {}
        self.pulls: Pulls | None = None
        self.first_run: FirstRun | None = None
        self._next_model = ""
        if options.model_service is not None:
            self.pulls = Pulls(options.model_service)
            if options.first_run:
                self.first_run = FirstRun(options.model, self.pulls)
        self.idle_writing = IdleWriting()
        self._shown: AnswerDisplay | None = None  # time of the newest answer
        self._running: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._save_failed = self._warned_full = False
        self._last_error: LocalLLMError | None = None
        self._notice_asks = NOTICE_ASKS

    # -- what it is doing --------------------------------------------------------------------------

    @property
    def answering(self) -> bool:
        """True if an answer is on its way, or being drawn to its end."""
        return self._running is not None

    @property
    def streaming(self) -> PendingAnswer | None:
        """The answer that is still coming."""
        if self.stream is not None and not self.stream.closed:
            return self.stream
        return None

    @property
    def speed(self) -> AnswerSpeed | None:
        """The speed of the newest answer; None before the first."""
        if self.stream is not None:
            return self.stream.speed(self.session.used_tokens)
        return None

    def recent_of(self, text: str) -> str:
        """The id of the recent conversation with this number; "" if none is listed."""
        if self.session.turns:
            return ""
        return self.recent.get(text, "")

    @property
    def compacts(self) -> bool:
        return self.client.compacts or self.session.compacts

    @property
    def loading_words(self) -> str:
        """How far the model is loaded; "" once it is."""
        if self.client.engine is not None:
            return self.client.engine.progress().words(one_line(self.model))
        return ""

    async def show_error(self, error: LocalLLMError, next_steps: str = "") -> None:
        self._last_error = error
        await self.face.show_error(error, next_steps)

    async def reporting(self, work: Awaitable[object]) -> None:
        """Await `work`, and show its error if it fails."""
        try:
            await work
        except LocalLLMError as e:
            await self.show_error(e)

    # -- questions and answers ---------------------------------------------------------------------

    async def send(self, text: str) -> None:
        """Store a question, or the changed text of a turn, and have it answered."""
        editing = self.editing
        try:
            self._save_answer()
            if editing is not None and editing.role == "assistant":
                turn = self.session.change_answer(editing, text)
            else:
                await check_fits(
                    self.client,
                    self.model,
                    self.listed.n_ctx,
                    partial(self.messages_for, text),
                    compacts=self.compacts,
                )
                turn = self.session.ask(text, self.attached, instead=editing)
                self.attached = []
            self.editing = None
            await self.face.show_question(turn, edited=editing is not None)
        except LocalLLMError as e:
            await self.show_error(e, "What you typed is still in the input.")
            return
        if turn.role == "user":
            await self._note_other_window()
            await self._start_answer(PendingAnswer(self.session))

    def messages_for(self, text: str, without_history: bool = False) -> list[dict[str, str]]:
        """Return the messages of a request with this question. `without_history` omits the earlier
        turns."""
        return self.session.messages_for(
            text, self.attached, instead=self.editing, without_history=without_history
        )

    async def answer_again(
        self, to: StoredMessage | None = None, *, continues: bool = False, model: str = ""
    ) -> None:
        """Request another answer to a question (None: the last), or to the question of an answer.

        `continues`: continue that answer.
        `model`: use another model for this answer.

        Raises UsageError if there is no question, or if no answer can be continued.
        """
        self._save_answer()
        await self._start_answer(
            PendingAnswer(self.session, to, continues=continues, model=model), again=True
        )

    async def stop_answer(self) -> bool:
        """Stop the answer in progress and wait until it is on disk. Returns whether there was
        one."""
        running = self._running
        streaming = self.streaming
        if running is None:
            return False
        if streaming is not None:  # otherwise only drawing remains
            running.cancel()
        await asyncio.wait([running])
        return streaming is not None

    async def answered(self) -> None:
        """Wait until the answer in progress has ended; to cancel this stops it."""
        if self._running is not None:
            await self._running

    async def compared(self) -> None:
        """Wait until the other model's answer has ended, too; to cancel this stops it."""
        if self._comparing is not None:
            await self._comparing

    async def _ask_other(self) -> None:
        """Have the other model answer, too. The screen then shows both answers."""
        other = self.options.other_model
        await self.face.show_note(f"{one_line(other)} answers:")
        await self.answer_again(model=other)
        await self.answered()
        is_answered = self.stream is not None and self.stream.turn is not None
        if self.face.full_screen and is_answered and not self.left:
            await self.face.run_on_screen("compare", "")

    async def _start_answer(self, stream: PendingAnswer, *, again: bool = False) -> None:
        shown = self._shown = await self.face.show_answer(stream, again=again)
        self.stream = stream
        shown.progress("waiting for the first token…")
        self._running = asyncio.create_task(self._answer(stream, shown, again=again))
        # let the task begin: a task cancelled before its start would not run its clean-up
        await asyncio.sleep(0)
        self.face.run_in_background(self.answered, "answer")
        if not self.compacts:  # with compaction the server may send less
            self.face.run_in_background(partial(self._count_prompt, stream), "prompt")
        self.face.changed()

    async def _count_prompt(self, stream: PendingAnswer) -> None:
        """Count the prompt of a running answer for its meter; the server reports the length only at
        the end."""
        tokens = await self.client.count(stream.model, stream.messages)
        if tokens and not stream.closed and not stream.meter.prompt_tokens:
            stream.meter.prompt_tokens = tokens

    def _events(self, keep: PendingAnswer) -> AsyncGenerator[StreamEvent, None]:
        return stream_with_tools(
            self.client,
            keep.model,
            keep.messages,
            self.tools if not keep.continues else ToolBox(),
            self._approve,
            compact=self.session.compacts,
            continues=keep.continues,
        )

    async def _approve(self, call: ToolCall, spec: ToolSpec) -> bool:
        answer = await self.face.approve(*approval_texts(call, spec), tool=True)
        if answer == "always":
            self.tools.allow(spec)
        return bool(answer)

    async def _answer(self, stream: PendingAnswer, shown: AnswerDisplay, *, again: bool) -> None:
        """Stream one answer; however it ends, the face shows how."""
        error: LocalLLMError | None = None
        compares = bool(self.options.other_model) and not again
        try:
            await stream.run(self._events(stream), shown)
        except LocalLLMError as e:
            error = e
        except asyncio.CancelledError:
            # Stopped by the user: the rest is an ordinary end, so the cancellation stops here.
            compares = False
        try:
            stream.close()
            self._report_disk()
            if not self.left:
                await self._end_answer(shown, stream, error)
        finally:
            self._running = None
        self.face.changed(recount=True)
        if compares and error is None and stream.turn is not None and not self.left:
            # A task of its own: the face cancels work on one answer if another is asked for.
            self._comparing = asyncio.create_task(self.reporting(self._ask_other()))
        queued = self.queued
        self.queued = ""
        if queued and error is None and not self.left:
            self.face.submit_queued(queued)

    async def _end_answer(
        self, shown: AnswerDisplay, stream: PendingAnswer, error: LocalLLMError | None
    ) -> None:
        await self.face.end_answer(shown, stream, error)
        await self._note_other_window()
        if error is not None:
            if stream.turn is None:
                self.session.fail_question()
            without_history = self.compacts or not self.session.sent_turns
            steps = wording.next_steps(
                error, kept=stream.turn is not None, without_history=without_history
            )
            await self.show_error(error, steps)
        elif self.face.full_screen:
            await self._ask_notice()
        await self._warn_of_full_context()

    def _save_answer(self) -> None:
        """Write the text of the newest answer that is not on disk. Raises LocalLLMError if the
        write fails again."""
        if self.stream is not None:
            self.stream.save()
        self._report_disk()

    def _report_disk(self) -> None:
        """Notify once if the newest answer can't be written, which does not end it, and once it is
        on disk."""
        stream = self.stream
        if stream is None:
            return
        if stream.refused is not None and not self._save_failed:
            self._save_failed = True
            self.face.notify(
                wording.in_a_line(stream.refused),
                title="not saved",
                severity="error",
                timeout=15,
                markup=False,
            )
        elif self._save_failed and stream.closed and not stream.unsaved:
            self._save_failed = False
            self.face.notify("the answer is now saved", title="saved", timeout=4, markup=False)
            if stream.turn is not None and self._shown is not None:
                self.face.show_place(self._shown, stream.turn)

    async def _note_other_window(self) -> None:
        session = self.session
        note = ""
        if session.copied:
            note = wording.CONTINUED_IN_COPY
        elif session.changed_elsewhere:
            note = wording.CHANGED_ELSEWHERE
        session.copied = session.changed_elsewhere = False
        if note:
            await self.face.show_note(note)

    async def _ask_notice(self) -> None:
        """Read the model's entry again. The server knows some of it only after the model is loaded.
        A notice about its performance comes after an answer or two.
        """
        if not self._notice_asks:
            return
        self._notice_asks -= 1
        with suppress(LocalLLMError):
            await self.learn()
            if self.listed.notice:
                self._notice_asks = 0
                await self.face.show_note(printable(self.listed.notice))

    async def _warn_of_full_context(self) -> None:
        used = self.session.used_tokens
        n_ctx = self.listed.n_ctx
        if not n_ctx or used < CONTEXT_WARNING * n_ctx:
            return
        if not self._warned_full and not self.compacts:
            self._warned_full = True
            await self.face.show_note(wording.nearly_full(used, n_ctx))

    # -- the conversation --------------------------------------------------------------------------

    async def open(self, session: Session, at: int = 0) -> None:
        """Show another conversation, at the turn of this id (0: its end)."""
        await self.stop_answer()
        before = self.session.id
        self.session = session
        self.editing = None
        self.queued = ""
        self._warned_full = False
        await self.face.show_session(at, before)

    def edit(self, turn: StoredMessage) -> None:
        """Let the user edit `turn`; the result becomes another version of it."""
        self.face.edit(turn)
        self.editing = turn
        self.face.changed()

    def attach(self, name: str, text: str) -> None:
        self.attached.append((name, text))
        self.face.changed()

    # -- the model ---------------------------------------------------------------------------------

    def use_model(self, listed: ListedModel) -> None:
        self.model = self.session.model = listed.name
        self.listed = listed
        self.face.changed(recount=True)

    async def use_engine(self, engine: ChatEngine) -> None:
        """Use another engine from now on, and load its model."""
        await self.client.move_to(engine)
        self.use_model(ListedModel(engine.model))
        self.begin()

    async def learn(self) -> None:
        """Ask the server what it says of the model. Raises LocalLLMError."""
        self.listed = await self.client.listed(self.model)
        self.face.changed(recount=True)

    def begin(self) -> None:
        """Start the engine, if the chat has its own, and read the server's list of models once it
        is loaded."""
        if self.client.engine is not None and not self.client.ready:
            self.client.engine.start()
        self.face.run_in_background(self._learn_once_loaded, "models")

    async def _learn_once_loaded(self) -> None:
        while not self.client.ready:
            await asyncio.sleep(POLL_S)
            self.face.changed()
        ended = EngineProgress()
        if self.client.engine is not None:
            ended = self.client.engine.progress()
        # a waiting answer reports the error itself
        if ended.error not in (None, self._last_error) and not self.answering:
            await self.show_error(ended.error, wording.NOT_LOADED)
        if not ended.down:
            await self.reporting(self.learn())

    # -- what a timer does -------------------------------------------------------------------------

    def tick(self) -> None:
        """Do the regular work, a few times a second: save, report downloads and the engine,
        generate a title or a summary in a quiet moment."""
        self._report_downloads()
        if self.stream is not None:
            self.stream.save_if_due()
        self._report_disk()
        if self.streaming is not None:
            self.busy()
            return
        if self.idle_after_s is None or self.quiet_s < self.idle_after_s:
            return
        write = self.idle_writing.title_of(self.client, self.model, self.session)
        if write is None and self._warned_full and not self.compacts:
            write = self.idle_writing.summary_of(
                self.client, self.model, self.session, self.listed.n_ctx
            )
        if write is not None:
            self.busy()
            self.face.run_in_background(write, "idle")

    def _report_downloads(self) -> None:
        if self.pulls is None:
            return
        for pull in self.pulls.newly_ended():
            if pull.goes_on:
                self._next_model = pull.name
            self.face.notify(
                pull.words() + pull.next_steps,
                severity="error" if pull.error else "information",
                timeout=8,
                markup=False,
            )

    def take_next_model(self) -> str:
        """The model that the chat goes on with, once: its download has ended, and no answer runs; ""
        without one."""
        if self.answering:
            return ""
        name = self._next_model
        self._next_model = ""
        return name

    def busy(self) -> None:
        """Something is typed or answered."""
        self._quiet_since_s = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since something was typed or answered."""
        return time.monotonic() - self._quiet_since_s

    async def leave(self) -> None:
        """End the chat: save the answer so far and stop downloads, which can be resumed later."""
        if self.left:
            return
        if not self.face.full_screen:
            await self.stop_answer()
        self.left = True
        if self.pulls is not None:
            self.pulls.stop_all()
        if self.stream is not None:
            self.stream.close()
        with suppress(LocalLLMError):
            self._save_answer()
        await self.face.close()
