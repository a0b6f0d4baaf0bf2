"""LaTeX between dollars and in \\(…\\) as Unicode: the formulas of Markdown, and their text in a
terminal."""

from __future__ import annotations

import re
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from rich.cells import cell_len

from localllm_tui.control.terminal import printable
from localllm_tui.widgets.latex import lines_of

# A model may write anything, so longer formulas are not converted.
LONGEST = 2_000
_INLINE = re.compile(
    r"\$\$(?P<shown>[^$]{1,2000})\$\$"
    # Text between prices or shell variables has a space inside a "$", or a letter or digit after
    # it, like "the $n$th".
    r"|\$(?P<dollars>(?![\s$])[^$\n]{0,500}[^\s$\\])\$(?!(?!th\b)[\w$])"
    r"|\\\((?P<round>.{1,2000}?)\\\)|\\\[(?P<square>.{1,2000}?)\\\]",
    re.DOTALL,
)
_ENDS = {"$$": "$$", "\\[": "\\]"}
_NAME = re.compile(r"\\[A-Za-z]+")
_GROUP = re.compile(r"\{[^{}]*\}")
_SIGNS = re.compile(r"[\\^_=<>+]")
_WORD = re.compile(r"[^\W\d_]{3}")
_LETTER = re.compile(r"[^\W\d_]'*")


def with_formulas(parser: MarkdownIt) -> MarkdownIt:
    """`parser`, which makes nodes `formula` and `formula_block` of LaTeX."""
    parser.inline.ruler.before("escape", "formula", _inline_rule)
    parser.block.ruler.before(
        "fence", "formula_block", _block_rule, {"alt": ["paragraph", "reference", "blockquote"]}
    )
    return parser


def _inline_rule(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] not in "$\\":
        return False
    found = _INLINE.match(state.src, state.pos)
    if found is None or state.src[state.pos - 1 : state.pos].isalnum():
        return False
    dollars = found["dollars"]
    if dollars is not None and not is_formula(dollars):
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content = found[found.lastgroup or 0]
        token.markup = found[0]
    state.pos = found.end()
    return True


def _block_rule(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    """A block from $$ or \\[ to its end, or to an empty line. A block without its end is not drawn
    as a formula yet."""
    begun = _line_of(state, first)
    end = _ENDS.get(begun[:2], "")
    if state.is_code_block(first) or not end or not _begins_block(begun, end):
        return False
    if silent:
        return True
    n = first
    ended = end in begun[2:]
    while (
        not ended
        and n + 1 < last
        and _line_of(state, n + 1).strip()
        and state.sCount[n + 1] >= state.blkIndent
    ):
        n += 1
        ended = _line_of(state, n).rstrip().endswith(end)
    token = state.push("formula_block", "", 0)
    token.map = [first, n + 1]
    token.block = True
    token.markup = "\n".join(_line_of(state, k) for k in range(first, n + 1))
    token.content = token.markup.rstrip()[2:-2] if ended else ""
    state.line = n + 1
    return True


def _line_of(state: StateBlock, n: int) -> str:
    return state.src[state.bMarks[n] + state.tShift[n] : state.eMarks[n]]


def _begins_block(line: str, end: str) -> bool:
    ends_within = end in line[2:] and not line.rstrip().endswith(end)
    return not ends_within and is_formula(line[2:] or "=")


def is_formula(text: str) -> bool:
    """True if the text between dollars is a formula, not the words between two prices: it has an
    operator and no words, or is one letter."""
    bare = _GROUP.sub("", _NAME.sub("", text))
    return bool(_LETTER.fullmatch(text) or (_SIGNS.search(text) and not _WORD.search(bare)))


@lru_cache(maxsize=256)
def as_unicode(latex: str) -> str:
    """LaTeX as Unicode; "" if it is too long or can't be converted."""
    lines = [" ".join(line.split()) for line in _lines_of(latex, displayed=False)]
    return "\n".join(line for line in lines if line)


@lru_cache(maxsize=256)
def as_lines(latex: str, width: int) -> tuple[str, ...]:
    """A displayed formula as lines of at most `width` cells, with fractions of two storeys, roots and
    matrices; () if it needs more room or can't be converted."""
    lines = _lines_of(latex, displayed=True)
    if max(map(cell_len, lines), default=0) > width:
        return ()
    return tuple(line.rstrip() for line in lines)


def _lines_of(latex: str, *, displayed: bool) -> tuple[str, ...]:
    if len(latex) > LONGEST:
        return ()
    return tuple(map(printable, lines_of(latex, displayed=displayed)))
