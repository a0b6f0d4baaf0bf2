"""Plans and files as lines of text: as many columns as there is room for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len

from localllm_tui.control.desk import Offer, OnDisk
from localllm_tui.control.meter import bar, elide
from localllm_tui.control.pulls import Pull
from localllm_tui.control.terminal import printable
from localllm_tui.control.wording import amount, span

_LEAST_NAME, _MOST_NAME = 18, 34
_OWNER = len("a folder of yours")
_FITS = {"yes": "fits", "tight": "tight", "split": "split", "no": "too large"}


def context_words(tokens: int) -> str:
    """Tokens of context: 32k; 0 is the purpose's own."""
    return "by purpose" if not tokens else f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def head(width: int) -> str:
    """The names of the columns of `offer_line`."""
    name, wide = _room(width)
    columns = f"  {'model':{name}} {'quant':9} {'memory':>8}"
    if wide:
        columns += f" {'of usable':10} {'context':>8}"
    return columns + f" {'tok/s':>9} {'answers':>8}"


def offer_line(offer: Offer, width: int, pull: Pull | None = None) -> str:
    """One plan; `●` is installed, `↓` on its way."""
    name, wide = _room(width)
    mark = "●" if offer.installed or (pull is not None and pull.done) else "↓" if pull and not pull.ended else " "
    shown = elide(printable(offer.name), name)
    line = f"{mark} {shown}{' ' * (name - cell_len(shown))} {elide(offer.quant, 9):9} {amount(offer.total_bytes):>8}"
    if wide:
        share = bar(offer.total_bytes, max(1, offer.limit_bytes))
        line += f" {share} {context_words(offer.n_ctx):>8}"
    speed = f"{_rate(offer.tok_s_low)}–{_rate(offer.tok_s_high)}"
    return f"{line} {speed:>9} {span(offer.wait_s):>8}"


def offer_details(offer: Offer, width: int, pull: Pull | None = None) -> list[str]:
    """What is known of one plan, in a few lines."""
    lines = [
        f"{offer.name} {offer.quant}: {_FITS.get(offer.fits, offer.fits)}, {amount(offer.total_bytes)} of "
        f"{amount(offer.limit_bytes)} with {offer.n_ctx:,} tokens of {offer.kv_type} context",
        *textwrap.wrap(printable(offer.why), max(20, width)),
    ]
    if pull is not None:
        lines.append(pull.words())
    elif offer.installed:
        lines.append("installed: Enter uses it here")
    else:
        lines.append(f"Enter pulls {amount(offer.file_bytes)}: {offer.ref}")
    return [elide(line, width) for line in lines]


def compare(offers: Sequence[Offer]) -> list[tuple[str, ...]]:
    """Rows of a table, a column for each plan; the first row is its head."""
    return [
        ("", *(f"{o.name} {o.quant}" for o in offers)),
        ("memory", *(amount(o.total_bytes) for o in offers)),
        ("download", *("installed" if o.installed else amount(o.file_bytes) for o in offers)),
        ("context", *(f"{context_words(o.n_ctx)} {o.kv_type}" for o in offers)),
        ("tokens/s", *(f"{_rate(o.tok_s_low)} to {_rate(o.tok_s_high)}" for o in offers)),
        ("first token", *(span(o.ttft_s) for o in offers)),
        ("answers after", *(span(o.wait_s) for o in offers)),
        ("quality, points", *(f"{round(o.quality)}" for o in offers)),
    ]


def disk_head(width: int) -> str:
    """The names of the columns of `disk_line`."""
    name = _disk_name(width)
    return f"  {'model':{name}} {'quant':9} {'size':>8}  kept by"


def disk_line(model: OnDisk, width: int, *, in_use: bool) -> str:
    """One model on this disk; `▸` answers now."""
    name = _disk_name(width)
    shown = elide(printable(model.name), name)
    line = f"{'▸' if in_use else ' '} {shown}{' ' * (name - cell_len(shown))} {elide(model.quant, 9):9}"
    return elide(f"{line} {amount(model.size_bytes):>8}  {model.owner}", width)


def disk_details(model: OnDisk, fit: str, width: int) -> list[str]:
    """What is known of files on this disk."""
    may = "Delete twice removes them" if model.ours else "remove them there: they are not localllm's"
    lines = [fit or "weighing …", model.path, f"kept by {model.owner}; {may}"]
    return [piece for line in lines for piece in textwrap.wrap(printable(line), max(20, width))]


def _room(width: int) -> tuple[int, bool]:
    """(cells of the name, whether bar and context have room)."""
    rest = width - 2 - 1 - 9 - 1 - 8 - 1 - 9 - 1 - 8
    wide = rest - 21 >= _LEAST_NAME
    return min(_MOST_NAME, max(8, rest - (20 if wide else 0))), wide


def _disk_name(width: int) -> int:
    return min(_MOST_NAME + 6, max(10, width - 2 - 1 - 9 - 1 - 8 - 2 - _OWNER))


def _rate(tok_s: float) -> str:
    return f"{tok_s:.1f}" if tok_s < 9.95 else f"{tok_s:.0f}"
