"""Who answers: an engine of the chat's own, loaded behind the screen, or a server that runs already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from localllm.errors import LocalLLMError

State = Literal["loading", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an engine is with its first model: `share` of it is loaded, from 0 to 1. `failed` with `error`; what asks it
    for another model, or for this one again, may all the same unless it is `down`."""

    state: State = "ready"
    share: float = 1.0
    error: LocalLLMError | None = None
    down: bool = False

    def words(self, model: str) -> str:
        """In a few words; "" where there is nothing to wait for."""
        if self.state != "loading":
            return ""
        return f"loading {model}" + (f" {self.share:.0%}" if self.share > 0 else "")


class Engine(Protocol):
    """An OpenAI-compatible server at `base_url` (…/v1), or behind a Unix socket, and the `model` of it to ask first."""

    @property
    def base_url(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def api_key(self) -> str | None: ...

    @property
    def unix_socket(self) -> str: ...

    @property
    def where(self) -> str:
        """Its address, as people say it; "" for the chat's own."""
        ...

    def start(self) -> None:
        """Begin to load, in a thread; once is enough."""
        ...

    def progress(self) -> Progress:
        """How far it is."""
        ...

    def stop(self) -> None:
        """Let it go."""
        ...


def is_here(engine: Engine) -> bool:
    """Whether what is asked stays on this machine."""
    host = urlsplit(engine.base_url).hostname or ""
    return bool(engine.unix_socket) or host in ("localhost", "::1") or host.startswith("127.")


# Makes an engine of the chat's own with a model: what a chat goes on with whose server went away.
MakesEngine = Callable[[str], Engine]
