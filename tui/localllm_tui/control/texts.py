"""What questions and answers are made of: titles, files in fences, code blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.history import StoredMessage
from localllm_tui.control.images import in_markdown, is_image

TITLE_CHARS = 60

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)


def typed_in(question: StoredMessage) -> str:
    """What a person typed for `question`, without the files that went along."""
    return str(question.meta.get("typed", question.content))


def title_of(text: str) -> str:
    """A conversation's title: the first line of its first question, cut at a word where that is possible."""
    line = next((part.strip() for part in text.splitlines() if part.strip()), "Untitled")
    if len(line) <= TITLE_CHARS:
        return line
    cut = line[: TITLE_CHARS - 1]
    return (cut[: cut.rfind(" ")] if " " in cut[TITLE_CHARS // 2 :] else cut).rstrip() + "…"


def code_blocks(markdown: str) -> list[str]:
    """The contents of the fenced code blocks in `markdown`, in order; an unclosed last one counts."""
    return [found[2].rstrip("\n") for found in _FENCE.finditer(markdown)]


def fenced(name: str, body: str) -> str:
    """A file's text as a named Markdown code block, its fence longer than any inside; an image as a Markdown image."""
    if is_image(body):
        return in_markdown(name, body)
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    language = name.rpartition(".")[2] if "." in name else ""
    return f"File {name}:\n{fence}{language}\n{body.rstrip()}\n{fence}"


def with_files(text: str, attached: Sequence[tuple[str, str]], files: str = "") -> str:
    """A question as sent: `files` (fenced already) and the `attached` ones before the text."""
    return "\n\n".join([*([files] if files else []), *(fenced(name, body) for name, body in attached), text])


def files_of(turn: StoredMessage) -> tuple[str, list[str]]:
    """The files that went with a question: fenced as they were sent, and their names."""
    names = [str(name) for name in turn.meta.get("attached", ())]
    return (turn.content.removesuffix(str(turn.meta.get("typed", ""))).rstrip(), names) if names else ("", [])
