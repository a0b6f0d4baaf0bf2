"""What a chat is opened with: decided by whoever starts it, and carried whole to the screen."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.conversation.history import History
from localllm_tui.control.client import ChatClient
from localllm_tui.control.desk import Desk
from localllm_tui.control.engine import MakesEngine
from localllm_tui.control.tools import ToolHost


@dataclass(frozen=True, slots=True)
class Opening:
    """`model` is the name the server knows; how long its context is, the server tells.

    `resume` is a conversation's id to open at the start; `attached` are files for the first question (name, text);
    `greeting` is shown at the top of an empty conversation; `own` makes an engine of the chat's own, for when a server goes
    away; `desk` knows what else could be run;
    `first_run`: the model is the bundled starter, and no other is installed;
    `tools` are programs that offer tools, off until they are asked for. The history and the client stay the caller's to close.
    """

    client: ChatClient
    history: History
    model: str
    resume: str | None = None
    system: str | None = None
    attached: tuple[tuple[str, str], ...] = ()
    greeting: str = ""
    own: MakesEngine | None = None
    desk: Desk | None = None
    first_run: bool = False
    tools: tuple[ToolHost, ...] = ()
