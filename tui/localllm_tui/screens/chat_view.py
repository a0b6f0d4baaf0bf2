"""The lowest layer of the chat's screen: its widgets, the conversation in them, and what their frames say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from textual import events
from textual.app import ComposeResult
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widget import Widget

from localllm.conversation.history import ConversationSummary, StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control import commands, sampling, wording
from localllm_tui.control.answering import AnswerStream
from localllm_tui.control.attachments import typed_in
from localllm_tui.control.chat import ChatOptions
from localllm_tui.control.client import ListedModel
from localllm_tui.control.interfaces import is_here
from localllm_tui.control.keys import KeyContext
from localllm_tui.control.local_state import Drafts
from localllm_tui.control.meter import StatusFigures, TokenCosts, UnsentMessage
from localllm_tui.control.physics import AnswerSpeed, ModelPhysics, headline
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import one_line
from localllm_tui.control.tools import ToolBox
from localllm_tui.screens.background import TokenCounter
from localllm_tui.widgets.composer import Composer
from localllm_tui.widgets.glass import LEAST_COLUMNS, GlassPanel
from localllm_tui.widgets.line_filters import title
from localllm_tui.widgets.slash_menu import SlashMenu
from localllm_tui.widgets.status import HeadLine, StatusLine
from localllm_tui.widgets.transcript import Transcript
from localllm_tui.widgets.turns import UNANSWERED, ChatNote, EarlierTurns, ErrorNote, LaterTurns, view_of

EARLIER_SHOWN = 3
# A long conversation opens with its newest turns: each is a widget tree, and a hundred take seconds to lay out.
TURNS_SHOWN = 24
# Narrower, the line above the conversation has no room for what a token costs.
LEAST_HEADLINE_COLUMNS = 100
TURNS_ABOVE = 5  # above a turn that was searched for


class ChatViewScreen(Screen[None]):
    """Shows a conversation and its figures; the layers above change it."""

    DEFAULT_CSS = """
    ChatViewScreen { layout: vertical; }
    """

    def __init__(self, options: ChatOptions) -> None:
        super().__init__()
        self.client = options.client
        self.history = options.history
        self.model = options.model
        self.n_ctx: int | None = None
        self.physics: ModelPhysics | None = None
        self.listed: ListedModel | None = None
        self.tools = ToolBox(options.tools)
        self.greeting = options.greeting
        self.system_asked = options.system
        self.runs_commands = False
        self.attached: list[tuple[str, str]] = list(options.attached)
        self.session = Session(options.history, options.model, conv_id=options.resume, system=options.system)
        self._drafts = Drafts(options.history.path.parent / "drafts")
        self._counting = TokenCounter(self, self._count, self.show_counts)
        self._columns = 0
        self._answering: AnswerStream | None = None
        self._editing: StoredMessage | None = None
        self._draft = ""  # what was in the input when an edit began
        # The turns on screen: from the first to the last but one; None: to the end.
        self._first = 0
        self._last: int | None = None
        self._warned = self._queued = False
        self._more_below = False
        self._recent: list[str] = []  # the conversations that the welcome offers

    @property
    def answering(self) -> bool:
        """Whether an answer is on its way, or being drawn to its end."""
        return False

    def compose(self) -> ComposeResult:
        yield GlassPanel()
        yield HeadLine()
        yield Transcript(id="transcript")
        menu = SlashMenu()
        yield menu
        yield Composer(menu)
        yield StatusLine()

    @property
    def composer(self) -> Composer:
        return self.query_one("#composer", Composer)

    @property
    def transcript(self) -> Transcript:
        return self.query_one("#transcript", Transcript)

    def on_resize(self, event: events.Resize) -> None:
        self._columns = event.size.width
        self.query_one(GlassPanel).fold(narrow=event.size.width < LEAST_COLUMNS)
        self.show_counts()

    # -- the conversation on screen ------------------------------------------------------------------------------

    async def _show_session(self, at: int = 0) -> None:
        """Draw the session from scratch, around the turn of this id (0: its end), and load its draft."""
        self._editing, self._warned, self._queued = None, False, False
        self._choose_window(at)
        await self.transcript.remove_children()
        await self.redraw()
        self.composer.replace_text(self._drafts.load(self.session.id))
        self._counting.afresh()
        if not at:
            self.transcript.restart()

    def _choose_window(self, at: int = 0) -> None:
        """Choose the turns to be on screen: those around this one, or the last ones."""
        turns = self.session.turns
        place = next((i for i, t in enumerate(turns) if t.id == at), len(turns))
        self._first = max(0, min(place - TURNS_ABOVE, len(turns) - TURNS_SHOWN))
        self._last = self._first + TURNS_SHOWN
        if self._last >= len(turns):
            self._last = None

    async def redraw(self) -> None:
        """Show the session's current branch; turns that are on screen already stay."""
        turns = self.session.turns
        if self._first >= len(turns) or (self._last is not None and self._last >= len(turns)):
            self._choose_window()
        wanted = turns[self._first : self._last]
        same = 0
        for view, turn in zip(self.transcript.views, wanted, strict=False):
            if view.turn_id != turn.id:
                break
            view.show_place(turn.id, self.session.place(turn))
            same += 1
        keep = set(self.transcript.views[:same])
        await self.transcript.remove_children([w for w in self.transcript.children if w not in keep])
        sent = {t.id for t in self.session.sent_turns}
        widgets: list[Widget] = [view_of(self.session, t, sent) for t in wanted[same:]]
        if not turns:
            engine = self.client.engine
            elsewhere = engine.where if engine is not None and not is_here(engine) else ""
            earlier = self._earlier()
            self._recent = [summary.id for summary in earlier]
            text = wording.welcome(self.model, self.greeting, earlier, elsewhere)
            widgets.append(ChatNote(text, markdown=True))
        elif self._last is not None:
            widgets.append(LaterTurns(len(turns) - self._last))
        elif self.session.unanswered:
            widgets.append(ChatNote(UNANSWERED))
        await self.transcript.mount_all(widgets)
        await self._mount_earlier()
        self.composer.earlier_questions = [typed_in(t) for t in turns if t.role == "user"]
        self._counting.soon()
        self.show_counts()

    def _earlier(self) -> Sequence[ConversationSummary]:
        """The conversations that the welcome lists; none where the history can't be read."""
        with suppress(LocalLLMError):
            return self.history.list(limit=EARLIER_SHOWN)
        return ()

    async def on_later_wanted(self) -> None:
        """Turns below the last one shown come in."""
        if self._last is not None:
            self._last += TURNS_SHOWN
            if self._last >= len(self.session.turns):
                self._last = None
            self.transcript.release()
            self.transcript.following = False
            await self.redraw()
        self.call_after_refresh(self.transcript.more_came)

    async def _mount_earlier(self) -> None:
        if self._first:
            await self.transcript.mount(EarlierTurns(self._first), before=0)

    async def on_earlier_wanted(self) -> None:
        """Turns above the first one shown come in, and what was on screen stays where it is."""
        if not self._first:
            self.transcript.more_came()
            return
        end, self._first = self._first, max(0, self._first - TURNS_SHOWN)
        self.transcript.release()
        self.transcript.following = False
        first = next(iter(self.transcript.views), None)
        await self.transcript.query(EarlierTurns).remove()
        sent = {t.id for t in self.session.sent_turns}
        views = [view_of(self.session, t, sent) for t in self.session.turns[self._first : end]]
        await self.transcript.mount_all(views, before=0)
        await self._mount_earlier()
        if first is not None:
            self.call_after_refresh(self.transcript.scroll_to_widget, first, animate=False, top=True)
        self.call_after_refresh(self.transcript.more_came)

    async def say(self, text: str, *, markdown: bool = False) -> None:
        """Say something that is no part of the conversation."""
        await self.transcript.mount(ChatNote(text, markdown=markdown))
        self.transcript.follow(always=True)

    async def trouble(self, error: LocalLLMError, way_on: str = "") -> None:
        await self.transcript.mount(ErrorNote(error.message, error.hint, way_on))
        self.transcript.follow(always=True)

    # -- what the frames say -------------------------------------------------------------------------------------

    def _show_state(self) -> None:
        """Update the input's frame: the state, and what the keys do now."""
        box = self.composer
        context = (
            KeyContext.ANSWERING if self.answering else KeyContext.EDITING if self._editing else KeyContext.WRITING
        )
        if self.transcript.selected is not None:
            context = KeyContext.SELECTING
        names, costs = [name for name, _ in self.attached], self._counting.cost.words(self.n_ctx)
        self._more_below = self._last is not None or self.transcript.more_below
        below = " · ↓ more below" if self._more_below else ""
        box.border_title = title(wording.title(context, names, costs) + below)
        self._show_head()
        width = (self._columns or self.size.width) - 8
        box.border_subtitle = title(wording.footer(context, box.text, width, queued=self._queued, alone=self._alone))

    @property
    def _alone(self) -> bool:
        selected = self.transcript.selected
        turn = next((t for t in self.session.turns if selected is not None and t.id == selected.turn_id), None)
        return turn is not None and self.session.place(turn)[1] == 1

    @property
    def pulling(self) -> str:
        return ""

    @property
    def loading_words(self) -> str:
        """How far the model is loaded; "" once it is."""
        return self.client.engine.progress().words(one_line(self.model)) if self.client.engine is not None else ""

    def _show_head(self) -> None:
        engine, loading = self.client.engine, self.loading_words
        attached = f"attached to {engine.where}" if engine is not None and engine.where else ""
        width = self._columns or self.size.width
        speed = self.speed
        reads = ""
        told = self.query_one(GlassPanel).wanted  # the panel says it already
        if (
            self.physics is not None
            and speed is not None
            and speed.tok_s
            and width >= LEAST_HEADLINE_COLUMNS
            and not told
        ):
            reads = headline(self.physics, speed)
        how = sampling.words(self.listed.sampling, self.client.sampling) if self.listed is not None else ""
        parts = [loading, self.pulling, self._branch(), reads, attached, how, "tools on" if self.tools.on else ""]
        if not self.session.system and self.listed is not None and self.listed.has_system:
            parts.append("the preset's system prompt")
        busy = bool(loading or self.pulling)
        self.query_one(HeadLine).show(parts, self.session.system, busy=busy, width=width, title=self.session.title)

    def _branch(self) -> str:
        """Which version of the newest turn that has several is shown; "" where none has."""
        places = (self.session.place(turn) for turn in reversed(self.session.turns[-TURNS_SHOWN:]))
        at, of = next((place for place in places if place[1] > 1), (1, 1))
        return f"version {at} of {of}" if of > 1 else ""

    def _show_numbers(self) -> None:
        answering, session, said = self._answering, self.session, self._counting.cost.conversation
        if answering is not None and not answering.closed:
            n = StatusFigures.so_far(self.model, self.n_ctx, answering.meter, session.used_tokens)
        else:
            answer = session.last_answer
            used = session.used_tokens if session.counted or said is None else said
            n = StatusFigures.of(self.model, self.n_ctx, answer.meta if answer else {}, used)
        self.query_one(StatusLine).show(n)
        self._show_head()
        if self.query_one(GlassPanel).wanted:
            self.query_one(GlassPanel).show(self.physics, self.speed, self.loading_words)

    @property
    def speed(self) -> AnswerSpeed | None:
        """The speed of the newest answer; None before the first."""
        answering = self._answering
        return answering.speed(self.session.used_tokens) if answering is not None else None

    def show_counts(self) -> None:
        with suppress(NoMatches):  # a resize may come before the first compose
            self._show_numbers()
            self._show_state()

    def _typed(self) -> UnsentMessage:
        """The message in the input; empty for a command."""
        text = self.composer.text.strip()
        asked = "" if commands.parse(text) is not None else commands.question(text)
        return UnsentMessage(asked, tuple(self.attached), self._editing)

    async def _count(self) -> TokenCosts:
        if self.answering or (self._editing is not None and self._editing.role == "assistant"):
            return self._counting.cost
        return await TokenCosts.of(self.client, self.model, self.session, self._typed())

    async def _ask_models(self) -> None:
        if self.n_ctx is None:
            try:
                self._learn_context(await self.client.models())
            except LocalLLMError as e:
                await self.trouble(e)

    def _learn_context(self, models: list[ListedModel]) -> None:
        named = next((m for m in models if m.name == self.model), None)
        self.n_ctx = named.n_ctx if named is not None else None
        self.physics = ModelPhysics.of(named.physics) if named is not None else None
        self.listed = named
        self._counting.afresh()
        self.show_counts()
