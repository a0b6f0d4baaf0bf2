"""Count habits that slow a reader down, and measure the length of sentences, in docs, docstrings
and comments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from support.code_measures import ROOT, Function, all_nodes, lexed, sources, syntax

# A match is not always an error ("behind a proxy" is fine), but plain technical English has few of
# these.
HABITS = {
    "clause as a noun (What …)": (
        r"(?:(?<=[.:;] )|^)What \w+(?: \w+){1,12}? (?:is|are|was|has|takes|goes|comes|stays|stands)\b"
    ),
    "inverted (Of X it …)": (
        r"(?:(?<=[.:;] )|^)(?:Of|To|Left|Said|Switched|Counted|Seen|Meant|Asked) "
        r"\w+(?: \w+){0,6}? (?:it|they|there|he|she|is|are) "
    ),
    "where for if or when": (
        r"\b[Ww]here (?:it|they|that|there|nobody|nothing|no|one|none|this|he|somebody) "
    ),
    "behind for after": r"\bbehind (?:it|that|them|the|an?|this|one|each|what|\"|`)",
    "beside": r"\bbeside\b",
    "stands, lies": r"\b(?:stands?|stood|lies|lay)\b",
    "says so, is said": (
        r"\b(?:say|says|said) (?:so|it|why|that|which|what)\b|\b(?:is|are|be) (?:said|told)\b"
    ),
    "nobody, nothing, whoever": r"\b(?:[Nn]obody|[Nn]othing|none|[Ww]hoever)\b",
}


def paragraphs_of_page(text: str) -> Iterator[str]:
    """Yield the running text of a Markdown page, without code, tables and headings."""
    fenced = False
    part: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if fenced or line.lstrip().startswith(("```", "|", "#")) or not line.strip():
            if part:
                yield " ".join(part)
            part = []
        else:
            part.append(line.strip())


def paragraphs_of_code(path: str, text: str) -> Iterator[str]:
    """Yield the docstrings and comments of a file. Comments on consecutive lines are one
    paragraph."""
    for node in all_nodes(syntax(path, text)):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            docstring = ast.get_docstring(node)
            if docstring:
                yield " ".join(docstring.split())
    part: list[str] = []
    last_line = -9
    for line, comment in lexed(text).comments:
        if line != last_line + 1 and part:
            yield " ".join(part)
            part = []
        part.append(comment.lstrip("# "))
        last_line = line
    if part:
        yield " ".join(part)


def figures(paragraphs: Iterator[str]) -> dict[str, float]:
    """Return the habits per 1,000 words, and the words per sentence."""
    n_words = 0
    n_sentences = 0
    n_habits = 0
    for text in paragraphs:
        n_words += len(text.split())
        n_sentences += max(1, len(re.findall(r"[.!?](?:\s|$)", text)))
        n_habits += sum(len(re.findall(pattern, text)) for pattern in HABITS.values())
    return {
        "habits_per_1000_words": 1000 * n_habits / n_words,
        "words_per_sentence": n_words / n_sentences,
    }


@cache
def prose() -> dict[str, float]:
    """Return the figures of `tests/prose_limits.toml`."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += [*(ROOT / "model_catalog").rglob("*.md"), *(ROOT / "packaging").rglob("*.md")]
    texts = [page.read_text("utf-8") for page in pages]
    docs = figures(paragraph for text in texts for paragraph in paragraphs_of_page(text))
    code = figures(
        paragraph for file in sources().items() for paragraph in paragraphs_of_code(*file)
    )
    found = {f"docs_{name}": n for name, n in docs.items()}
    return found | {f"code_{name}": n for name, n in code.items()}
