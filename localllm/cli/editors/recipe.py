"""What connecting a program takes: files, steps a person must take, environment variables, and the calls it makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Probe = Literal["models", "chat", "tools", "responses", "anthropic", "ollama", "fim"]


@dataclass(frozen=True, slots=True)
class Target:
    """The server to connect to: `url` without a path, one model of it, its context in tokens, the key if any; and
    which of its models complete code and make embeddings, where it serves such."""

    url: str
    model: str
    n_ctx: int
    api_key: str | None = None
    autocomplete: str | None = None
    embedding: str | None = None

    @property
    def key(self) -> str:
        """The key, or the word clients get that insist on one."""
        return self.api_key or "local"

    @property
    def answer_tokens(self) -> int:
        """Room for an answer in clients that want input and output apart."""
        return max(256, min(8192, self.n_ctx // 4))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file to write. `merge` is put into the JSON there, `text` is the whole of a file of our own."""

    path: Path
    merge: Mapping[str, Any] | None = None
    text: str | None = None
    merge_list_by: str = ""

    def shown(self) -> str:
        """What to write by hand."""
        return self.text if self.text is not None else json.dumps(self.merge, indent=2)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to connect one program. `checked`: the version that a whole tool loop was run with, on this very
    configuration ("" = the recipe is from its documentation alone)."""

    name: str
    files: tuple[ConfigFile, ...] = ()
    steps: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ("models", "chat")
    environment: Mapping[str, str] = field(default_factory=dict)
    checked: str = ""
