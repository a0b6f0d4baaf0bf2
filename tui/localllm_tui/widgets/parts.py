"""The Markdown of an answer in parts, of which those far from the screen are laid out no more: a frame costs what is seen.

Each frame Textual lays out all blocks of a Markdown anew, down to the cells of its tables: after 20,000 tokens seconds each.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from markdown_it import MarkdownIt
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Markdown

# Small enough to lay out within a frame, large enough that there are few parts.
PART_BLOCKS = 8
# A part is folded once it is this many rows off the screen, so that the next screenful is there when it is scrolled to.
NEAR_ROWS = 30


# A text up to this long is laid out at once wherever it stands.
SHORT_CHARS = 4_000


def in_parts(text: str) -> list[str]:
    """`text` cut between blocks, a part of it for each `PART_BLOCKS`. Whole where it is short, or where a part would lack what
    another defines: the addresses of links are one list for all of it."""
    if len(text) <= SHORT_CHARS:
        return [text]
    told: dict[str, Any] = {}
    tokens = MarkdownIt("gfm-like").parse(text, told)
    begins = [token.map[0] for token in tokens if not token.level and token.nesting >= 0 and token.map]
    if told.get("references"):
        return [text]
    lines = _lines(text)
    cuts = [0, *begins[PART_BLOCKS::PART_BLOCKS], len(lines)]
    return ["".join(lines[start:stop]) for start, stop in itertools.pairwise(cuts)]


def _lines(text: str) -> list[str]:
    """The lines as Markdown counts them, each with its end."""
    return re.split(r"(?<=\n)", text.replace("\r\n", "\n").replace("\r", "\n"))


class AnswerText(Vertical):
    """Grows by `add`. A part that is folded is as high as it was, and empty."""

    DEFAULT_CSS = """
    AnswerText { height: auto; }
    AnswerText > Markdown { height: auto; padding: 0; margin: 0; background: transparent; }
    AnswerText Markdown > .-first { margin: 0 0 1 0; }
    AnswerText Markdown > .-last { margin: 0; }
    AnswerText Markdown > MarkdownHeader.-last { margin: 1 0 0 0; }
    AnswerText Markdown > .-first.-last { margin: 0; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._whole = text
        self._heights: dict[Markdown, int] = {}  # of the folded parts, in rows

    def compose(self) -> ComposeResult:
        # Only from Textual 4 on can the last part grow.
        for text in in_parts(self._whole) if hasattr(Markdown, "append") else [self._whole]:
            yield Markdown(text)

    @property
    def parts(self) -> list[Markdown]:
        """All parts, the first one first."""
        return [child for child in self.children if isinstance(child, Markdown)]

    async def add(self, new: str) -> None:
        """Show more text."""
        self._whole += new
        part: Any = self.parts[-1]
        # Textual 4 parses and draws only the last block again; before it there is only the whole.
        if hasattr(part, "append"):
            await part.append(new)
            await self._part(part)
        else:
            await part.update(self._whole)
        self.mark_ends()

    async def _part(self, part: Markdown) -> None:
        """Begin another part with the last block, once there are many before it."""
        blocks = list(part.children)
        if len(blocks) <= PART_BLOCKS or not hasattr(blocks[-1], "source_range"):
            return
        begins = blocks[-1].source_range[0]
        lines = _lines(part.source)
        if not 0 < begins < len(lines):
            return
        following: Any = Markdown("")
        with self.app.batch_update():
            await blocks[-1].remove()
            await self.mount(following)
            await following.append("".join(lines[begins:]))

    def mark_ends(self, *, all_of_it: bool = False) -> None:
        """Class the outer blocks of what is new, or of `all_of_it`, for the margins: :last-child is not looked at again when a block
        is appended.

        Two parts are as far apart as two blocks: the margin below the one is enough. The margins are set whole, because
        margin-top alone would take the others away.
        """
        parts = self.parts if self.is_attached else []  # else removed before the screen came to draw it
        for part in parts if all_of_it else (*parts[:1], *parts[-2:]):
            blocks = part.children
            for i, block in enumerate(blocks):
                block.set_class(i == 0, "-first")
                block.set_class(part is parts[-1] and i == len(blocks) - 1, "-last")

    def fold_far(self, top: int, bottom: int) -> None:
        """Fold what is far from these rows of it, and unfold what is near. The part that grows is never folded."""
        y, parts = 0, self.parts
        for part in parts:
            rows = self._heights.get(part) or part.outer_size.height
            near = y + rows >= top - NEAR_ROWS and y <= bottom + NEAR_ROWS
            if part in self._heights and near:
                self._unfold(part)
            elif not near and rows and part is not parts[-1] and part not in self._heights:
                self._heights[part] = rows
                part.styles.height = rows
                for block in part.children:
                    block.display = False
            y += rows

    def unfold_all(self) -> None:
        """Lay all of it out again: its heights hold no more."""
        for part in list(self._heights):
            self._unfold(part)

    def _unfold(self, part: Markdown) -> None:
        del self._heights[part]
        part.styles.height = "auto"
        for block in part.children:
            block.display = True
