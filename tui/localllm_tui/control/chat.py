"""What the slash commands need of the chat that shows what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from localllm.conversation.history import History, StoredMessage
from localllm_tui.control.client import ChatClient, ListedModel
from localllm_tui.control.interfaces import EnergyMeter, EngineFactory, ModelService, ToolHost
from localllm_tui.control.session import Session


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`model` is the name the server knows; how long its context is, the server tells.

    `resume` is a conversation's id to open at the start; `attached` are files for the first question (name, text);
    `greeting` is shown at the top of an empty conversation; `engine_factory` makes an engine of the chat's own, for when a server goes
    away; `model_service` knows what else could be run;
    `first_run`: the model is the bundled starter, and no other is installed;
    `tools` are programs that offer tools, off until they are asked for; `energy` makes what measures joules where the model runs here.
    The history and the client stay the caller's to close.
    """

    client: ChatClient
    history: History
    model: str
    resume: str | None = None
    system: str | None = None
    attached: tuple[tuple[str, str], ...] = ()
    greeting: str = ""
    engine_factory: EngineFactory | None = None
    model_service: ModelService | None = None
    first_run: bool = False
    tools: tuple[ToolHost, ...] = ()
    energy: Callable[[], EnergyMeter] | None = None


class Chat(Protocol):
    """What the slash commands need of a chat: the one on a screen, and the one line by line. Methods show what they did."""

    client: ChatClient
    history: History
    model: str
    n_ctx: int | None  # None while not known
    session: Session
    system_asked: str | None  # that the chat was started with
    runs_commands: bool  # whether the user said so
    attached: list[tuple[str, str]]  # files for the next question: name and text

    @property
    def answering(self) -> bool: ...

    @property
    def answer_text(self) -> str:
        """The text of the answer in progress; "" when there is none."""

    async def say(self, text: str, *, markdown: bool = False) -> None:
        """Say something that is no part of the conversation."""

    async def open(self, session: Session, at: int = 0) -> None:
        """Show another conversation, at the turn of this id (0: its end)."""

    async def choose(self, words: str, *, within: bool = False) -> None:
        """Let the user pick a conversation, searching for `words`, and open it; `within`: a turn of this one."""

    async def stop_answer(self) -> bool:
        """Stop the answer in progress and wait until it is on disk. Returns whether there was one."""

    async def answer_again(self, to: StoredMessage | None = None, *, continues: bool = False, model: str = "") -> None:
        """Ask for another answer to a question (None: the last), or to that of an answer; `continues`: for more of it;
        `model`: of another model, this once.

        Raises UsageError when nothing was asked, or there is nothing to go on with.
        """

    async def redraw(self) -> None:
        """Show the branch that the session shows now."""

    def edit(self, turn: StoredMessage) -> None:
        """Let the user edit `turn`; the result becomes another version of it."""

    def attach(self, name: str, text: str) -> None: ...

    def detach(self) -> None: ...

    def use_model(self, name: str, models: list[ListedModel]) -> None: ...

    def to_clipboard(self, text: str, what: str) -> None: ...

    async def write(self, text: str) -> None:
        """Have `text` as what is typed; ask it where nothing typed can be changed."""

    async def approve(self, about: str, what: str) -> bool:
        """Ask the user whether `what` may be done; `about` names it."""

    async def leave(self) -> None: ...
