"""The panel of conversations and of the words found in them; Enter opens the chosen turn."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rich.cells import cell_len
from rich.text import Text as RichText
from textual import events
from textual.widgets import Input, Static

from localllm.conversation.history import ConversationSummary, History
from localllm.conversation.history_search import SearchHit, TurnText
from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control import command_actions
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import ago, elide, how_many
from localllm_tui.control.keys import PICKER
from localllm_tui.control.terminal import one_line, printable
from localllm_tui.screens.picking import LISTED, Picker

if TYPE_CHECKING:
    from localllm_tui.screens.chat import ChatScreen

MIN_PREVIEW_LINES = 20
# Of a longer title, at least this much is shown.
_MIN_TITLE_CELLS = 18
_MIN_WITH_MODEL = 64
# Hits shown per conversation. A search in one conversation shows all hits.
HITS_SHOWN = 3
# The characters of a turn that are read for its line in the list, and for its preview.
_LINE_CHARS = 400
_GAPS = re.compile(" {2,}")
_AFTER_HIT = 6  # a line has room for so many characters after its hit
_MARKS = re.compile(r"```\w*|`|\*\*")
_EXCERPT_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """A conversation, and a turn of it (0: wherever it was left); `words` that were found there."""

    conversation_id: str
    turn_id: int = 0
    words: str = ""


# Lines of the list, and the turn that each opens.
Rows: TypeAlias = list[tuple[RichText, TurnPlace]]


class ConversationPicker(Picker[TurnPlace], keys=PICKER):
    """Picks a conversation or a turn. `only`: it looks into this conversation alone."""

    DEFAULT_CSS = """
    ConversationPicker > Vertical { max-width: 110; height: 80%; }
    ConversationPicker #preview { display: block; height: 6; border-top: solid $panel; color: $hint; }
    ConversationPicker.-low #preview { display: none; }
    """

    def __init__(self, history: History, query: str = "", *, only: str | None = None) -> None:
        self.history = history
        self.only = only
        self._removing: TurnPlace | None = None
        about = "conversations"
        looks_in = "titles and texts"
        self.key_context = "choosing"
        if only is not None:
            self.key_context = "finding"
            about = "find in this conversation"
            looks_in = "all messages of this conversation, on every branch"
        super().__init__(about, query, f"search {looks_in}")

    @property
    def width(self) -> int:
        return max(20, min(110, self.app.size.width * 9 // 10) - 8)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < MIN_PREVIEW_LINES, "-low")

    def on_option_list_option_highlighted(self) -> None:
        self._removing = None
        self._preview(self.highlighted)

    def action_remove(self) -> None:
        """Remove the highlighted conversation after the key is pressed twice."""
        chosen = self.highlighted
        if chosen is None or self.only is not None:
            return
        if chosen.turn_id:
            self.found("remove a turn in its conversation: Enter opens it")
            return
        if self._removing != chosen:
            self._removing = chosen
            title = elide(one_line(self.history.get(chosen.conversation_id).title), 40)
            self.found(f"press Ctrl+X again to remove “{title}” permanently")
            return
        try:
            self.history.delete(chosen.conversation_id)
        except LocalLLMError as e:
            self._removing = None
            self.found(e.message)
            return
        self.fill(self.query_one(Input).value)

    # -- what is listed ----------------------------------------------------------------------------

    def fill(self, query: str) -> None:
        self._removing = None
        rows: Rows = []
        try:
            if self.only is None:
                rows, status = self._conversations(query)
            else:
                rows, status = self._turns(query, self.only)
        except LocalLLMError as e:
            status = e.message
        self.show(rows, status)
        if not rows:
            self._preview(None)

    def _conversations(self, query: str) -> tuple[Rows, str]:
        found = self.history.list(query.strip() or None, limit=LISTED)
        hits: dict[str, list[SearchHit]] = defaultdict(list)
        if query.strip():
            for hit in self.history.search(query):
                hits[hit.conversation_id].append(hit)
        rows: Rows = []
        for summary in found:
            rows.append((_line(summary, self.width), TurnPlace(summary.id)))
            for hit in hits[summary.id][:HITS_SHOWN]:
                line = RichText("  ").append_text(_hit(hit, self.width - 2))
                rows.append((line, TurnPlace(summary.id, hit.message_id, query)))
        if found:
            return rows, how_many(len(found), "conversation")
        return rows, "nothing found" if query else "no conversations yet"

    def _turns(self, query: str, conv_id: str) -> tuple[Rows, str]:
        rows: Rows = []
        if not query.strip():
            for turn in self.history.questions(conv_id, _LINE_CHARS):
                line = RichText(elide(one_line(turn.text), self.width))
                rows.append((line, TurnPlace(conv_id, turn.turn_id)))
            return rows, "type words to find, or choose a question"
        found = self.history.search(query, limit=10 * LISTED)
        hits = [hit for hit in found if hit.conversation_id == conv_id]
        for hit in hits[:LISTED]:
            rows.append((_hit(hit, self.width), TurnPlace(conv_id, hit.message_id, query)))
        if hits:
            return rows, how_many(len(hits), "turn")
        return rows, "nothing found"

    def _preview(self, place: TurnPlace | None) -> None:
        """Show the end of the highlighted conversation, or the highlighted turn."""
        if place is None:
            self.query_one("#preview", Static).update("")
            return
        try:
            about = self.history.get(place.conversation_id)
            turns = self.history.newest_turns(place.conversation_id, 2)
            if place.turn_id:
                turns = self.history.turn_text(place.conversation_id, place.turn_id)
        except LocalLLMError:
            return  # another window removed it
        last_s = turns[-1].created_s if turns else about.updated_s
        at = time.strftime("%d %b %Y, %H:%M", time.localtime(last_s))
        facts = f"{one_line(about.model)} · {at} · {how_many(about.n_messages, 'message')}"
        shown = RichText()
        shown.append(elide(facts, self.width), "bold")
        for turn in turns:  # in four lines, or two turns in two lines each
            cells = 4 // len(turns) * (self.width - 8)
            shown.append("\n" + elide(self._excerpt(turn, place.words.split()), cells))
        self.query_one("#preview", Static).update(shown)

    def _excerpt(self, turn: TurnText, words: Sequence[str]) -> str:
        """A turn in a line. If the last of these words is far from its beginning, the line begins
        shortly before that word."""
        who = "You" if turn.role == "user" else "Answer"
        lower = turn.text.lower()
        at_word = max([lower.find(word.lower()) for word in words], default=0)
        if at_word <= self.width:
            return f"{who}: {_unmarked(turn.text[:_EXCERPT_CHARS])}"
        start = at_word - self.width // 2
        return f"{who}: …{_unmarked(turn.text[start : start + _EXCERPT_CHARS])}"


def _line(summary: ConversationSummary, width: int) -> RichText:
    title = printable(summary.title).replace("\n", " ")
    when = ago(time.time() - summary.updated_s)
    facts = f"{when} · {how_many(summary.n_messages, 'message')}"
    if width >= _MIN_WITH_MODEL:
        facts = f"{elide(one_line(summary.model), 24)} · {facts}"
    elif width - len(facts) - 2 < min(cell_len(title), _MIN_TITLE_CELLS):
        facts = when
    title = elide(title, width - len(facts) - 2)
    # A Text, because brackets in a plain string would be read as markup.
    return RichText(title + " " * max(2, width - len(facts) - cell_len(title)) + facts)


def _unmarked(text: str) -> str:
    """Markdown in a line, without its marks of code and of emphasis."""
    return one_line(_MARKS.sub("", text))


def _hit(hit: SearchHit, width: int) -> RichText:
    who = "You: " if hit.role == "user" else "Answer: "
    line = RichText(who)
    before = _GAPS.sub(" ", _MARKS.sub("", printable(hit.snippet[: hit.at])))
    room = max(0, width - len(who) - (hit.end - hit.at) - _AFTER_HIT)
    if len(before) > room:
        before = "…" + before[len(before) - room :]
    line.append(before)
    line.append(printable(hit.snippet[hit.at : hit.end]), "bold underline")
    line.append(_MARKS.sub("", printable(hit.snippet[hit.end :])))
    line.truncate(width, overflow="ellipsis")
    return line


async def open_conversations(screen: ChatScreen, chat: ChatController, words: str) -> None:
    """/list, Ctrl+O: the panel of conversations."""
    await _open(screen, chat, ConversationPicker(chat.history, words))


async def open_find(screen: ChatScreen, chat: ChatController, words: str) -> None:
    """/find, Ctrl+F: search this conversation. Raises UsageError if it is empty."""
    if chat.session.id is None:
        raise UsageError("the conversation has no turns yet")
    await _open(screen, chat, ConversationPicker(chat.history, words, only=chat.session.id))


async def _open(screen: ChatScreen, chat: ChatController, picker: ConversationPicker) -> None:
    async def show(place: TurnPlace | None) -> None:
        if place is not None:
            await command_actions.resume(chat, place.conversation_id, place.turn_id)
        elif chat.session.id is not None and not chat.history.holds(chat.session.id):
            await command_actions.new(chat, "")  # it was removed in the list
        if place is not None and place.words:
            screen.window.search(place.conversation_id, place.words)

    async def report(place: TurnPlace | None) -> None:
        await chat.reporting(show(place))
        chat.face.changed()

    await screen.app.push_screen(picker, report)
