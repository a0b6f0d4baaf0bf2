"""The chat in a terminal: wires the input, the conversation on disk and the answer on its way to the screen."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Static, TextArea
from textual.worker import Worker, WorkerCancelled

from localllm.conversation.history import History, StoredMessage
from localllm.errors import LocalLLMError, NotFoundError
from localllm_tui.bindings import bindings_of
from localllm_tui.composer import Composer
from localllm_tui.control import commands, doing
from localllm_tui.control.answering import Answering
from localllm_tui.control.client import ChatClient, ListedModel
from localllm_tui.control.drafts import Drafts
from localllm_tui.control.keys import APP, Moment
from localllm_tui.control.meter import Numbers, elide, status_text
from localllm_tui.control.session import Answer, Session, typed_in
from localllm_tui.control.terminal import copy_with_tool
from localllm_tui.control.wording import footer, full_context, note_under, way_on, welcome
from localllm_tui.picker import Picker
from localllm_tui.transcript import AnswerView, Note, Question, Transcript, Trouble

STATUS_EVERY_S = 0.2
QUIT_WITHIN_S = 2.0
CONTEXT_WARNING = 0.9
EARLIER_SHOWN = 3
# A long conversation opens with its newest turns: each is a widget tree, and a hundred take seconds to lay out.
TURNS_SHOWN = 40


class ChatApp(App[None]):
    """The chat. `model` is the name the server knows; how long its context is, the server tells.

    `resume` is a conversation's id to open at the start; `attach` are files for the first question; `greeting` is
    shown at the top of an empty conversation. The history and the client stay the caller's to close.
    """

    TITLE = "localllm"
    CSS = """
    Screen { layout: vertical; }
    #status { height: 1; padding: 0 2; text-style: dim; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(APP)

    def __init__(
        self,
        client: ChatClient,
        history: History,
        *,
        model: str,
        resume: str | None = None,
        system: str | None = None,
        attach: Iterable[tuple[str, str]] = (),
        greeting: str = "",
        copy: Callable[[str], bool] = copy_with_tool,
    ) -> None:
        super().__init__()
        self.client = client
        self.history = history
        self.model = model
        self.n_ctx: int | None = None
        self.greeting = greeting
        self.system_asked = system
        self.attached: list[tuple[str, str]] = list(attach)
        self._copy_with_tool = copy
        self._session = Session(history, model, conv_id=resume, system=system)
        self._drafts = Drafts(history.path.parent / "drafts")
        self._worker: Worker[None] | None = None
        self._answering: Answering | None = None
        self._editing = self._warned = self._leaving = self._queued = False
        self._save_failed = False
        self._interrupted_s = float("-inf")

    @property
    def session(self) -> Session:
        """The conversation on screen."""
        return self._session

    @property
    def answering(self) -> bool:
        """Whether an answer is on its way, or being drawn to its end."""
        return self._worker is not None

    @property
    def answer_text(self) -> str:
        """What came of the answer that is on its way; "" when there is none."""
        return self._answering.text if self._answering is not None and not self._answering.closed else ""

    def compose(self) -> ComposeResult:
        yield Transcript(id="transcript")
        yield Composer()
        yield Static("", id="status", markup=False)

    async def on_mount(self) -> None:
        self.set_interval(STATUS_EVERY_S, self._tick)
        self._on_signals()
        await self._show_session()
        self.composer.focus()
        self.run_worker(self._ask_models(), group="models", exit_on_error=False)

    def on_resize(self, _: events.Resize) -> None:
        self._show_numbers()

    @property
    def composer(self) -> Composer:
        return self.query_one("#composer", Composer)

    @property
    def transcript(self) -> Transcript:
        return self.query_one("#transcript", Transcript)

    # -- the conversation on screen ------------------------------------------------------------------------------

    async def _show_session(self) -> None:
        """Draw the session from nothing, and bring back its draft."""
        self._editing = self._warned = self._queued = False
        await self.transcript.remove_children()
        turns = self._session.dialogue
        widgets: list[Question | AnswerView | Note] = []
        if not turns:
            widgets.append(
                Note(welcome(self.model, self.greeting, self.history.list(limit=EARLIER_SHOWN)), markdown=True)
            )
        if len(turns) > TURNS_SHOWN:
            hidden = len(turns) - TURNS_SHOWN
            widgets.append(Note(f"{hidden} earlier messages are not shown here; the model gets them, and /save too"))
        for turn in turns[-TURNS_SHOWN:]:
            widgets.append(Question.of(turn) if turn.role == "user" else self._view(turn))
        if turns and turns[-1].role == "user":
            widgets.append(Note("This question has no answer yet: /retry asks for one"))
        await self.transcript.mount_all(widgets)
        self.composer.replace_text(self._drafts.load(self._session.id))
        self.composer.recall = [typed_in(t) for t in turns if t.role == "user"]
        self._show_numbers()
        self._show_state()
        self.transcript.restart()

    def _view(self, turn: StoredMessage) -> AnswerView:
        return AnswerView.of(turn, self._session.model)

    async def say(self, text: str, *, markdown: bool = False) -> None:
        """Say something that is no part of the conversation."""
        await self.transcript.mount(Note(text, markdown=markdown))
        self.transcript.follow(always=True)

    async def _trouble(self, error: LocalLLMError, way_on: str = "") -> None:
        await self.transcript.mount(Trouble(error.message, error.hint, way_on))
        self.transcript.follow(always=True)

    def _show_state(self) -> None:
        """The input's frame says what is going on and what the keys do now."""
        box = self.composer
        moment = Moment.ANSWERING if self.answering else Moment.EDITING if self._editing else Moment.WRITING
        box.border_title = {
            Moment.ANSWERING: "answering",
            Moment.EDITING: "changing the last question",
            Moment.WRITING: "message",
        }[moment]
        if self.attached and moment is not Moment.ANSWERING:
            box.border_title += elide(f" + {', '.join(name for name, _ in self.attached)}", 50)
        box.border_subtitle = footer(moment, box.text, self.size.width - 8, queued=self._queued)

    def _show_numbers(self) -> None:
        answering, used = self._answering, self._session.used_tokens
        if answering is not None and not answering.closed:
            n = Numbers.so_far(self.model, self.n_ctx, answering.meter, used)
        else:
            answer = self._session.last_answer
            n = Numbers.of(self.model, self.n_ctx, answer.meta if answer else {}, used)
        with suppress(Exception):  # a resize may come before the first compose
            self.query_one("#status", Static).update(status_text(n, max(10, self.size.width - 4)))

    def _tick(self) -> None:
        if self._answering is not None and not self._answering.closed:
            self._answering.save_if_due()
            self._show_numbers()

    def _not_saved(self, e: LocalLLMError) -> None:
        """A full disk must not cost the answer on screen; once is enough to say it."""
        if not self._save_failed:
            self._save_failed = True
            self.notify(f"{e.message}. {e.hint}", title="not saved", severity="error", timeout=15, markup=False)

    # -- asking and answering ------------------------------------------------------------------------------------

    async def on_composer_submitted(self, event: Composer.Submitted) -> None:
        text = event.text.strip()
        command = commands.parse(text)
        if command is not None:
            self.composer.replace_text("")
            await self._run_command(*command)
        elif self.answering:
            self._queued = bool(text)
            self._show_state()
        elif text or self.attached:
            await self._send(commands.question(text))

    async def _send(self, text: str) -> None:
        try:
            if self._editing:
                session, old = self._session.branch()
                session.ask(text, self.attached, like=old)
                self._session = session
                self.attached = []
                self.composer.replace_text("")
                await self._show_session()
                await self.transcript.children[-1].remove()  # its "no answer yet"
            else:
                before = self._session.id
                turn = self._session.ask(text, self.attached)
                self._drafts.save(before, "")
                self.attached = []
                self.composer.replace_text("")
                await self._remove_welcome()
                await self.transcript.mount(Question.of(turn))
        except LocalLLMError as e:
            await self._trouble(e, "What you typed is still in the input.")
            return
        self.composer.recall.append(text)
        await self._start_answer(self._session.answer())

    async def _remove_welcome(self) -> None:
        if len(self._session.dialogue) == 1:
            await self.transcript.query(Note).remove()

    async def _start_answer(self, keep: Answer) -> None:
        self._answering = Answering(keep, self._not_saved)
        view = AnswerView(self.model)
        await self.transcript.mount(view)
        view.start()
        view.progress("waiting for the first token…")
        self.transcript.follow(always=True)
        self._worker = self.run_worker(self._stream(self._answering, view), group="answer", exit_on_error=True)
        self._show_state()
        self._show_numbers()

    async def _stream(self, answering: Answering, view: AnswerView) -> None:
        """Take one answer from the server; whatever ends it, the screen says how it ended."""
        trouble: LocalLLMError | None = None
        try:
            stream = self.client.stream(self.model, self._session.payload(), compact=self._session.compacts)
            await answering.run(stream, view)
        except LocalLLMError as e:
            trouble = e
        except asyncio.CancelledError:
            # Stopped by the user: the rest is the ordinary end of an answer, so the cancellation stops here.
            pass
        try:
            if not self._leaving:
                await self._show_end(view, answering, trouble)
        finally:
            self._worker = None
        self._show_state()
        self._show_numbers()
        if self._queued and trouble is None and not self._leaving:
            self.call_later(self._send_queued)

    async def _send_queued(self) -> None:
        """Send what waited for the answer to end, unless it was changed or taken back since."""
        if self._queued and not self.answering:
            self._queued = False
            await self.on_composer_submitted(Composer.Submitted(self.composer.text))

    async def _show_end(self, view: AnswerView, answering: Answering, trouble: LocalLLMError | None) -> None:
        turn = answering.turn
        if turn is not None:
            await view.settle("" if trouble is not None else note_under(turn))
        else:
            await view.remove()
            last = self._session.dialogue[-1]
            if last.role == "assistant":  # a retry that came to nothing leaves the answer there was
                await self.transcript.mount(self._view(last))
            if trouble is None:
                stopped = answering.reason == "stopped"
                how = "Stopped before the answer began" if stopped else "The model gave an empty answer"
                await self.say(f"{how}: /retry asks again")
        if trouble is not None:
            await self._trouble(trouble, way_on(trouble, kept=turn is not None, compacts=self._compacts))
        elif self.n_ctx is None:  # a server may know it only once the model is loaded
            await self._ask_models()
        await self._warn_of_full_context()
        self.transcript.follow()

    async def _warn_of_full_context(self) -> None:
        used = self._session.used_tokens
        if self.n_ctx and used >= CONTEXT_WARNING * self.n_ctx and not self._warned and not self._compacts:
            self._warned = True
            await self.say(full_context(used, self.n_ctx))

    @property
    def _compacts(self) -> bool:
        return self.client.compacts or self._session.compacts

    async def stop_answer(self) -> None:
        """Stop the answer, if there is one, and wait until what came is on disk."""
        worker, answering = self._worker, self._answering
        if worker is not None and answering is not None:
            if not answering.closed:  # else it is only being drawn to its end
                worker.cancel()
            with suppress(WorkerCancelled):
                await worker.wait()

    # -- keys ----------------------------------------------------------------------------------------------------

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        if event.text_area is self.composer:
            self._queued = False
            if not self._editing:
                self._drafts.save(self._session.id, self.composer.text)
            self._show_state()

    def on_composer_scroll_transcript(self, event: Composer.ScrollTranscript) -> None:
        self.transcript.page(event.pages)

    async def action_stop(self) -> None:
        self._queued = False
        if self.answering:
            await self.stop_answer()
        elif self._editing:
            self._editing = False
            self.composer.replace_text("")
            self._show_state()

    async def action_interrupt(self) -> None:
        if isinstance(self.screen, Picker):
            self.screen.dismiss(None)
            return
        selected = self.screen.get_selected_text() or self.composer.selected_text
        if selected:
            self.to_clipboard(selected, "the selection")
            self.screen.clear_selection()
            return
        self._queued = False
        if self.answering:
            await self.stop_answer()
            return
        now = time.monotonic()
        if now - self._interrupted_s < QUIT_WITHIN_S:
            await self.leave()
        self._interrupted_s = now
        self.notify("Ctrl+C again quits", timeout=QUIT_WITHIN_S)

    def action_thinking(self) -> None:
        """Fold or unfold the newest thinking."""
        for view in reversed(self.transcript.query(AnswerView)):
            if view.toggle_thinking():
                self.transcript.follow()
                return

    async def action_quit(self) -> None:
        await self.leave()

    def _on_signals(self) -> None:
        """A closed terminal or a polite kill leaves through the same door as Ctrl+Q."""
        loop = asyncio.get_running_loop()
        for name in ("SIGHUP", "SIGTERM"):
            with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(getattr(signal, name), lambda: loop.create_task(self.leave()))

    # -- what the commands do here (control.chat.Chat) ------------------------------------------------------------

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in commands.COMMANDS:
            if command.palette:
                yield SystemCommand(command.palette, command.help, self._palette_runner(command.name))
        yield from super().get_system_commands(screen)

    def _palette_runner(self, name: str) -> Callable[[], None]:
        def run() -> None:
            self.call_later(self._run_command, name, "")

        return run

    async def _run_command(self, name: str, argument: str) -> None:
        try:
            await commands.run(self, name, argument)
        except LocalLLMError as e:
            await self._trouble(e)

    async def open(self, session: Session) -> None:
        """Show another conversation; the draft of this one is kept."""
        await self.stop_answer()
        self._drafts.save(self._session.id, "" if self._editing else self.composer.text)
        self._session = session
        await self._show_session()

    async def choose(self, words: str) -> None:
        """Let the person find a conversation, beginning with `words`, and open it."""

        def chosen(conv_id: str | None) -> None:
            self.call_later(self._after_choice, conv_id)

        await self.push_screen(Picker(self.history, words), chosen)

    async def _after_choice(self, conv_id: str | None) -> None:
        try:
            if conv_id is not None:
                await doing.resume(self, conv_id)
            elif self._session.id is not None and not self._kept(self._session.id):
                await doing.new(self, "")  # it was removed in the list
        except LocalLLMError as e:
            await self._trouble(e)

    def _kept(self, conv_id: str) -> bool:
        try:
            self.history.get(conv_id)
        except NotFoundError:
            return False
        return True

    async def answer_again(self) -> None:
        """Ask for the last answer anew, in the place of the one on screen. Raises UsageError when nothing was asked."""
        keep = self._session.answer()
        views = list(self.transcript.query(AnswerView))
        if self._session.dialogue[-1].role == "assistant" and views:
            await views[-1].remove()
        for widget in list(self.transcript.query("Note, Trouble")):
            await widget.remove()
        await self._start_answer(keep)

    async def replace_answer(self, turn: StoredMessage) -> None:
        """Show another version of the last answer."""
        views = list(self.transcript.query(AnswerView))
        if views:
            await views[-1].replace(turn.content, turn.reasoning or "", note_under(turn))
            self.transcript.follow(always=True)
        self._show_numbers()

    def edit(self, question: StoredMessage) -> None:
        """Put `question` back into the input, to be asked differently."""
        self._editing = True
        self.composer.replace_text(typed_in(question))
        self._show_state()

    def attach(self, name: str, text: str) -> None:
        """Keep a file for the next question."""
        self.attached.append((name, text))
        self._show_state()

    def use_model(self, name: str, models: list[ListedModel]) -> None:
        """Let `name`, one of `models`, answer from here on."""
        self.model = self._session.model = name
        self._learn_context(models)

    def to_clipboard(self, text: str, what: str) -> None:
        """Put `text` on the clipboard, which is `what` in words."""
        self.copy_to_clipboard(text)
        how = "" if self._copy_with_tool(text) else " (through the terminal)"
        self.notify(f"copied {what}, {len(text):,} characters{how}", timeout=3)

    async def leave(self) -> None:
        """End the chat, with what came of an answer kept."""
        self._leaving = True
        if self._answering is not None:
            self._answering.close()
        self.exit()

    async def _ask_models(self) -> None:
        if self.n_ctx is None:
            try:
                self._learn_context(await self.client.models())
            except LocalLLMError as e:
                await self._trouble(e)

    def _learn_context(self, models: list[ListedModel]) -> None:
        self.n_ctx = next((m.n_ctx for m in models if m.name == self.model), None)
        self._show_numbers()
