"""The chat's screen: keys and slash commands, on top of the layers that show a conversation and ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.binding import BindingType
from textual.widgets import TextArea

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.bindings import bindings_of
from localllm_tui.control import command_actions, commands, titles
from localllm_tui.control.attachments import typed_in
from localllm_tui.control.chat import ChatOptions
from localllm_tui.control.client import ListedModel
from localllm_tui.control.formatting import elide, fitted
from localllm_tui.control.keys import CHAT, KeyContext, hints
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import DeferredGc, KeyboardTerminal, one_line
from localllm_tui.messages import CopyWanted, FilesDropped, MuchPasted, ScrollTranscript, TurnAsked, TurnClicked
from localllm_tui.screens.background import start
from localllm_tui.screens.chat_catalog import ChatCatalogScreen
from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.line_filters import title
from localllm_tui.widgets.transcript import TurnView
from localllm_tui.widgets.turns import EarlierTurns

# Dialogs are imported when they open: the first paint does not wait for them.
if TYPE_CHECKING:
    from localllm_tui.screens.picker import TurnPlace

STATUS_EVERY_S = 0.2
HITS = 2_000
# A number with nothing after it for so long is a key, and not the beginning of a message.
ALONE_S = 0.6
# Long enough that nobody is about to ask, short enough that titles are there when one looks for them.
TITLE_AFTER_S = 20.0


class ChatScreen(ChatCatalogScreen):
    """The chat: keys and slash commands (implements control.chat.Chat). `copy` writes the system's clipboard."""

    BINDINGS: ClassVar[list[BindingType]] = bindings_of(CHAT)

    def __init__(self, options: ChatOptions, copy: Callable[[str], bool], typed: str = "") -> None:
        super().__init__(options)
        self._copy_with_tool = copy
        self._terminal = KeyboardTerminal()
        self.titles_after_s: float | None = TITLE_AFTER_S  # of quiet; None: no titles are made
        self._quiet_since_s = time.monotonic()
        self._typed_before = typed
        self._removing = 0  # the turn that the next D removes
        self._searched = ""
        self._found: list[int] = []  # the turns that have what was searched for, oldest first
        self._deferred_gc = DeferredGc()

    async def on_mount(self) -> None:
        self._deferred_gc.begin()
        self.set_interval(STATUS_EVERY_S, self._tick)
        await self._show_session()
        self.composer.focus()
        self.composer.insert(self._typed_before)
        self.call_after_refresh(self.begin)

    async def on_unmount(self) -> None:
        self._deferred_gc.end()
        await self.tools.switch_off()
        self._drafts.close()

    async def _tick(self) -> None:
        self.show_pulls()
        if self._more_below != (self._last is not None or self.transcript.more_below):
            self._show_state()
        self._unsaved.write_if_due()
        if self._terminal.gone and not self._leaving:
            await self.leave()
        elif self._answering is not None and not self._answering.closed:
            self._answering.save_if_due()
            self._show_numbers()
            self._quiet_since_s = time.monotonic()
            self._deferred_gc.busy()
        else:
            self._deferred_gc.quiet(time.monotonic() - self._quiet_since_s)
            self._title_when_quiet()

    def _title_when_quiet(self) -> None:
        """Generate a title once nothing was typed or answered for a while."""
        quiet_s = time.monotonic() - self._quiet_since_s
        if self.titles_after_s is None or quiet_s < self.titles_after_s or not titles.wanted(self.session):
            return
        self._quiet_since_s = time.monotonic()
        making = partial(titles.generate, self.client, self.model, self.session)
        start(self, making, "title")

    def _not_quiet(self) -> None:
        self._deferred_gc.busy()
        self._quiet_since_s = time.monotonic()
        self.workers.cancel_group(self, "title")

    # -- keys ----------------------------------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        """What was typed before there was an input comes here, after `on_mount`."""
        if event.is_printable and event.character and self.focused in (None, self.composer):
            self.composer.insert(event.character)

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        if event.text_area is self.composer:
            self._queued = False
            self._not_quiet()
            text = self.composer.text
            self.composer.menu.offer(text)
            if self._editing is None and commands.parse(text) is None:  # commands are no drafts
                self._drafts.save(self.session.id, text)
            self._counting.soon()
            self._show_state()
            if self._recent_named(text):
                self.set_timer(ALONE_S, partial(self._open_recent, text))

    def _recent_named(self, text: str) -> str:
        """The conversation that a number alone opens, in an empty one; "" where there is none."""
        nth = int(text) if len(text) == 1 and text in "123" else 0
        return self._recent[nth - 1] if 0 < nth <= len(self._recent) and not self.session.turns else ""

    async def _open_recent(self, typed: str) -> None:
        """Open it unless more was typed since: a message may begin with a number."""
        if self.composer.text == typed and (conv_id := self._recent_named(typed)) and not self.app.screen.is_modal:
            self.composer.clear()
            try:
                await command_actions.resume(self, conv_id)
            except LocalLLMError as e:
                await self.trouble(e)

    def on_scroll_transcript(self, event: ScrollTranscript) -> None:
        self.transcript.page(event.pages)

    async def action_stop(self) -> None:
        self._queued = False
        self.workers.cancel_group(self, "shell")
        if self.answering:
            await self.stop_answer()
        elif self._editing is not None:
            self._editing = None
            self.composer.replace_text(self._draft)
            self._show_state()

    def _show_state(self) -> None:
        """Keep the warning about the next D in the frame while its turn is selected."""
        super()._show_state()
        selected, turns = self.transcript.selected, [turn.id for turn in self.session.turns]
        if selected is not None and selected.turn_id in self._found:
            at = f"{self._found.index(selected.turn_id) + 1} of {len(self._found)}"
            self.composer.border_title = title(f"found “{elide(one_line(self._searched), 30)}”: turn {at}")
            self.composer.border_subtitle = fitted(hints(KeyContext.FOUND), self.size.width - 8)
        if selected is not None and selected.turn_id == self._removing and self._removing in turns:
            follows = len(turns) - 1 - turns.index(self._removing)
            with_it = f" and the {follows} after it" if follows else ""
            self.composer.border_title = f"D again removes this turn{with_it} for good"

    def action_select(self) -> None:
        if not self.transcript.views:
            self.notify("nothing was said yet: there is no turn to select", timeout=3, markup=False)
        self.transcript.action_select(-1)
        self._show_state()

    def on_turn_clicked(self, event: TurnClicked) -> None:
        self.transcript.select(next((v for v in self.transcript.views if v.turn_id == event.turn_id), None))
        self._show_state()

    def on_turn_selected(self) -> None:
        self._show_state()

    def on_selection_ended(self) -> None:
        self._search("", [])
        self.composer.focus()
        self._show_state()

    async def on_turn_asked(self, event: TurnAsked) -> None:
        turns = {t.id: t for t in self.session.turns}
        turn, selected = turns.get(event.turn_id), self.transcript.selected
        if turn is None or selected is None:
            return
        if event.what == "thinking":
            if isinstance(selected, AnswerView):
                selected.toggle_thinking()
            return
        if event.what == "found":
            await self._show_next_found(turn.id, event.argument)
            return
        if event.what == "remove" and self._removing != turn.id:
            self._removing = turn.id
            self._show_state()
            return
        self._removing = 0
        try:
            await command_actions.run_on_turn(self, event.what, turn, event.argument)
        except LocalLLMError as e:
            self.notify(f"{e.message}. {e.hint or ''}".rstrip(". "), severity="warning", timeout=4, markup=False)
        self._reselect(event.what, turn, at=selected)

    # -- what was searched for -----------------------------------------------------------------------------------

    def _search(self, words: str, turns: list[int]) -> None:
        self._searched, self._found = words, turns
        self.transcript.search(words)

    async def _show_next_found(self, turn_id: int, step: int) -> None:
        """Go to the next hit (-1: the one before): in this turn, else in the next that has one, on whichever branch."""
        if not self._found:
            self.notify("Ctrl+F finds words in this conversation", timeout=3, markup=False)
            return
        if self.transcript.show_found(step):
            return
        at = (self._found.index(turn_id) + step) % len(self._found) if turn_id in self._found else 0
        view = next((v for v in self.transcript.views if v.turn_id == self._found[at]), None)
        words, turns = self._searched, self._found
        if view is not None:
            self.transcript.select(view)
        elif self.session.id is not None:
            await command_actions.resume(self, self.session.id, turns[at])
        self._search(words, turns)
        self._show_state()
        self.transcript.call_after_refresh(self.transcript.show_found, step, entering=True)

    def _reselect(self, what: str, turn: StoredMessage, at: TurnView) -> None:
        """Move the selection after an action: to the version that took the turn's place, or back to the input."""
        if what in ("copy", "code"):
            return
        if what == "version":
            views = [v for v in self.transcript.views if self.session.tree.is_version_after(v.turn_id, turn.parent_id)]
            self.transcript.select(views[0] if views else None)
        elif what == "remove":
            self.transcript.select(None)
            self.transcript.action_select(-1)
        else:
            self.transcript.select(None)
        self._show_state()

    async def interrupted(self) -> bool:
        """Take Ctrl+C: copy what is selected, else clear the input, else stop the answer. False where there was none."""
        await self.composer.caught_up()
        selected = self.get_selected_text() or self.composer.selected_text
        if selected:
            self.to_clipboard(selected, "the selection")
            self.clear_selection()
            return True
        self._queued = False
        if self.composer.text and self.transcript.selected is None:
            self.composer.clear()  # an edit like any other: Ctrl+Z brings it back
            return True
        if not self.answering:
            return False
        await self.stop_answer()
        return True

    def action_thinking(self) -> None:
        for view in reversed(self.transcript.query(AnswerView)):
            if view.toggle_thinking():
                self.transcript.follow()
                return

    async def action_command(self, name: str) -> None:
        await self.composer.caught_up()
        await self.run_command(name, "")

    # -- files ---------------------------------------------------------------------------------------------------

    async def on_files_wanted(self) -> None:
        from localllm_tui.screens.files import FilePicker

        def chosen(path: Path | None) -> None:
            if path is not None:
                self.call_later(self._file_chosen, path)

        await self.app.push_screen(FilePicker(self.client, self.model, self.n_ctx, Path.cwd()), chosen)

    async def _file_chosen(self, path: Path) -> None:
        self.composer.insert(f"{path.name} ")  # after the @
        await self.run_command("attach", str(path))

    async def on_files_dropped(self, event: FilesDropped) -> None:
        for path in event.paths:
            await self.run_command("attach", str(path))

    def on_copy_wanted(self, event: CopyWanted) -> None:
        self.to_clipboard(event.text, event.what)

    async def on_much_pasted(self, event: MuchPasted) -> None:
        try:
            command_actions.attach_text(self, f"pasted-{len(self.attached) + 1}.txt", event.text)
        except LocalLLMError as e:
            await self.trouble(e)

    # -- what the commands do here (control.chat.Chat) ------------------------------------------------------------

    async def run_command(self, name: str, argument: str) -> None:
        """Do what a slash command says, or say why not."""
        module, _, function = commands.opener(name).partition(":")
        try:
            if module:  # read when it is asked for: the chat is there sooner
                await getattr(import_module(f"localllm_tui.screens.{module}"), function)(self, argument)
            else:
                await commands.run(self, name, argument)
        except LocalLLMError as e:
            await self.trouble(e)
        self._show_head()

    async def open(self, session: Session, at: int = 0) -> None:
        """Show another conversation, at the turn of this id (0: its end); the draft of this one is kept."""
        await self.stop_answer()
        self._drafts.save(self.session.id, self.composer.text if self._editing is None else self._draft)
        self.session = session
        await self._show_session(at)
        if at:
            self.transcript.select(next((v for v in self.transcript.views if v.turn_id == at), None))
            self._show_state()

    async def choose(self, words: str, *, within: bool = False) -> None:
        """Let the user pick a conversation, searching for `words`, and open it; `within`: a turn of this one."""
        from localllm_tui.screens.picker import ConversationPicker

        def chosen(place: TurnPlace | None) -> None:
            self.call_later(self._after_choice, place)

        await self.app.push_screen(
            ConversationPicker(self.history, words, within=self.session.id if within else None), chosen
        )

    async def _after_choice(self, place: TurnPlace | None) -> None:
        try:
            if place is not None:
                await command_actions.resume(self, place.conversation_id, place.turn_id)
                if place.words:
                    hits = self.history.search(place.words, limit=HITS)
                    self._search(
                        place.words, sorted(h.message_id for h in hits if h.conversation_id == place.conversation_id)
                    )
                    self._show_state()
                    self.transcript.call_after_refresh(self.transcript.show_found, 1, entering=True)
            elif self.session.id is not None and not self.history.holds(self.session.id):
                await command_actions.new(self, "")  # it was removed in the list
        except LocalLLMError as e:
            await self.trouble(e)

    async def answer_again(self, to: StoredMessage | None = None, *, continues: bool = False, model: str = "") -> None:
        """Ask for another answer to a question (None: the last), or to that of an answer; `continues`: for more of it.

        Raises UsageError when nothing was asked, or there is nothing to go on with.
        """
        self._unsaved.write_all()
        keep = self.session.answer(to, continues=continues, model=model)
        await self._ensure_shown(keep.question.id)
        views = self.transcript.views
        after = next((i + 1 for i, v in enumerate(views) if v.turn_id == keep.question.id), len(views))
        stay = set(views[:after])
        await self.transcript.remove_children(
            [w for w in self.transcript.children if w not in stay and not isinstance(w, EarlierTurns)]
        )
        self._last = None
        await self._start_answer(keep)

    def edit(self, turn: StoredMessage) -> None:
        if self._editing is None:
            self._draft = self.composer.text
        self._editing = turn
        self.composer.replace_text(typed_in(turn))
        self._show_state()

    async def write(self, text: str) -> None:
        self.composer.replace_text(text)

    async def approve(self, about: str, what: str) -> bool:
        from localllm_tui.screens.dialogs import Approval

        said: bool = await self.app.push_screen(Approval(about, what), wait_for_dismiss=True)
        return said is True

    def attach(self, name: str, text: str) -> None:
        self.attached.append((name, text))
        self._counting.soon()
        self._show_state()

    def detach(self) -> None:
        self.attached = []
        self._counting.soon()
        self._show_state()

    def use_model(self, name: str, models: list[ListedModel]) -> None:
        self.model = self.session.model = name
        self._learn_context(models)

    def to_clipboard(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(text)
        how = "" if self._copy_with_tool(text) else " (through the terminal)"
        self.notify(f"copied {what}, {len(text):,} characters{how}", timeout=3)

    def tell_elsewhere(self, text: str) -> None:
        self.app.notify_elsewhere(text)  # type: ignore[attr-defined]

    async def leave(self) -> None:
        """End the chat: save the answer so far and stop downloads, which resume when asked for again."""
        if self.pulls is not None:
            self.pulls.stop_all()
        self._leaving = True
        if self._answering is not None:
            self._answering.close()
        with suppress(LocalLLMError):
            self._unsaved.write_all()
        self.app.exit()
