"""The chat in a terminal: wires the input, the conversation on disk and the server's stream to the screen."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Static, TextArea
from textual.worker import Worker, WorkerCancelled

from localllm.conversation.history import History, StoredMessage
from localllm.errors import LocalLLMError, NotFoundError, UsageError
from localllm_tui import commands
from localllm_tui.attach import check_room, read_text
from localllm_tui.client import ChatClient, LeftOut, Prefill, Reasoning, ServedModel, StreamEvent, Text, Waiting
from localllm_tui.composer import Composer
from localllm_tui.drafts import Drafts
from localllm_tui.meter import Meter, Numbers, elide, status_text
from localllm_tui.picker import Picker
from localllm_tui.session import Answer, Session, code_blocks
from localllm_tui.terminal import copy_with_tool, printable
from localllm_tui.transcript import AnswerView, Note, Question, Transcript, Trouble
from localllm_tui.wording import note_under, question_of, way_on, welcome

STATUS_EVERY_S = 0.2
QUIT_WITHIN_S = 2.0
CONTEXT_WARNING = 0.9
EARLIER_SHOWN = 3
# A long conversation opens with its newest turns: each is a widget tree, and a hundred take seconds to lay out.
TURNS_SHOWN = 40


class ChatApp(App[None]):
    """The chat. `model` is the name the server knows; `n_ctx` in tokens is asked from the server when not given.

    `resume` is a conversation's id to open at the start; `attach` are files for the first question; `greeting` is
    shown at the top of an empty conversation. The history and the client stay the caller's to close.
    """

    TITLE = "localllm"
    CSS = """
    Screen { layout: vertical; }
    #status { height: 1; padding: 0 2; text-style: dim; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop the answer", show=False),
        Binding("ctrl+c", "interrupt", "Copy, stop or quit", show=False, priority=True),
        Binding("ctrl+d,ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+t", "thinking", "Show or hide the thinking", show=False, priority=True),
    ]

    def __init__(
        self,
        client: ChatClient,
        history: History,
        *,
        model: str,
        n_ctx: int | None = None,
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
        self.n_ctx = n_ctx
        self.greeting = greeting
        self._system_asked = system
        self._attached: list[tuple[str, str]] = list(attach)
        self._copy_with_tool = copy
        self._session = Session(history, model, conv_id=resume, system=system)
        self._drafts = Drafts(history.path.parent / "drafts")
        self._answering: Worker[None] | None = None
        self._answer: Answer | None = None
        self._meter: Meter | None = None
        self._editing = self._warned = self._leaving = self._queued = False
        self._save_failed = False
        self._interrupted_s = float("-inf")

    @property
    def session(self) -> Session:
        """The conversation on screen."""
        return self._session

    @property
    def answering(self) -> bool:
        """Whether an answer is on its way."""
        return self._answering is not None

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
            widgets.append(question_of(turn) if turn.role == "user" else self._view(turn))
        if turns and turns[-1].role == "user":
            widgets.append(Note("This question has no answer yet: /retry asks for one"))
        await self.transcript.mount_all(widgets)
        self.composer.replace_text(self._drafts.load(self._session.id))
        self.composer.recall = [str(t.meta.get("typed", t.content)) for t in turns if t.role == "user"]
        self._show_numbers()
        self._show_state()
        self.transcript.restart()

    def _view(self, turn: StoredMessage) -> AnswerView:
        who = str(turn.meta.get("model") or self._session.model)
        return AnswerView(who, turn.content, turn.reasoning or "", note_under(turn))

    async def _say(self, text: str, *, markdown: bool = False) -> None:
        await self.transcript.mount(Note(text, markdown=markdown))
        self.transcript.follow(always=True)

    async def _trouble(self, error: LocalLLMError, way_on: str = "") -> None:
        await self.transcript.mount(Trouble(error.message, error.hint, way_on))
        self.transcript.follow(always=True)

    def _show_state(self) -> None:
        """The input's frame says what is going on and what the keys do now."""
        box = self.composer
        files = ", ".join(name for name, _ in self._attached)
        if self.answering:
            box.border_title = "answering"
            box.border_subtitle = "Esc stops · sent when this answer ends" if self._queued else "Esc stops"
            return
        box.border_title = "changing the last question" if self._editing else "message"
        if files:
            box.border_title += elide(f" + {files}", 50)
        found = commands.matching(box.text)
        if found and box.text:
            names = "  ".join(f"/{c.name}" for c in found)
            box.border_subtitle = f"{names} · {found[0].help}" if len(found) == 1 else elide(names, self.size.width - 8)
        elif self._editing:
            box.border_subtitle = "Enter asks it in a new conversation · Esc leaves it"
        else:
            box.border_subtitle = "Enter sends · Ctrl+J new line · /help"

    def _show_numbers(self) -> None:
        if self._meter is not None:
            m = self._meter
            used = m.used or self._session.used_tokens + m.tokens  # until the server counts
            n = Numbers(self.model, m.tok_s, m.ttft_s, used, self.n_ctx, m.usage.cached if m.usage else None)
        else:
            answer = self._session.last_answer
            meta = answer.meta if answer else {}
            n = Numbers.of(self.model, self.n_ctx, meta, self._session.used_tokens)
        with suppress(Exception):  # a resize may come before the first compose
            self.query_one("#status", Static).update(status_text(n, max(10, self.size.width - 4)))

    def _tick(self) -> None:
        if self._answer is not None:
            try:
                self._answer.save_if_due()
            except LocalLLMError as e:
                self._not_saved(e)
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
            await self._command(*command)
        elif self.answering:
            self._queued = bool(text)
            self._show_state()
        elif text or self._attached:
            await self._send(commands.question(text))

    async def _send(self, text: str) -> None:
        try:
            if self._editing:
                session, old = self._session.branch()
                session.ask(text, self._attached, like=old)
                self._session = session
                self._attached = []
                self.composer.replace_text("")
                await self._show_session()
                await self.transcript.children[-1].remove()  # its "no answer yet"
            else:
                before = self._session.id
                turn = self._session.ask(text, self._attached)
                self._drafts.save(before, "")
                self._attached = []
                self.composer.replace_text("")
                await self._remove_welcome()
                await self.transcript.mount(question_of(turn))
        except LocalLLMError as e:
            await self._trouble(e, "What you typed is still in the input.")
            return
        self.composer.recall.append(text)
        await self._start_answer()

    async def _remove_welcome(self) -> None:
        if len(self._session.dialogue) == 1:
            await self.transcript.query(Note).remove()

    async def _start_answer(self) -> None:
        self._answer = self._session.answer()
        self._meter = Meter()
        view = AnswerView(self.model)
        await self.transcript.mount(view)
        view.start()
        view.progress("waiting for the first token…")
        self.transcript.follow(always=True)
        self._answering = self.run_worker(
            self._stream(self._answer, self._meter, view), group="answer", exit_on_error=True
        )
        self._show_state()
        self._show_numbers()

    async def _stream(self, answer: Answer, meter: Meter, view: AnswerView) -> None:
        """Take one answer from the server; whatever ends it, what came is kept and the screen says how it ended."""
        reason, trouble = "stopped", None
        try:
            asked = self.client.stream(self.model, self._session.payload(), compact=self._session.compacts)
            async with aclosing(asked) as stream:
                async for event in stream:
                    reason = self._take(event, answer, meter, view) or reason
        except LocalLLMError as e:
            reason, trouble = "error", e
        except asyncio.CancelledError:
            # Stopped by the user: the rest is the ordinary end of an answer, so the cancellation stops here.
            pass
        finally:
            turn = self._close_answer(answer, meter, reason)
        try:
            if not self._leaving:
                await self._show_end(view, turn, reason, trouble)
        finally:
            self._answering = None
        self._show_state()
        self._show_numbers()
        if self._queued and trouble is None and not self._leaving:
            self.call_later(self._send_queued)

    async def _send_queued(self) -> None:
        """Send what waited for the answer to end, unless it was changed or taken back since."""
        if self._queued and not self.answering:
            self._queued = False
            await self.on_composer_submitted(Composer.Submitted(self.composer.text))

    def _take(self, event: StreamEvent, answer: Answer, meter: Meter, view: AnswerView) -> str | None:
        """One event of the stream to the screen and the disk; the finish reason when it is the last."""
        if isinstance(event, (Text, Reasoning)):
            if meter.tokens == 0:
                view.progress("")
            meter.delta()
            piece = {"text" if isinstance(event, Text) else "reasoning": event.text}
            view.feed(**piece)
            try:
                answer.add(**piece)
            except LocalLLMError as e:
                self._not_saved(e)
        elif isinstance(event, Prefill):
            meter.prompt_tokens = event.total
            if meter.tokens == 0:
                view.progress(f"reading the prompt… {event.done:,} of {event.total:,} tokens")
        elif isinstance(event, Waiting):
            if meter.tokens == 0:
                view.progress(printable(event.note) + "…")
        elif isinstance(event, LeftOut):
            meter.left_out = event.messages
        else:
            meter.usage = event.usage
            return event.reason
        return None

    async def _show_end(
        self, view: AnswerView, turn: StoredMessage | None, reason: str, trouble: LocalLLMError | None
    ) -> None:
        if turn is not None:
            await view.settle("" if trouble is not None else note_under(turn))
        else:
            await view.remove()
            last = self._session.dialogue[-1]
            if last.role == "assistant":  # a retry that came to nothing leaves the answer there was
                await self.transcript.mount(self._view(last))
            if trouble is None:
                how = "Stopped before the answer began" if reason == "stopped" else "The model gave an empty answer"
                await self._say(f"{how}: /retry asks again")
        if trouble is not None:
            await self._trouble(trouble, way_on(trouble, kept=turn is not None, compacts=self._compacts))
        elif self.n_ctx is None:  # a server may know it only once the model is loaded
            await self._ask_models()
        await self._warn_of_full_context()
        self.transcript.follow()

    def _close_answer(self, answer: Answer, meter: Meter, reason: str) -> StoredMessage | None:
        """Write the last of the answer, once. Needs no screen: quitting does it, too."""
        if self._answer is not answer:
            return None
        self._answer = self._meter = None
        meta = meter.meta()
        if "prompt_tokens" not in meta:  # stopped before the server counted: what the status line showed
            meta |= {"prompt_tokens": self._session.used_tokens, "completion_tokens": meter.tokens, "estimated": True}
        try:
            return answer.finish({**meta, "finish_reason": reason})
        except LocalLLMError as e:
            self._not_saved(e)
            return StoredMessage(0, "assistant", answer.text, answer.reasoning, {"finish_reason": reason})

    async def _warn_of_full_context(self) -> None:
        used = self._session.used_tokens
        if self.n_ctx and used >= CONTEXT_WARNING * self.n_ctx and not self._warned and not self._compacts:
            self._warned = True
            await self._say(
                f"The context is {used / self.n_ctx:.0%} full ({used:,} of {self.n_ctx:,} tokens): soon the "
                "conversation will not fit. /compact lets the oldest messages be left out then, /new starts another, /save "
                "keeps this one as a file."
            )

    @property
    def _compacts(self) -> bool:
        return self.client.compacts or self._session.compacts

    async def _stop_answer(self) -> None:
        """Stop the answer, if there is one, and wait until what came is on disk."""
        worker = self._answering
        if worker is not None:
            if self._answer is not None:  # else it is only being drawn to its end
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
            await self._stop_answer()
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
            self._to_clipboard(selected, "the selection")
            self.screen.clear_selection()
            return
        self._queued = False
        if self.answering:
            await self._stop_answer()
            return
        now = time.monotonic()
        if now - self._interrupted_s < QUIT_WITHIN_S:
            await self.action_quit()
        self._interrupted_s = now
        self.notify("Ctrl+C again quits", timeout=QUIT_WITHIN_S)

    def action_thinking(self) -> None:
        """Fold or unfold the newest thinking."""
        for view in reversed(self.transcript.query(AnswerView)):
            if view.toggle_thinking():
                self.transcript.follow()
                return

    async def action_quit(self) -> None:
        self._leaving = True
        if self._answer is not None and self._meter is not None:
            self._close_answer(self._answer, self._meter, "stopped")
        self.exit()

    def _on_signals(self) -> None:
        """A closed terminal or a polite kill leaves through the same door as Ctrl+Q."""
        loop = asyncio.get_running_loop()
        for name in ("SIGHUP", "SIGTERM"):
            with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(getattr(signal, name), lambda: loop.create_task(self.action_quit()))

    # -- commands ------------------------------------------------------------------------------------------------

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in commands.COMMANDS:
            if command.palette:
                yield SystemCommand(command.palette, command.help, self._palette_runner(command.name))
        yield from super().get_system_commands(screen)

    def _palette_runner(self, name: str) -> Callable[[], None]:
        def run() -> None:
            self.call_later(self._command, name, "")

        return run

    async def _command(self, name: str, argument: str) -> None:
        handler = getattr(self, "_do_" + name.replace("!", "_over"), None)
        if handler is None:
            await self._trouble(UsageError(f"there is no command /{name}", hint=commands.suggestion(name)))
            return
        try:
            await handler(argument)
        except LocalLLMError as e:
            await self._trouble(e)

    async def _open(self, session: Session) -> None:
        await self._stop_answer()
        self._drafts.save(self._session.id, "" if self._editing else self.composer.text)
        self._session = session
        await self._show_session()

    async def _do_new(self, _: str) -> None:
        await self._open(Session(self.history, self.model, system=self._session.system or self._system_asked))

    async def _do_list(self, words: str) -> None:
        def chosen(conv_id: str | None) -> None:
            self.call_later(self._after_list, conv_id)

        await self.push_screen(Picker(self.history, words), chosen)

    async def _after_list(self, conv_id: str | None) -> None:
        if conv_id is not None:
            await self._resume(conv_id)
        elif self._session.id is not None:
            try:
                self.history.get(self._session.id)
            except NotFoundError:  # it was removed in the list
                await self._do_new("")

    async def _do_continue(self, _: str) -> None:
        found = [c for c in self.history.list(limit=2) if c.id != self._session.id]
        if not found:
            raise UsageError("there is no earlier conversation", hint="this one is kept as soon as you ask something")
        await self._resume(found[0].id)

    async def _resume(self, conv_id: str) -> None:
        try:
            await self._open(Session(self.history, self.model, conv_id=conv_id))
        except LocalLLMError as e:
            await self._trouble(e)

    async def _do_retry(self, _: str) -> None:
        await self._stop_answer()
        self._session.last_question  # noqa: B018 (raises when there is none)
        views = list(self.transcript.query(AnswerView))
        if self._session.dialogue[-1].role == "assistant" and views:
            await views[-1].remove()
        for widget in list(self.transcript.query("Note, Trouble")):
            await widget.remove()
        await self._start_answer()

    async def _do_earlier(self, _: str) -> None:
        await self._stop_answer()
        turn = self._session.swap_earlier()
        views = list(self.transcript.query(AnswerView))
        if views:
            await views[-1].replace(turn.content, turn.reasoning or "", note_under(turn))
            self.transcript.follow(always=True)
        self._show_numbers()

    async def _do_edit(self, which: str) -> None:
        if which not in ("", "last"):
            raise UsageError("only the last question can be edited", hint="use /edit")
        await self._stop_answer()
        old = self._session.last_question
        self._editing = True
        self.composer.replace_text(str(old.meta.get("typed", old.content)))
        self._show_state()

    async def _do_compact(self, argument: str) -> None:
        if argument not in ("", "off"):
            raise UsageError(f"/compact {argument} is not known", hint="use /compact or /compact off")
        self._session.set_compacts(not argument)
        if argument:
            always = "; but the setting `compaction` is auto" if self.client.compacts else ""
            await self._say(f"a conversation that does not fit the context is an error again{always}")
            return
        if not self.answering and self._session.dialogue[-1].role == "user":
            await self._do_retry("")
            return
        await self._say(
            "once the conversation does not fit, its oldest messages are left out of what the model gets; all of it "
            "stays here and on disk"
        )

    async def _do_copy(self, what: str) -> None:
        answer = self._answer.text if self._answer is not None else ""
        answer = answer or (self._session.last_answer.content if self._session.last_answer else "")
        if not answer:
            raise UsageError("there is no answer to copy yet")
        kind, _, number = what.partition(" ")
        if kind == "":
            self._to_clipboard(answer, "the answer")
            return
        if kind != "code" or (number and not number.strip().isdigit()):
            raise UsageError(f"/copy {what} is not known", hint="use /copy, /copy code or /copy code 2")
        blocks = code_blocks(answer)
        at = int(number) if number else len(blocks)
        if not 1 <= at <= len(blocks):
            raise UsageError(f"the last answer has {len(blocks)} code blocks" + (f", not {at}" if number else ""))
        self._to_clipboard(blocks[at - 1], f"code block {at} of {len(blocks)}")

    def _to_clipboard(self, text: str, what: str) -> None:
        self.copy_to_clipboard(text)
        how = "" if self._copy_with_tool(text) else " (through the terminal)"
        self.notify(f"copied {what}, {len(text):,} characters{how}", timeout=3)

    async def _do_save(self, name: str, overwrite: bool = False) -> None:
        if not name:
            raise UsageError("/save needs a file name", hint="for example /save chat.md")
        path = Path(name).expanduser()
        try:
            with path.open("w" if overwrite else "x", encoding="utf-8") as f:
                f.write(self._session.to_markdown())
        except FileExistsError:
            raise UsageError(f"{path} exists already", hint=f"/save! {name} overwrites it") from None
        except OSError as e:
            raise UsageError(f"{path} can't be written: {e.strerror or e}") from e
        await self._say(f"saved to {path}")

    async def _do_save_over(self, name: str) -> None:
        await self._do_save(name, overwrite=True)

    async def _do_attach(self, name: str) -> None:
        if not name:
            raise UsageError("/attach needs a file name", hint="for example /attach notes.txt")
        attached = read_text(Path(name))
        check_room([*self._attached, attached], self.n_ctx)
        self._attached.append(attached)
        self._show_state()

    async def _do_system(self, text: str) -> None:
        if text:
            self._session.set_system("" if text == "-" else text)
        now = self._session.system
        await self._say(f"system prompt: {now}" if now else "no system prompt; /system TEXT sets one")

    async def _do_model(self, name: str) -> None:
        models = await self.client.models()
        names = [m.name for m in models]
        if not name:
            lines = [f"{'>' if m == self.model else ' '} {m}" for m in names]
            more = "\n/model NAME uses another" if len(names) > 1 else "\nlocalllm chat -m NAME starts with another"
            await self._say("models on this server:\n" + "\n".join(lines) + more)
            return
        if name not in names:
            raise UsageError(f"this server has no model {name!r}", hint="it has " + ", ".join(names))
        self.model = self._session.model = name
        self._learn_context(models)
        await self._say(f"{name} answers from here on")

    async def _do_help(self, _: str) -> None:
        await self._say(commands.help_markdown(), markdown=True)

    async def _do_quit(self, _: str) -> None:
        await self.action_quit()

    async def _ask_models(self) -> None:
        if self.n_ctx is None:
            try:
                self._learn_context(await self.client.models())
            except LocalLLMError as e:
                await self._trouble(e)

    def _learn_context(self, models: list[ServedModel]) -> None:
        self.n_ctx = next((m.n_ctx for m in models if m.name == self.model), None)
        self._show_numbers()
