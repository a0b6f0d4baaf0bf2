"""Notices an answer that goes round in circles, also with small changes from round to round."""

from __future__ import annotations

import re
from collections import Counter, deque

# Of this many words, at most so many are different in a loop. In prose more than a hundred are.
_WINDOW_WORDS = 200
_DIFFERENT_WORDS = 24
# Chinese, Japanese and Korean have no spaces, so each sign counts as a word.
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af]|[^\W_\u2e80-\u9fff\uac00-\ud7af]+")
_ITEM = re.compile(r"\s*(?:\d+[.)]|[-*•+])\s+")
_LONGEST_WORD = 200


class RepetitionGuard:
    """Takes an answer piece by piece. Code and tables do not count, because they repeat words, nor
    do the numbers of a list."""

    def __init__(self) -> None:
        self._line = ""  # the part of the line that is not counted yet
        self._in_code = False
        self._begins = True  # the part is the beginning of its line
        self._is_table = False
        self._words: deque[str] = deque()
        self._counts: Counter[str] = Counter()

    def loops(self, text: str) -> bool:
        """Take the next piece; True if the last words are always the same few."""
        for line in text.splitlines(keepends=True):
            self._line += line
            if line[-1] in "\r\n":
                self._take(self._line)
                self._line = ""
                self._begins = True
            elif not self._begins or len(self._line) > _LONGEST_WORD:
                self._take_words()
        return len(self._words) == _WINDOW_WORDS and len(self._counts) <= _DIFFERENT_WORDS

    def _take_words(self) -> None:
        """Count the whole words of a long line that goes on."""
        end = self._line.rfind(" ") + 1
        if not end and len(self._line) > _LONGEST_WORD:
            end = len(self._line)
        if end:
            self._take(self._line[:end])
            self._line = self._line[end:]

    def _take(self, part: str) -> None:
        if self._begins:
            self._begins = False
            begun = part.lstrip()
            self._is_table = begun.startswith("|")
            if begun.startswith(("```", "~~~")):
                self._in_code = not self._in_code
                self._is_table = True  # this line is no text either
            part = _ITEM.sub("", part, count=1)
        if self._in_code or self._is_table:
            return
        for word in _WORD.findall(part.lower()):
            self._count(word)

    def _count(self, word: str) -> None:
        self._words.append(word)
        self._counts[word] += 1
        if len(self._words) > _WINDOW_WORDS:
            oldest = self._words.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
