"""The lasting facts of one conversation, in a Markdown file that the user can read and change.

Each compaction reads the file, adds the facts that the model names, and sends all of them word for
word. So neither a weak model nor a second compaction loses a fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localllm import paths

# More facts would take too much of a context. The oldest ones stay.
_MAX_FACTS = 100
_MAX_FACT_CHARS = 300
_MAX_BYTES = 1_000_000
_LIST_MARKS = ("- ", "* ")
_HEAD = """\
# Lasting facts of this conversation

`/compact` adds lines here, and sends all of them to the model. Change or remove any.

"""


def read_facts(path: Path) -> tuple[str, ...]:
    """The lines of the file's list. Raises OSError and UnicodeDecodeError."""
    facts, _ = split_facts(paths.file_text(path, _MAX_BYTES))
    return facts


def write_facts(path: Path, facts: Sequence[str]) -> None:
    """Replace the file. Raises OSError."""
    paths.private_dir(path.parent)
    paths.write_private(path, _HEAD + "".join(f"- {fact}\n" for fact in facts))


def split_facts(text: str) -> tuple[tuple[str, ...], str]:
    """The items of the lists in `text`, and the text without them."""
    facts = []
    other_lines = []
    for line in text.splitlines():
        item = line.strip()
        if item.startswith(_LIST_MARKS):
            facts.append(item[2:].strip()[:_MAX_FACT_CHARS])
        else:
            other_lines.append(line)
    return tuple(fact for fact in facts if fact), "\n".join(other_lines).strip()


def merged(known: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """Both lists, without repetitions that differ only in case or the last full stop."""
    facts_by_key: dict[str, str] = {}
    for fact in [*known, *new]:
        facts_by_key.setdefault(fact.rstrip(".").casefold(), fact)
    return tuple(facts_by_key.values())[:_MAX_FACTS]
