"""Saved prompts, each a text file next to the conversations."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from localllm import paths
from localllm.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_MAX_CHARS = 1_000_000


class Prompts:
    """The prompts under `folder`. All methods raise UsageError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        return sorted(file.stem for file in self._folder.glob("*.md"))

    def save(self, name: str, text: str) -> None:
        """Save `text` as `name`, in place of an earlier text of that name."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} can't be the name of a prompt",
                hint="use letters, digits, - and _: /save-prompt review TEXT",
            )
        if len(text) > _MAX_CHARS:
            raise UsageError(f"a prompt can have at most {_MAX_CHARS:,} characters")
        try:
            paths.private_dir(self._folder)
            paths.write_private(self._folder / f"{name}.md", text)
        except OSError as e:
            raise UsageError(f"the prompt can't be saved: {e.strerror or e}") from e

    def text(self, name: str) -> str:
        names = self.names()
        if name not in names:
            raise UsageError(f"there is no prompt {name}", hint=_hint(name, names))
        try:
            return paths.file_text(self._folder / f"{name}.md")[:_MAX_CHARS]
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"the prompt {name} can't be read: {e}") from e


def _hint(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    if names:
        return "/prompt lists them"
    return "/save-prompt NAME TEXT saves one"
