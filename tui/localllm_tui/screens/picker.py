"""The panel of conversations: their trees, and the words found in them; what is chosen is opened at
that turn."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text as RichText
from textual import events
from textual.binding import BindingType
from textual.widget import Widget
from textual.widgets import Input, Static, Tree
from textual.widgets.tree import TreeNode

from localllm.conversation.history import ConversationSummary, History, StoredMessage
from localllm.conversation.history_search import Hit
from localllm.errors import LocalLLMError
from localllm_tui.bindings import bindings_of
from localllm_tui.control.attachments import typed_in
from localllm_tui.control.formatting import ago, elide, how_many
from localllm_tui.control.keys import PICKER, KeyContext
from localllm_tui.control.terminal import one_line, printable
from localllm_tui.screens.picking import Picker

LISTED = 200
LEAST_PREVIEW_LINES = 20
_LEAST_WITH_MODEL = 64
# Of one conversation; all of them where only one is looked at.
HITS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """A conversation, and a turn of it (0: wherever it was left); `words` that were found there."""

    conversation_id: str
    turn_id: int = 0
    words: str = ""


class ConversationPicker(Picker[TurnPlace | None]):
    """Picks a conversation or a turn. `only`: it looks into this conversation alone."""

    DEFAULT_CSS = """
    ConversationPicker > Vertical { max-width: 110; height: 80%; }
    ConversationPicker #preview { height: 6; border-top: solid $panel; color: $hint; }
    ConversationPicker.-low #preview { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(PICKER)

    def __init__(self, history: History, query: str = "", *, only: str | None = None) -> None:
        self.history, self.only = history, only
        self._tree: Tree[TurnPlace | None] = Tree("")
        self._tree.show_root, self._tree.guide_depth = False, 2
        self._removing: TurnPlace | None = None
        about, looks_in, self.key_context = "conversations", "titles and texts", KeyContext.CHOOSING
        if only is not None:
            self.key_context = KeyContext.FINDING
            about, looks_in = "find in this conversation", "all that was said here, on every branch"
        super().__init__(about, self._tree, query, f"search {looks_in}")

    def below(self) -> list[Widget]:
        return [Static("", id="preview", markup=False)]

    @property
    def width(self) -> int:
        return max(20, min(110, self.app.size.width * 9 // 10) - 8)

    def on_mount(self) -> None:
        super().on_mount()
        self.fill(self.query_text)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < LEAST_PREVIEW_LINES, "-low")

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[TurnPlace | None]) -> None:
        self._removing = None
        self._preview(event.node.data)

    def on_tree_node_selected(self, event: Tree.NodeSelected[TurnPlace | None]) -> None:
        if event.node.data is not None:
            self.dismiss(event.node.data)

    def pick(self) -> None:
        if self._highlighted() is not None:
            self.dismiss(self._highlighted())

    def moves(self) -> dict[str, Callable[[], object]]:
        moves, box = super().moves(), self.query_one(Input)
        if box.cursor_position == len(box.value):
            moves["right"] = self._unfold
        if not box.value:
            moves["left"] = self._fold
        return moves

    def action_remove(self) -> None:
        """Remove the highlighted conversation; asks by wanting the key twice."""
        chosen = self._highlighted()
        if chosen is None or self.only is not None:
            return
        if chosen.turn_id:
            self.found("a turn is removed in its conversation: Enter opens it there")
        elif self._removing != chosen:
            self._removing = chosen
            title = elide(one_line(self.history.get(chosen.conversation_id).title), 40)
            self.found(f"press Ctrl+X again to remove “{title}” for good")
        else:
            try:
                self.history.delete(chosen.conversation_id)
            except LocalLLMError as e:
                self._removing = None
                self.found(e.message)
            else:
                self.fill(self.query_one(Input).value)

    def _highlighted(self) -> TurnPlace | None:
        node = self._tree.cursor_node
        return node.data if node is not None else None

    # -- what is listed ----------------------------------------------------------------------------

    def fill(self, query: str) -> None:
        self._removing = None
        self._tree.clear()
        self._preview(None)
        try:
            said = (
                self._fill_all(query) if self.only is None else self._fill_turns(query, self.only)
            )
        except LocalLLMError as e:
            said = e.message
        self.found(said)
        if self._tree.root.children:
            self._tree.move_cursor_to_line(0)

    def _fill_all(self, query: str) -> str:
        found = self.history.list(query.strip() or None, limit=LISTED)
        hits: dict[str, list[Hit]] = defaultdict(list)
        for hit in self.history.search(query) if query.strip() else ():
            hits[hit.conversation_id].append(hit)
        for summary in found:
            node = self._tree.root.add(
                _line(summary, self.width), TurnPlace(summary.id), allow_expand=True
            )
            for hit in hits[summary.id][:HITS_SHOWN]:
                node.add_leaf(
                    _hit(hit, self.width - 4), TurnPlace(summary.id, hit.message_id, query)
                )
            if hits[summary.id]:
                node.expand()
        if not found:
            return "nothing found" if query else "no conversations yet"
        return how_many(len(found), "conversation")

    def _fill_turns(self, query: str, conv_id: str) -> str:
        if not query.strip():
            self._add_turns(self._tree.root, conv_id)
            return "type what to find, or choose a turn"
        hits = [
            h for h in self.history.search(query, limit=10 * LISTED) if h.conversation_id == conv_id
        ]
        for hit in hits[:LISTED]:
            self._tree.root.add_leaf(
                _hit(hit, self.width), TurnPlace(conv_id, hit.message_id, query)
            )
        return how_many(len(hits), "turn") if hits else "nothing found"

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[TurnPlace | None]) -> None:
        node = event.node
        if node.data is not None and not node.data.turn_id and not node.children:
            try:
                self._add_turns(node, node.data.conversation_id)
            except LocalLLMError as e:
                self.found(e.message)

    def _unfold(self) -> None:
        if self._tree.cursor_node is not None and self._tree.cursor_node.allow_expand:
            self._tree.cursor_node.expand()

    def _fold(self) -> None:
        node = self._tree.cursor_node
        if node is None:
            return
        if not node.is_expanded and node.parent is not None and node.parent is not self._tree.root:
            self._tree.move_cursor(node.parent)
            node = node.parent
        node.collapse()

    def _add_turns(self, node: TreeNode[TurnPlace | None], conv_id: str) -> None:
        """The questions of a conversation below `node`; what has versions has a branch for each."""
        turns = [t for t in self.history.tree(conv_id)[0] if t.role != "system"]
        after: dict[int, list[StoredMessage]] = defaultdict(list)
        for turn in turns:
            after[turn.parent_id].append(turn)
        todo = [(node, 0)]
        while todo:
            below, turn_id = todo.pop()
            while len(after[turn_id]) == 1:
                (turn,) = after[turn_id]
                if turn.role == "user":
                    below.add_leaf(_turn(turn, self.width - 4), TurnPlace(conv_id, turn.id))
                turn_id = turn.id
            for n, turn in enumerate(after[turn_id], 1):
                label = _turn(turn, self.width - 8, f"{n}/{len(after[turn_id])} ")
                todo.append((below.add(label, TurnPlace(conv_id, turn.id), expand=True), turn.id))

    def _preview(self, place: TurnPlace | None) -> None:
        """The highlighted conversation's end, or the highlighted turn."""
        said = RichText()
        if place is not None:
            try:
                about = self.history.get(place.conversation_id)
                turns = self.history.messages(place.conversation_id)[-2:]
                if place.turn_id:
                    turns = [
                        t
                        for t in self.history.tree(place.conversation_id)[0]
                        if t.id == place.turn_id
                    ]
            except LocalLLMError:
                return  # it was removed meanwhile, in another window
            at = time.strftime(
                "%d %b %Y, %H:%M", time.localtime(turns[-1].created_s if turns else about.updated_s)
            )
            facts = f"{one_line(about.model)} · {at} · {how_many(about.n_messages, 'message')}"
            said.append(elide(facts, self.width), "bold")
            for turn in turns:
                said.append(
                    "\n"
                    + elide(
                        self._excerpt(turn, place.words.split()), 4 // len(turns) * (self.width - 8)
                    )
                )
        self.query_one("#preview", Static).update(said)

    def _excerpt(self, turn: StoredMessage, words: Sequence[str]) -> str:
        """A turn in a line, from a little before the last of these words where that is further
        in."""
        who = "You: " if turn.role == "user" else "Answer: "
        text = one_line(typed_in(turn))
        at_word = max([text.lower().find(word.lower()) for word in words], default=0)
        start = at_word - self.width // 2 if at_word > self.width else 0
        return who + ("…" if start else "") + text[start : start + 2_000]


def _line(summary: ConversationSummary, width: int) -> RichText:
    facts = f"{ago(time.time() - summary.updated_s)} · {how_many(summary.n_messages, 'message')}"
    if width >= _LEAST_WITH_MODEL:
        facts = f"{elide(one_line(summary.model), 24)} · {facts}"
    title = elide(printable(summary.title).replace("\n", " "), width - len(facts) - 2)
    # A Text, because brackets in a plain string would be read as markup.
    return RichText(title + " " * max(2, width - len(facts) - cell_len(title)) + facts)


def _hit(hit: Hit, width: int) -> RichText:
    who = "You: " if hit.role == "user" else "Answer: "
    line = RichText(who)
    line.append(printable(hit.snippet[: hit.at]))
    line.append(printable(hit.snippet[hit.at : hit.end]), "bold underline")
    line.append(printable(hit.snippet[hit.end :]))
    line.truncate(width, overflow="ellipsis")
    return line


def _turn(turn: StoredMessage, width: int, version: str = "") -> RichText:
    who = "" if turn.role == "user" else "Answer: "
    return RichText(elide(version + who + " ".join(printable(typed_in(turn)[:400]).split()), width))
