"""The text of one answer: decodes its tokens and finds its stop strings.

The text never shows partial characters or partial stop strings.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from localllm.engine.messages import HiddenSpan
from localllm.engine.sampling.constraint import AnswerConstraint
from localllm.grammars.markers import (
    first_marker,
    longer_may_come,
    may_begin_with,
    partial_marker,
)


class TextStream:
    """Decodes the tokens of one request and finds its stop strings.

    Text that may become a stop string is held back; `flush` releases it at the end. Control tokens
    are not shown, but stop strings can match their text from `spell`. Stop strings do not count in
    `hidden` spans.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stops: Sequence[str] = (),
        spell: Callable[[int], bytes] | None = None,
        hidden: Sequence[HiddenSpan] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._spell = spell or token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = _stop_pattern(stops)
        self._visibility = _Visibility(hidden)
        self._undecided = _Characters()  # a hidden span may begin or end here
        self._unsent = _Characters()  # a stop string may begin here
        self.stopped_by: str | None = None
        # True if a text may end the answer
        self.watches = self._stop is not None

    def push(self, token: int, constraint: AnswerConstraint | None = None) -> str:
        """Add `token` and return the text that can be shown now. Sets `stopped_by` when a stop
        string is complete.

        The answer's `constraint` has already accepted the token. It may turn off stop strings here,
        or have control tokens shown.
        """
        if constraint is not None and constraint.control_as_text:
            return self._pass_on(self._decoder.decode(self._spell(token)))
        data = self._token_bytes(token)
        if not data and self.watches:
            return self._release(self._spell(token).decode("utf-8", "replace"), shown=False)
        return self._release(self._decoder.decode(data), shown=True)

    def flush(self) -> str:
        """Return the held text at the end of the answer. An incomplete character is dropped."""
        if self.stopped_by is not None:
            return ""
        return self._unsent.take_all() + self._undecided.take_all()

    def _pass_on(self, text: str) -> str:
        """Show all text at once. It only counts for the beginning and end of hidden spans."""
        if self._stop is None:
            return text
        if self.stopped_by is not None:
            return ""
        out = self._unsent.take_all() + self._undecided.show_all() + text
        self._undecided.add(text, shown=False)
        for n, _ in self._visibility.feed(text):
            self._undecided.take(n)
        return out

    def _release(self, text: str, *, shown: bool) -> str:
        if self._stop is None:
            return text
        if self.stopped_by is not None:
            return ""
        self._undecided.add(text, shown=shown)
        out = ""
        for n, visible in self._visibility.feed(text):
            if visible:
                self._undecided.move(n, self._unsent)
                out += self._searched()
            else:
                out += self._unsent.take_all() + self._undecided.take(n)
            if self.stopped_by is not None:
                break
        return out

    def _searched(self) -> str:
        """Search the held text, and return the part that can be shown."""
        found = self._stop.search(self._unsent.text, partial=True)
        if found is None:
            return self._unsent.take_all()
        if not found.partial:
            self.stopped_by = found.group()
        return self._unsent.take(found.start())


class _Characters:
    """A queue of characters, each shown or not."""

    def __init__(self) -> None:
        self.text = ""
        self._shown: list[bool] = []

    def add(self, text: str, *, shown: bool) -> None:
        self.text += text
        self._shown += [shown] * len(text)

    def take(self, n: int) -> str:
        """Remove the first `n` characters, and return those that are shown."""
        out = "".join(itertools.compress(self.text[:n], self._shown))
        self.text = self.text[n:]
        self._shown = self._shown[n:]
        return out

    def take_all(self) -> str:
        return self.take(len(self.text))

    def show_all(self) -> str:
        """Return the shown characters without removing them. They are not shown again."""
        out = "".join(itertools.compress(self.text, self._shown))
        self._shown = [False] * len(self.text)
        return out

    def move(self, n: int, target: _Characters) -> None:
        """Move the first `n` characters to the end of `target`."""
        target.text += self.text[:n]
        target._shown += self._shown[:n]
        self.take(n)


class _Visibility:
    """Divides the text of an answer into visible and hidden parts. White space after a hidden part
    is a separator, so it is hidden too."""

    def __init__(self, spans: Sequence[HiddenSpan]) -> None:
        self._spans = spans
        self._open = next((span for span in spans if span.opened), None)
        self._text = ""  # not decided yet
        self._is_first = self._open is None  # no visible or hidden text has arrived yet
        self._is_separator = False  # only white space has arrived since a hidden span

    def feed(self, text: str) -> list[tuple[int, bool]]:
        """The next parts that are certain: number of characters, and whether they are visible."""
        if not self._spans:
            return [(len(text), True)]
        self._text += text
        parts: list[tuple[int, bool]] = []
        while self._text:
            n, visible = self._next()
            if n == 0:
                break
            parts.append((n, visible))
            self._text = self._text[n:]
        return parts

    def _next(self) -> tuple[int, bool]:
        if self._open is not None:
            return self._inside(self._open), False
        n_space = len(self._text) - len(self._text.lstrip())
        if self._is_separator and n_space:
            return n_space, False
        if self._is_first:
            return self._beginning()
        return self._outside()

    def _beginning(self) -> tuple[int, bool]:
        """The beginning of the answer. White space before a marker is hidden with it."""
        text = self._text.lstrip()
        markers = [span.opening for span in self._spans]
        at, marker = first_marker(text, markers)
        if marker is not None and at == 0 and not longer_may_come(text, marker, markers):
            return len(self._text) - len(text) + self._enter(marker), False
        if any(may_begin_with(text, other) for other in markers):
            return 0, False
        self._is_first = False
        return self._outside()

    def _outside(self) -> tuple[int, bool]:
        """Visible text up to the next hidden span, or the opening marker of that span."""
        markers = [span.opening for span in self._spans if not span.first]
        at, marker = first_marker(self._text, markers)
        if marker is None:
            self._is_separator = False
            return len(self._text) - partial_marker(self._text, markers), True
        if at > 0:
            self._is_separator = False
            return at, True
        if longer_may_come(self._text, marker, markers):
            return 0, True
        return self._enter(marker), False

    def _inside(self, span: HiddenSpan) -> int:
        """Characters up to the closing marker, or up to a marker that ends the span as well."""
        markers = [span.closing]
        if span.interruptible:
            markers += [other.opening for other in self._spans if not other.first]
        at, marker = first_marker(self._text, markers)
        if marker is None:
            return len(self._text) - partial_marker(self._text, markers)
        if longer_may_come(self._text[at:], marker, markers):
            return at
        if marker != span.closing:
            return at + self._enter(marker)
        self._open = None
        self._is_separator = True
        return at + len(marker)

    def _enter(self, marker: str) -> int:
        """Take the opening `marker`. Returns its length."""
        span = next(span for span in self._spans if span.opening == marker)
        self._open = span if span.closing else None
        self._is_first = False
        self._is_separator = True
        return len(marker)


def _stop_pattern(stops: Sequence[str]) -> Any:
    """A pattern that finds the first stop string, or the start of one at the end of the text; None
    without stop strings."""
    if not any(stops):
        return None
    import regex  # it supports partial matches; most requests have no stop strings

    return regex.compile("|".join(regex.escape(stop) for stop in sorted(stops) if stop))
