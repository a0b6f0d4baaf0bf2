"""How sizes, times, bars and titles are written; `elide` counts in terminal cells."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial

from rich.cells import cell_len

BAR_CELLS = 10
TITLE_CHARS = 60
_EIGHTHS = "▏▎▍▌▋▊▉"
_GAP = " · "
# Enough for combining characters and joined emoji, which take no cells of their own.
_CHARS_PER_CELL = 16


def bar(used: int, n_ctx: int, cells: int = BAR_CELLS) -> str:
    """A bar readable by shape alone, exact to an eighth of a cell. Anything used shows, and only a
    full context fills it."""
    eighths = min(8 * cells, used * 8 * cells // n_ctx)
    if used > 0:
        eighths = max(1, eighths)
    full, part = divmod(eighths, 8)
    shown = "█" * full
    if part:
        shown += _EIGHTHS[part - 1]
    return shown + "░" * (cells - len(shown))


def elide(text: str, cells: int) -> str:
    """`text` in at most `cells` terminal cells, with … in place of the rest."""
    begin = text[: _CHARS_PER_CELL * (max(0, cells) + 1)]
    if len(begin) == len(text) and cell_len(text) <= cells:
        return text
    if cells <= 0:
        return ""
    fits = bisect_right(range(len(begin)), cells - 1, key=partial(_cells_of_first, begin))
    return begin[: max(0, fits - 1)] + "…"


def _cells_of_first(text: str, n: int) -> int:
    return cell_len(text[:n])


def fitted(hints: str, cells: int) -> str:
    """Hints in at most `cells` terminal cells: those before the last go first, whole."""
    *parts, last = hints.split(_GAP)
    free = cells - cell_len(last)
    fitting: list[str] = []
    for part in parts:
        free -= cell_len(part + _GAP)
        if free < 0:
            break
        fitting.append(part)
    return elide(_GAP.join([*fitting, last]), cells)


def in_lines(hints: str, cells: int) -> str:
    """Format hints in lines of at most `cells` terminal cells, without splitting a hint."""
    lines: list[str] = []
    for hint in hints.split(_GAP):
        if lines and cell_len(f"{lines[-1]} · {hint}") <= cells:
            lines[-1] += f" · {hint}"
        else:
            lines.append(hint)
    return "\n".join(lines)


def ago(seconds: float) -> str:
    """How long ago, in words: "just now", "5 min ago", "3 h ago", "2 days ago"."""
    minutes = int(seconds // 60)
    if minutes < 1:
        return "just now"
    if minutes < 60:
        return f"{minutes} min ago"
    if minutes < 48 * 60:
        return f"{minutes // 60} h ago"
    return f"{minutes // (24 * 60)} days ago"


def how_many(n: int, noun: str) -> str:
    """ "1 message", "2 messages"."""
    if n == 1:
        return f"{n} {noun}"
    return f"{n} {noun}s"


def title_of(text: str) -> str:
    """A conversation's title: the first line of its first question, cut after a word if
    possible."""
    line = next((part.strip() for part in text.splitlines() if part.strip()), "Untitled")
    if len(line) <= TITLE_CHARS:
        return line
    cut = line[: TITLE_CHARS - 1]
    if " " in cut[TITLE_CHARS // 2 :]:
        cut = cut[: cut.rfind(" ")]
    return cut.rstrip() + "…"
