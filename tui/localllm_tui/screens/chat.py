"""The full screen of a chat, with its keys. Helpers draw the lines around the conversation."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import TextArea

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.bindings import HasKeys
from localllm_tui.control import command_actions, commands, wording
from localllm_tui.control.answering import AnswerDisplay, PendingAnswer
from localllm_tui.control.attachments import dropped_files, files_and_folders, typed_in
from localllm_tui.control.chat import POLL_S, ChatController
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.face import Allowed
from localllm_tui.control.keys import CHAT
from localllm_tui.control.local_state import Drafts
from localllm_tui.control.meter import file_cost
from localllm_tui.control.terminal import copyable, keyboard
from localllm_tui.messages import (
    CopyWanted,
    FileChosen,
    MoreTurnsWanted,
    PastedToAttach,
    QuestionSubmitted,
)
from localllm_tui.screens.background_work import start
from localllm_tui.screens.frames import ChatFrames
from localllm_tui.screens.turn_window import TurnWindow
from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.composer import Composer, SlashMenu
from localllm_tui.widgets.figures import MIN_COLUMNS, GlassPanel, HeadLine, StatusLine
from localllm_tui.widgets.file_menu import FileMenu
from localllm_tui.widgets.transcript import Transcript
from localllm_tui.widgets.turns import ChatNote, ErrorNote, FirstRunPage, QuestionView

STATUS_EVERY_S = 0.2
# During an answer of this length the user may look at another window.
LONG_S = 10.0
# Seconds without typing and streaming after which garbage is collected.
TIDY_AFTER_S = 3.0
_NEVER = 1_000_000


def _files_here() -> list[str]:
    return files_and_folders(Path.cwd())


class ChatScreen(HasKeys, Screen[None], keys=CHAT):
    """Implements control.face.Face. `copy` writes the system's clipboard; `typed` was typed before
    there was an input."""

    DEFAULT_CSS = """
    ChatScreen { layout: vertical; }
    """
    full_screen = True

    def __init__(self, options: ChatOptions, copy: Callable[[str], bool], typed: str = "") -> None:
        super().__init__()
        self.chat = chat = ChatController(options, self)
        self.transcript = Transcript(id="transcript")
        self.transcript.thinking = options.thinking
        files = FileMenu(_files_here, self._cost_of)
        self.composer = Composer(SlashMenu(id="slash"), files)
        self.window = TurnWindow(chat, self.transcript)
        self._frames = ChatFrames(self, chat, self.window)
        self._drafts = Drafts(options.history.path.parent / "drafts")
        self._copy_with_tool = copy
        self._keyboard = keyboard()
        self._typed_before = typed
        self._tidy = False  # collected since something happened
        self._draft: str | None = None  # what was in the input when an edit began
        self._draft_of: str | None = None  # the conversation that what is typed is the draft of
        self._unsaved: tuple[str | None, str] | None = None  # that conversation, and a draft of it

    def compose(self) -> ComposeResult:
        yield GlassPanel(id="glass")
        yield HeadLine(id="head", markup=False)
        yield self.transcript
        yield self.composer.menu
        yield self.composer
        yield self.composer.files
        yield StatusLine(id="status")

    async def on_mount(self) -> None:
        # a full collection takes longer than a frame, so it runs in idle time
        self._gc_before = gc.get_threshold()
        gc.set_threshold(*self._gc_before[:2], _NEVER)
        self.set_interval(STATUS_EVERY_S, self._tick)
        await self._show_session(0)
        self.composer.focus()
        self.composer.insert(self._typed_before)
        self.call_after_refresh(self.chat.begin)

    async def on_unmount(self) -> None:
        gc.set_threshold(*self._gc_before)
        await self.chat.tools.switch_off()
        self._save_draft()
        self._drafts.close()

    def on_resize(self, event: events.Resize) -> None:
        self.query_one(GlassPanel).set_class(event.size.width < MIN_COLUMNS, "narrow")
        self._frames.show_all()

    async def _tick(self) -> None:
        chat = self.chat
        chat.tick()
        model = chat.take_next_model()
        if model:
            self.run_in_background(
                partial(commands.run_and_report, chat, "model", model), "next model"
            )
        if chat.pulls:
            self._frames.show_head()
        self._frames.show_if_scrolled()
        if self._keyboard is not None and not os.isatty(self._keyboard) and not chat.left:
            await chat.leave()
        elif chat.streaming is not None:
            self._frames.show_numbers()
        idle = chat.quiet_s >= TIDY_AFTER_S
        if idle and not self._tidy:
            gc.collect()
        self._tidy = idle

    # -- what is typed -----------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        """Insert characters that were typed before the input existed: they arrive after
        `on_mount`."""
        if event.is_printable and event.character and self.focused in (None, self.composer):
            self.composer.insert(event.character)

    def on_paste(self, event: events.Paste) -> None:
        """Give a paste at a selected turn to the input, where keys of turns do not apply to it."""
        if self.transcript.selected is not None:
            self.transcript.select(None)
            self.composer.post_message(events.Paste(event.text))

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        if event.text_area is not self.composer:
            return
        self.chat.queued = ""
        self.chat.busy()
        self.workers.cancel_group(self, "idle")
        text = self.composer.text
        self.composer.menu.offer(text)
        _ = self.composer.chosen_file
        if self.chat.editing is None and commands.parse(text) is None:  # commands are no drafts
            self._draft_of = self.chat.session.id
            self._unsaved = (self._draft_of, self.composer.written)
            # Waking the thread that writes may take as long as drawing, so the key is drawn first.
            self.call_after_refresh(self._save_draft)
        self._frames.count()
        self._frames.show_state()

    def _save_draft(self) -> None:
        """Save the draft that was typed last, unless it was sent or replaced meanwhile."""
        if self._unsaved is not None and self._unsaved[1] == self.composer.written:
            self._drafts.save(*self._unsaved)
        self._unsaved = None

    async def on_question_submitted(self, event: QuestionSubmitted) -> None:
        text = event.text.strip()
        if commands.parse(text) is not None or self.chat.recent_of(text):
            self.composer.replace_text("")
        await commands.submit(self.chat, text)

    async def action_command(self, name: str) -> None:
        await self.composer.keys_handled()
        await commands.run_and_report(self.chat, name, "")

    async def action_stop(self) -> None:
        self.chat.queued = ""
        self.workers.cancel_group(self, "shell")
        if self.chat.answering:
            await self.chat.stop_answer()
        elif self.chat.editing is not None:
            self.chat.editing = None
            self._end_edit()
            self._frames.show_state()

    async def interrupted(self) -> bool:
        """Handle Ctrl+C: copy the selection, else clear the input, else stop the answer.

        Returns False if there was no action to take.
        """
        await self.composer.keys_handled()
        selected = self.get_selected_text() or self.composer.selected_text
        if selected:
            self.copy(selected, "the selection")
            self.clear_selection()
            return True
        self.chat.queued = ""
        if self.composer.text and self.transcript.selected is None:
            self.composer.clear()  # an edit like any other: Ctrl+Z brings it back
            return True
        if not self.chat.answering:
            return False
        await self.chat.stop_answer()
        return True

    # -- the selected turn -------------------------------------------------------------------------

    def action_scroll_transcript(self, pages: int) -> None:
        self.transcript.page(pages)

    async def on_more_turns_wanted(self, event: MoreTurnsWanted) -> None:
        if event.step < 0:
            await self.window.show_earlier()
        else:
            await self.window.show_later()
        self._frames.show_all()

    def action_select(self) -> None:
        if not self.transcript.views:
            self.notify("the conversation has no turn to select yet", timeout=3, markup=False)
        self.transcript.action_select(-1)
        self._frames.show_state()

    def on_turn_selected(self) -> None:
        if self.transcript.selected is None:
            self.window.mark("", [])
            self.composer.focus()
        self._frames.show_state()

    async def action_turn(self, name: str, argument: int = 0) -> None:
        """Do a key's action on the selected turn; remove it only if the key is pressed twice."""
        view = self.transcript.selected
        frames = self._frames
        turns = [t for t in self.chat.session.turns if view is not None and t.id == view.turn_id]
        if not turns:
            return
        removing = frames.removing
        frames.removing = 0
        if name == "thinking":
            if isinstance(view, AnswerView):
                view.toggle_thinking()
        elif name == "found":
            if not await self.window.show_next(turns[0].id, argument):
                self.notify("Ctrl+F finds words in this conversation", timeout=3, markup=False)
        elif name == "remove" and removing != turns[0].id:
            frames.removing = turns[0].id
        else:
            await self._run_on_turn(name, turns[0], argument)
        frames.show_state()

    async def _run_on_turn(self, name: str, turn: StoredMessage, argument: int) -> None:
        """Do the action of a key on a turn. Then select the version that took the turn's place,
        else go back to the input."""
        try:
            await command_actions.run_on_turn(self.chat, name, turn, argument)
        except LocalLLMError as e:
            self.notify(wording.in_a_line(e), severity="warning", timeout=4, markup=False)
        if name in ("copy", "code"):
            return
        if name == "version":
            # Show as much as possible of the turns after the version, too.
            end = partial(self.transcript.scroll_end, animate=False, immediate=True)
            self.transcript.call_after_refresh(end)
            versions = {v.id for v in self.chat.session.versions(turn)}
            views = (view for view in self.transcript.views if view.turn_id in versions)
            self.transcript.select(next(views, None))
            return
        self.transcript.select(None)
        if name == "remove":
            self.transcript.action_select(-1)

    def action_thinking(self) -> None:
        for view in reversed(self.transcript.query(AnswerView)):
            if view.toggle_thinking():
                self.transcript.follow()
                return

    # -- files -------------------------------------------------------------------------------------

    def on_files_listed(self) -> None:
        self._frames.show_state()

    async def on_file_chosen(self, event: FileChosen) -> None:
        await commands.run_and_report(self.chat, "attach", str(Path.cwd() / event.name))

    async def _cost_of(self, name: str) -> tuple[str, bool]:
        chat = self.chat
        return await file_cost(chat.client, chat.model, Path.cwd() / name, chat.listed.n_ctx)

    def on_copy_wanted(self, event: CopyWanted) -> None:
        self.copy(event.text, event.what)

    async def on_pasted_to_attach(self, event: PastedToAttach) -> None:
        paths = dropped_files(event.text)
        for path in paths:
            await commands.run_and_report(self.chat, "attach", str(path))
        if not paths:
            name = f"pasted-{len(self.chat.attached) + 1}.txt"
            await self.chat.reporting(command_actions.attach_text(self.chat, name, event.text))

    # -- the first run -----------------------------------------------------------------------------

    async def action_pull(self, nth: int) -> None:
        """Pull one of the plans of the first run, counted from 1. The chat then goes on with it."""
        first_run = self.chat.first_run
        if first_run is None or nth > len(first_run.best):
            return
        choice = first_run.best[nth - 1]
        pull = first_run.pulls.get(choice.ref)
        if pull is not None and pull.done:
            await commands.run_and_report(self.chat, "model", pull.name)
        else:
            first_run.pulls.start(choice.ref).goes_on = True

    # -- what the chat asks of its face (control.face.Face) ----------------------------------------

    async def _mount_note(self, note: ChatNote | ErrorNote) -> None:
        await self.transcript.mount(note)
        self.transcript.follow(always=True)

    async def show_note(self, text: str, *, markdown: bool = False) -> None:
        await self._mount_note(ChatNote(text, markdown=markdown))

    async def show_error(self, error: LocalLLMError, next_steps: str = "") -> None:
        await self._mount_note(ErrorNote(error.message, error.hint, next_steps))

    def changed(self, *, recount: bool = False) -> None:
        self._frames.count(anew=recount)
        self._frames.show_all()

    async def show_session(self, at: int, before: str | None) -> None:
        draft = self._draft
        if draft is None:
            draft = self.composer.written
        self._drafts.save(before, draft)
        self._draft = None
        await self._show_session(at)
        if at:
            self.transcript.select(self.window.view(at))
            self._frames.show_state()

    async def _show_session(self, at: int) -> None:
        """Draw the session from scratch, around the turn of this id (0: its end), and load its
        draft."""
        self._draft_of = self.chat.session.id
        self.window.choose(at)
        await self.transcript.remove_children()
        await self.redraw()
        self.composer.replace_text(self._drafts.load(self.chat.session.id))
        self.changed(recount=True)
        if not at:
            self.transcript.restart()

    async def redraw(self) -> None:
        await self.window.draw()
        self.composer.earlier_questions = [
            typed_in(t) for t in self.chat.session.turns if t.role == "user"
        ]
        first_run = self.chat.first_run
        if first_run is not None and first_run.choices is None and not self.chat.session.turns:
            self.run_in_background(self._plan_first_run, "first run")
        self.changed()

    async def _plan_first_run(self) -> None:
        """Plan what the page of the first run offers. That takes half a second of a core, so the
        model is loaded first, and a question that waits for it is answered."""
        while not self.chat.client.ready:
            await asyncio.sleep(POLL_S)
        first_run = self.chat.first_run
        if first_run is not None and not self.chat.session.turns:
            await first_run.plan(self.chat.plans)

    async def show_question(self, turn: StoredMessage, *, edited: bool) -> None:
        if edited:
            self._end_edit()
            self.window.choose(self.chat.session.turns[-1].id)
            await self.redraw()
            self.transcript.follow(always=True)
        else:
            await self.window.ensure_shown(0)
            self._drafts.save(self._draft_of, "")
            self.composer.replace_text("")
            await self.transcript.mount(QuestionView(turn, place=self.chat.session.place(turn)))
            self.composer.earlier_questions.append(typed_in(turn))
        if turn.role == "user" and (edited or len(self.chat.session.turns) == 1):
            await self.transcript.query(ChatNote).remove()  # the welcome, or "no answer yet"
            await self.transcript.query(FirstRunPage).remove()
            self.transcript.restart()  # the remaining turns may be shorter than the screen

    def _end_edit(self) -> None:
        """Bring back what was in the input before an edit."""
        self.composer.replace_text(self._draft or "")
        self._draft = None

    async def show_answer(self, keep: PendingAnswer, *, again: bool) -> AnswerView:
        if again:
            await self.window.ensure_shown(keep.question.id)
            await self.window.draw(until=keep.question.id)
        begun = StoredMessage(0, "assistant", keep.text, keep.reasoning)
        view = AnswerView(begun, keep.model)
        await self.transcript.mount(view)
        view.start()
        self.transcript.follow(always=True)
        return view

    async def end_answer(
        self, shown: AnswerDisplay, stream: PendingAnswer, error: LocalLLMError | None
    ) -> None:
        assert isinstance(shown, AnswerView)
        turn = stream.turn
        if stream.meter.took_s >= LONG_S:
            outcome = "no answer" if error is not None else "answered"
            self.app.notify_unfocused(f"{outcome}: {self.chat.session.title}")  # type: ignore[attr-defined]
        if turn is not None:
            self.show_place(shown, turn)
            shown.end("" if error is not None else wording.note_under(turn))
            self.transcript.follow()
            return
        await shown.remove()
        await self.redraw()  # an empty retry keeps the earlier answer
        await self.transcript.query(ChatNote).remove()
        if error is None and stream.reason == "stopped":
            await self.show_note(
                "Stopped before the answer started: /retry asks again, /edit changes the question, "
                "/drop removes it"
            )
        elif error is None:
            await self.show_note(
                "The model gave an empty answer: /retry asks again, /edit changes the question, "
                "/drop removes it"
            )

    def show_place(self, shown: AnswerDisplay, turn: StoredMessage) -> None:
        if not isinstance(shown, AnswerView) or not shown.is_attached:
            return
        if turn.id in self.chat.session.all_turns:
            shown.show_place(turn.id, self.chat.session.place(turn))

    def submit_queued(self, text: str) -> None:
        if self.composer.written.strip() == text:
            self.post_message(QuestionSubmitted(text))

    async def approve(self, about: str, *outcome: str, tool: bool = False) -> Allowed:
        from localllm_tui.screens.dialogs import approved

        return await approved(self.app, about, *outcome, tool=tool)

    def edit(self, turn: StoredMessage) -> None:
        if self._draft is None:
            self._draft = self.composer.written
        self.composer.replace_text(typed_in(turn))

    async def write(self, text: str) -> None:
        self.composer.replace_text(text)

    def copy(self, text: str, name: str) -> None:
        clean, left_out = copyable(text)
        self.app.copy_to_clipboard(clean)
        note = f"copied {name}, {len(clean):,} characters"
        if left_out:
            note += f", {left_out}"
        if not self._copy_with_tool(clean):
            note += " (through the terminal)"
        self.notify(note, timeout=3)

    def run_in_background(self, name: Callable[[], Coroutine[Any, Any, None]], group: str) -> None:
        start(self, name, group, exit_on_error=group == "answer")

    async def run_on_screen(self, name: str, argument: str) -> bool:
        command = commands.known(name)
        if command is None or not command.screen or name.endswith("!"):
            return False
        module, _, function = command.screen.partition(":")
        # read on demand, so that the chat starts faster
        run = getattr(import_module(f"localllm_tui.screens.{module}"), function)
        await run(self, self.chat, argument)
        return True

    async def close(self) -> None:
        self.app.exit()
