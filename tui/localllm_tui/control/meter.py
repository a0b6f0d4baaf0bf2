"""The numbers of an answer as it streams: speed, time to first token, context used; and their one line of text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from localllm_tui.control.client import AnswerUsage

BAR_CELLS = 10
_EIGHTHS = "▏▎▍▌▋▊▉"
_GAP = "  "


class Meter:
    """Counts one answer. While it streams a delta counts as a token; the server's usage replaces the count."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._started_s = now()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._deltas = 0
        self.prompt_tokens = 0
        self.left_out = 0  # messages that the server left out to make the conversation fit
        self.usage: AnswerUsage | None = None

    def delta(self) -> None:
        """A piece of text or thinking arrived."""
        self._last_s = self._now()
        if self._first_s is None:
            self._first_s = self._last_s
        self._deltas += 1

    @property
    def tokens(self) -> int:
        """Generated tokens so far."""
        return self.usage.completion if self.usage else self._deltas

    @property
    def ttft_s(self) -> float | None:
        """Seconds from asking to the first token, as this client felt them."""
        return None if self._first_s is None else self._first_s - self._started_s

    @property
    def tok_s(self) -> float | None:
        """Tokens per second from the first token to the last; None before the second."""
        if self._first_s is None or self._last_s is None or self.tokens < 2:
            return None
        seconds = self._last_s - self._first_s
        return (self.tokens - 1) / seconds if seconds > 0 else None

    @property
    def used(self) -> int:
        """Context in use: the prompt (when the server told its length) and what was generated."""
        prompt = self.usage.prompt if self.usage else self.prompt_tokens
        return prompt + self.tokens if prompt else 0

    def meta(self) -> dict[str, Any]:
        """What is kept with the answer in the history."""
        meta: dict[str, Any] = {"left_out": self.left_out} if self.left_out else {}
        if self.ttft_s is not None:
            meta["ttft_s"] = round(self.ttft_s, 4)
        if self.tok_s is not None:
            meta["tok_s"] = round(self.tok_s, 2)
        if self.used:
            usage = self.usage or AnswerUsage(self.prompt_tokens, self._deltas)
            meta |= {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
            if self.usage:
                meta["cached_tokens"] = usage.cached
                if usage.drafts_right:
                    # The share of the answer that came from right guesses: what drafting saved.
                    meta["drafted_share"] = round(usage.drafts_right / max(usage.completion, 1), 3)
        return meta


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the status line shows. Tokens, tokens per second, seconds; None: not known (yet)."""

    model: str
    tok_s: float | None = None
    ttft_s: float | None = None
    used: int = 0
    n_ctx: int | None = None
    cached: int | None = None
    drafted_share: float | None = None

    @classmethod
    def of(cls, model: str, n_ctx: int | None, meta: dict[str, Any], used: int) -> Numbers:
        """From an answer's `meta`."""
        return cls(
            model,
            meta.get("tok_s"),
            meta.get("ttft_s"),
            used,
            n_ctx,
            meta.get("cached_tokens"),
            meta.get("drafted_share"),
        )

    @classmethod
    def so_far(cls, model: str, n_ctx: int | None, meter: Meter, used_before: int) -> Numbers:
        """From an answer on its way; `used_before`: the context in use when it was asked for."""
        used = meter.used or used_before + meter.tokens  # until the server counts
        return cls(model, meter.tok_s, meter.ttft_s, used, n_ctx, meter.usage.cached if meter.usage else None)


def bar(used: int, n_ctx: int, cells: int = BAR_CELLS) -> str:
    """A bar readable by shape alone, exact to an eighth of a cell. Anything used shows, and only a full context fills it."""
    eighths = min(8 * cells, used * 8 * cells // n_ctx)
    if used > 0:
        eighths = max(1, eighths)
    full, part = divmod(eighths, 8)
    shown = "█" * full + (_EIGHTHS[part - 1] if part else "")
    return shown + "░" * (cells - len(shown))


def status_text(n: Numbers, width: int) -> str:
    """The status line in at most `width` cells: words where there is room, short names where there is not."""
    for words, cells, least in ((True, BAR_CELLS, 40), (False, 8, 40), (False, 0, 12)):
        parts = _parts(n, words, cells)
        room = width - sum(cell_len(p) + len(_GAP) for p in parts)
        if room >= min(cell_len(n.model), least):
            return _GAP.join([elide(n.model, room), *parts])
    while parts and room < 8:
        room += cell_len(parts.pop()) + len(_GAP)
    return elide(_GAP.join([elide(n.model, max(room, 1)), *parts]), width)


def _parts(n: Numbers, words: bool, bar_cells: int) -> list[str]:
    parts = []
    if n.tok_s is not None:
        parts.append(f"{n.tok_s:.1f} tok/s")
    if n.n_ctx and words:
        percent = min(999, round(100 * n.used / n.n_ctx))
        parts.append(f"context {n.used:,}/{n.n_ctx:,} {bar(n.used, n.n_ctx, bar_cells)} {percent}%")
    elif n.n_ctx:
        drawn = f" {bar(n.used, n.n_ctx, bar_cells)}" if bar_cells else ""
        parts.append(f"ctx {n.used:,}/{n.n_ctx:,}{drawn}")
    elif n.used:
        parts.append(f"{'context' if words else 'ctx'} {n.used:,}")
    if n.ttft_s is not None:
        parts.append(f"{'first token' if words else 'TTFT'} {_seconds(n.ttft_s)}")
    if n.cached is not None:
        parts.append(f"{'cached tokens' if words else 'cached'} {n.cached:,}")
    if n.drafted_share:
        parts.append(f"drafted {100 * n.drafted_share:.0f}%")
    return parts


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"


def elide(text: str, cells: int) -> str:
    """`text` in at most `cells` terminal cells, with … where something was cut."""
    if cell_len(text) <= cells:
        return text
    while text and cell_len(text) > cells - 1:
        text = text[:-1]
    return text + "…" if cells > 0 else ""


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


def how_many(n: int, what: str) -> str:
    """ "1 message", "2 messages"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
