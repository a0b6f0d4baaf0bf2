"""Markdown in the style of models, in any length."""

from __future__ import annotations

from collections.abc import Iterator


def words(tokens: int) -> Iterator[str]:
    """Yield Markdown in the style of models: paragraphs, lists, a table and code, repeatedly."""
    said = 0
    while True:
        section = said // 400 + 1
        text = (
            f"\n\n## Section {section}\n\n"
            + "Some plain words about this **and** that, with `code` in them. " * 6
            + "\n\n"
            + "".join(f"- point {n} of the list, and why it matters\n" for n in range(8))
            + "\n| name | value |\n|---|---|\n"
            + "".join(f"| row {n} | {n * n} |\n" for n in range(6))
            + "\n```python\n"
            + "".join(f"value_{n} = compute({n})  # line {n}\n" for n in range(12))
            + "```\n\n"
        )
        for piece in text.split(" "):
            yield piece + " "
            said += 1
            if said >= tokens:
                return
