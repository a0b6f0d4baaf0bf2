"""Tokens to text as they come (no half character, no half stop string is shown), and answers that repeat themselves."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from localllm.engine.messages import LoopLimits


class TextStream:
    """Decodes one request's tokens and watches for its stop strings.

    Text that could still become a stop string is held back; `flush` releases it at the end.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Seq[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [s for s in stops if s]
        self._longest = max((len(s) for s in self._stops), default=0)
        # Most text has no letter that a stop string begins with: with dozens of them that is worth knowing first.
        self._begins = re.compile("|".join({re.escape(s[0]) for s in self._stops}))
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Text that `token` makes safe to show; sets `stopped_by` when a stop string is complete."""
        return self._release(self._decoder.decode(self._token_bytes(token)))

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if not self._stops:
            return text
        if self.stopped_by is not None:
            return ""
        self._held += text
        if self._begins.search(self._held) is None:
            out, self._held = self._held, ""
            return out
        hits = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            out, self._held = self._held[:at], ""
            return out
        keep = self._partial()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _partial(self) -> int:
        """Length of the longest tail that begins some stop string."""
        for n in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-n:]
            if any(s.startswith(tail) for s in self._stops):
                return n
        return 0


class LoopGuard:
    """Says when an answer has become periodic: its last tokens are one pattern of min_pattern_size to max_pattern_size tokens,
    min_count times in a row (vLLM's `repetition_detection`). Tokens of the prompt do not count."""

    def __init__(self, limits: LoopLimits) -> None:
        self._most = limits.max_pattern_size
        sizes = np.arange(1, self._most + 1)
        # For each size, how many tokens in a row equal the one that many before them; and how many are a loop.
        self._runs = np.zeros(self._most, dtype=np.int64)
        self._needed = sizes * (limits.min_count - 1)
        self._needed[: limits.min_pattern_size - 1] = np.iinfo(np.int64).max
        # The tokens before, the newest first.
        self._before = np.full(self._most, -1, dtype=np.int64)

    def loops(self, token: int) -> bool:
        """Take the answer's next token; True when it completes a loop."""
        self._runs += 1
        self._runs[self._before != token] = 0
        self._before[1:] = self._before[:-1].copy()
        self._before[0] = token
        return bool((self._runs >= self._needed).any())
