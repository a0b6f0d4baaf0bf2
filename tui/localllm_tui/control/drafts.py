"""What is typed and not sent yet: one small file per conversation, so that no way of ending the chat loses it."""

from __future__ import annotations

import os
from pathlib import Path

from localllm import paths


class Drafts:
    """Drafts under `folder`, by conversation id (None: the one that has not begun). A disk that refuses is ignored:
    losing a draft must never stop the chat."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, conv_id: str | None) -> str:
        """The draft, or ""."""
        try:
            return self._file(conv_id).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    def save(self, conv_id: str | None, text: str) -> None:
        """Keep `text`; nothing but spaces removes the draft."""
        file = self._file(conv_id)
        try:
            if not text.strip():
                file.unlink(missing_ok=True)
                return
            paths.private_dir(self.folder)
            new = file.with_suffix(f".{os.getpid()}.new")
            # Written beside and renamed: a reader, or a kill, meets the old draft or the new one, never half of it.
            with open(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as f:
                f.write(text)
            os.replace(new, file)
        except OSError:
            pass

    def _file(self, conv_id: str | None) -> Path:
        return self.folder / f"{conv_id or 'new'}.txt"
