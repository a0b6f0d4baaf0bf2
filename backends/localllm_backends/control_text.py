"""Keep control tokens that are spelled out in users' and tools' texts from becoming control tokens.

`ControlTexts.marked` inserts MARK after the first character of each spelling, before the chat
template is applied. The mark survives all that a template does with a text (trim, join, write as
JSON). `runs` removes the marks and splits the prompt: runs that had marks are tokenized as text
only. Such a run ends at the template's own control tokens, where a tokenizer starts anew. So the
rest of the prompt has the same tokens as without marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

# Two Unicode noncharacters, reserved for internal use, and their form in ASCII JSON.
MARK = "\ufdd0\ufdd1"
_ESCAPED = r"\ufdd0\ufdd1"


class LiteralText(str):
    """Text in which a tokenizer must not parse control tokens."""

    __slots__ = ()


class AlwaysParsedTexts:
    """Control texts that a tokenizer parses even if told not to.

    Examples are gpt-oss's <|channel|> in llama.cpp, Gemma 4's <|tool_call>, and Command R's turns
    in older files. In a LiteralText each of them is cut in two.
    """

    def __init__(self, added: Iterable[str]) -> None:
        """Take those of the `added` tokens that llama.cpp's converter counts as control tokens.

        The test is the converter's does_token_look_special.
        """
        self.texts = tuple(text for text in added if _looks_special(text))
        ways = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in self.texts]
        self._inside = re.compile("|".join(ways) or NEVER)

    def pieces(self, text: str) -> Sequence[str]:
        """Split `text` so that no piece of a LiteralText contains such a control text.

        Any other text is one piece.
        """
        if not isinstance(text, LiteralText):
            return [text]
        cuts = [0, *(found.end() for found in self._inside.finditer(text)), len(text)]
        return [LiteralText(text[a:b]) for a, b in pairwise(cuts)]


def _looks_special(text: str) -> bool:
    """Return whether llama.cpp's converter counts `text` as a control token."""
    if len(text) <= 3:
        return False
    return text.startswith(("<|", "<｜")) or text.endswith(("|>", "｜>"))


# A pattern that never matches.
NEVER = r"(?!)"
_PIECE_CHARS = 2**18


class ControlTexts:
    """The spellings of a vocabulary's control tokens."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = frozenset(text for text in texts if text)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        self._longest = max(self._lengths, default=0)
        heads = sorted({re.escape(text[:2]) for text in self._texts})
        pattern = NEVER
        if heads:
            pattern = f"(?={'|'.join(heads)})"
        self._heads = re.compile(pattern)
        # Parts that could complete a control token together with characters of the template next to
        # them. A single first character is too common to mark.
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        for text in self._texts:
            self._begun.update(text[:n] for n in range(2, len(text)))
            self._ended.update(text[n:] for n in range(1, len(text) - 1))

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each spelling, the longest at each start. Spellings may
        overlap."""
        # Search piece by piece, since other threads can't run during a search. The pieces overlap
        # by one character because heads have two.
        for begin in range(0, len(text), _PIECE_CHARS):
            for found in self._heads.finditer(text, begin, begin + _PIECE_CHARS + 1):
                at = found.start()
                for n in self._lengths:
                    if text[at : at + n] in self._texts:
                        yield at, at + n
                        break

    def marked(self, text: str) -> str:
        """Return `text` with a mark in every control-token spelling, and at an end that is part of
        one."""
        cuts = [start + 1 for start, _ in self._spans(text)]
        lengths = range(2, min(self._longest, len(text) + 1))
        if any(text[:n] in self._ended for n in lengths):
            cuts.insert(0, 0)
        if any(text[-n:] in self._begun for n in lengths):
            cuts.append(len(text))
        if not cuts:
            return text
        return MARK.join(text[start:stop] for start, stop in pairwise([0, *cuts, len(text)]))

    def runs(self, text: str) -> list[str]:
        """Return `text` without marks, split into runs. A run that had marks is a LiteralText."""
        if MARK not in text and _ESCAPED not in text:
            return [text]
        runs: list[str] = []
        at = 0
        for start, end in [*self._spans(text), (len(text), len(text))]:
            if start < at:
                continue
            before = text[at:start]
            clean = without_marks(before)
            if clean != before:
                runs.append(LiteralText(clean))
                before = ""
            read = before + text[start:end]
            if runs and not isinstance(runs[-1], LiteralText):
                runs[-1] += read
            else:
                runs.append(read)
            at = end
        return [run for run in runs if run]


def without_marks(text: str) -> str:
    """Return `text` with its marks removed."""
    return text.replace(MARK, "").replace(_ESCAPED, "")


@lru_cache(8)
def control_texts(texts: tuple[str, ...]) -> ControlTexts:
    """Return the ControlTexts for `ModelInfo.control_texts`. They are cached."""
    return ControlTexts(texts)
