"""What people and tools write is text: where it spells a control token, a mark keeps it from
becoming one.

`ControlTexts.marked` puts MARK into each spelling, behind its first character, before a chat
template sees the text, and nothing that a template does with a text (trim, join, write it as JSON)
makes a control token of it again. `runs` takes the marks out and says which stretches are to be
read as text alone. A stretch ends at the template's own control tokens, where a tokenizer starts
anew: everything else of a prompt has the tokens that it has without any mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

# Two of the noncharacters that Unicode keeps for a program's own use; and as JSON in ASCII writes
# them.
MARK = "\ufdd0\ufdd1"
_ESCAPED = r"\ufdd0\ufdd1"


class LiteralText(str):
    """Text in which a tokenizer must read no control token."""

    __slots__ = ()


class ReadAnyway:
    """Marks that a tokenizer reads whatever it is told (gpt-oss's <|channel|> to llama.cpp, Gemma
    4's <|tool_call>, Command R's turns in older files): a text that must not have them is cut
    within each."""

    def __init__(self, added: Iterable[str]) -> None:
        """`added`: what a tokenizer reads anyway, of which those are taken that look like marks to
        llama.cpp's converter as well (does_token_look_special)."""
        self.texts = tuple(text for text in added if _looks_special(text))
        ways = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in self.texts]
        self._inside = re.compile("|".join(ways) or NEVER)

    def pieces(self, text: str) -> Sequence[str]:
        """Return `text` in pieces. None of those of a LiteralText has such a mark; any other text
        is one piece."""
        if not isinstance(text, LiteralText):
            return [text]
        cuts = [0, *(found.end() for found in self._inside.finditer(text)), len(text)]
        return [LiteralText(text[a:b]) for a, b in pairwise(cuts)]


def _looks_special(text: str) -> bool:
    """Return whether llama.cpp's converter takes `text` for a mark."""
    if len(text) <= 3:
        return False
    return text.startswith(("<|", "<｜")) or text.endswith(("|>", "｜>"))


# A pattern that matches nowhere.
NEVER = r"(?!)"
_PIECE_CHARS = 2**18


class ControlTexts:
    """How a vocabulary's control tokens are written."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = frozenset(text for text in texts if text)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        self._longest = max(self._lengths, default=0)
        heads = sorted({re.escape(text[:2]) for text in self._texts})
        pattern = NEVER
        if heads:
            pattern = f"(?={'|'.join(heads)})"
        self._heads = re.compile(pattern)
        # What could become one together with the letters that a template writes beside it; one
        # letter is in any text.
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        for text in self._texts:
            self._begun.update(text[:n] for n in range(2, len(text)))
            self._ended.update(text[n:] for n in range(1, len(text) - 1))

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where each spelling begins and ends, the longest at its place; they may overlap."""
        # By the piece: one search lets no other thread run. Heads are two letters.
        for begin in range(0, len(text), _PIECE_CHARS):
            for found in self._heads.finditer(text, begin, begin + _PIECE_CHARS + 1):
                at = found.start()
                for n in self._lengths:
                    if text[at : at + n] in self._texts:
                        yield at, at + n
                        break

    def marked(self, text: str) -> str:
        """`text` with a mark in every spelling of a control token, and at an end that is a part of
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
        """`text` without its marks, in stretches: LiteralText where there were any."""
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
    """`text` as it was before it was marked."""
    return text.replace(MARK, "").replace(_ESCAPED, "")


@lru_cache(8)
def control_texts(texts: tuple[str, ...]) -> ControlTexts:
    """The ControlTexts of `ModelInfo.control_texts`, made once."""
    return ControlTexts(texts)
