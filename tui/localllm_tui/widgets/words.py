"""The words of a line of Markdown, with their styles."""

from __future__ import annotations

import re
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.style import Style
from rich.text import Span, Text

from localllm_tui.widgets.formulas import as_unicode, with_formulas
from localllm_tui.widgets.rows import SOURCE

# So many open brackets or addresses are no links. The parser's time for links is quadratic in
# their number.
_OPEN_LINKS = re.compile(r"(?:\[[^\[\]]*){64}|(?:\]\((?:(?!\]\()[^)])*){64}")
_MARKS = {"strong": "bold", "em": "italic", "s": "strike", "link": "link"}
_ADDRESSES = {"image": "src", "link": "href"}
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_GAP = re.compile(r"\s+")


@lru_cache(maxsize=1)
def parser_of_blocks() -> MarkdownIt:
    """A parser that finds the blocks, and leaves the words in them to `styled`."""
    # Links by reference are shown as written, because their addresses may arrive much later.
    parser = MarkdownIt("gfm-like")
    return with_formulas(parser.disable(["reference", "inline", "linkify", "text_join"]))


@lru_cache(maxsize=2)
def _parser_of_words(*, has_links: bool) -> MarkdownIt:
    parser = MarkdownIt("gfm-like")
    if not has_links:
        parser.disable(["link", "image"])
    return with_formulas(parser)


def styled(source: str, style: str = "") -> Text:
    """A line of Markdown as text. The parser's tokens are read in their order: a tree of them costs
    more than the parser."""
    parser = _parser_of_words(has_links=_OPEN_LINKS.search(source) is None)
    words = _Words()
    for token in parser.parseInline(source)[0].children or ():
        words.add(token)
    return Text("".join(words.parts), style, spans=words.spans)


class _Words:
    """The text of the tokens so far, and its styles."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.spans: list[Span] = []
        self._length = 0
        self._opened: list[tuple[int, Token]] = []

    def add(self, token: Token) -> None:
        if token.nesting > 0:
            self._opened.append((self._length, token))
            return
        if token.nesting < 0:
            start, opening = self._opened.pop()
            self._style(opening.type.removesuffix("_open"), opening, start)
            return
        start = self._length
        text = _text_of(token)
        self.parts.append(text)
        self._length += len(text)
        self._style(token.type, token, start)

    def _style(self, kind: str, token: Token, start: int) -> None:
        """Style the text from `start` on."""
        styles: list[str | Style] = []
        if kind == "code_inline":
            styles.append("code.inline")
        elif kind == "formula":
            styles.append(Style(meta={SOURCE: token.markup}))
        elif kind in _MARKS:
            styles.append(_MARKS[kind])
        if kind in _ADDRESSES:
            address = str(token.attrs.get(_ADDRESSES[kind], ""))
            styles.append(Style(meta={"@click": ("link", (address,))}))
        if start < self._length:
            self.spans += [Span(start, self._length, style) for style in styles]


def _text_of(token: Token) -> str:
    """The text of a token that contains no other tokens."""
    if token.type == "text":
        return _GAP.sub(" ", token.content)
    if token.type == "formula":
        return as_unicode(token.content) or token.markup
    if token.type == "softbreak":
        return " "
    if token.type == "hardbreak":
        return "\n"
    if token.type == "html_inline" and _BREAK.fullmatch(token.content):
        return "\n"
    if token.type == "image":
        return f"🖼  {token.content}".rstrip()
    return token.content
