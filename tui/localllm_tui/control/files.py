"""Files to send along: those below this folder, what each would cost in tokens, and paths dropped on the terminal."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from localllm.errors import UsageError
from localllm_tui.control.attach import MAX_BYTES_PER_TOKEN, is_pdf, read_text
from localllm_tui.control.client import ChatClient
from localllm_tui.control.images import data_url
from localllm_tui.control.texts import fenced
from localllm_tui.control.wording import amount

# More names than this are not read: nobody looks for a file among them by typing.
MOST_FILES = 20_000
_GIT_WITHIN_S = 2.0


def below(folder: Path) -> list[str]:
    """The files below `folder`, as paths from there: what git knows and does not ignore, else all that is not hidden."""
    try:
        known = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=folder, capture_output=True, timeout=_GIT_WITHIN_S, check=True,
        )  # fmt: skip
        names = [os.fsdecode(name) for name in known.stdout.split(b"\0") if name]
        return sorted(names[:MOST_FILES])
    except (OSError, subprocess.SubprocessError):
        return sorted(_walk(folder))


def _walk(folder: Path) -> Iterator[str]:
    n = 0
    for where, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in ("node_modules", "__pycache__")
        ]
        for name in files:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(where, name), folder)
                n += 1
                if n >= MOST_FILES:
                    return


@dataclass(frozen=True, slots=True)
class FileCost:
    """What a file would add to the question: `tokens` (None: the server can't count), or why it can't go along."""

    tokens: int | None = None
    refused: str = ""

    @classmethod
    async def of(cls, client: ChatClient, model: str, path: Path, n_ctx: int | None) -> FileCost:
        """Counted by the server; a file that can't fit whatever the tokenizer is not even read."""
        try:
            size = path.stat().st_size
            with path.open("rb") as f:
                head = f.read(16)
            picture = bool(data_url(head))
            if n_ctx is not None and size > n_ctx * MAX_BYTES_PER_TOKEN and not picture and not is_pdf(head):
                return cls(refused=f"too long: {amount(size)}")
            name, text = await asyncio.to_thread(read_text, path)
        except UsageError as e:
            return cls(
                refused=e.message.removeprefix(f"{path.name} is ").removeprefix("a ").split(",")[0].split(" (")[0]
            )
        except OSError as e:
            return cls(refused=e.strerror or str(e))
        tokens, why_not = await client.counted(model, [{"role": "user", "content": fenced(name, text)}])
        if picture and why_not:
            return cls(refused=why_not.rpartition(": ")[2])
        if tokens is not None and n_ctx is not None and tokens >= n_ctx:
            return cls(tokens, f"too long: {tokens:,} tokens")
        return cls(tokens)

    @property
    def words(self) -> str:
        """In a few words; "" where nothing is known."""
        return self.refused or (f"{self.tokens:,} tokens" if self.tokens is not None else "")


def dropped(pasted: str) -> list[Path]:
    """The files that a terminal typed the paths of because they were dropped on it; none where `pasted` is other text.

    Terminals quote them, put a backslash before spaces, or give file:// addresses.
    """
    text = pasted.strip()
    if not text or "\0" in text or len(text) > 100_000 or not text.startswith(("/", "~", "'", '"', "file://")):
        return []
    whole = _path(text)
    if whole is not None:
        return [whole]
    try:
        parts = shlex.split(text)
    except ValueError:
        return []
    paths = [_path(part) for part in parts]
    return [path for path in paths if path is not None] if paths and None not in paths else []


def _path(text: str) -> Path | None:
    if text.startswith("file://"):
        text = unquote(urlparse(text).path)
    try:
        path = Path(text).expanduser()
        return path if path.is_absolute() and path.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None
