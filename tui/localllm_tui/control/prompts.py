"""Prompts kept under a name, each a text file beside the conversations."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from localllm.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


class Prompts:
    """The prompts under `folder`. All raise UsageError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        return sorted(file.stem for file in self._folder.glob("*.md"))

    def save(self, name: str, text: str) -> None:
        """Keep `text` as `name`, in the place of what had that name."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name for a prompt",
                hint="letters, digits, - and _: /save-prompt review TEXT",
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{name}.md").write_text(text, encoding="utf-8")
        except OSError as e:
            raise UsageError(f"the prompt can't be kept: {e.strerror or e}") from e

    def text(self, name: str) -> str:
        names = self.names()
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "/prompt lists them"
                if names
                else "/save-prompt NAME TEXT keeps one"
            )
            raise UsageError(f"no prompt is called {name}", hint=hint)
        try:
            return (self._folder / f"{name}.md").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"the prompt {name} can't be read: {e}") from e
