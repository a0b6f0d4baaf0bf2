"""The options with which a chat starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from localllm.conversation.history import History
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import ChatEngine, ModelService, ToolHost


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat. The caller closes the history and the client.

    `model`: its name on the server, which also reports the length of its context.
    `resume`: the id of a conversation to open at the start.
    `attached`: files for the first question (name, text).
    `greeting`: text at the top of an empty conversation.
    `model_service`: lists other models that could be run.
    `first_run`: the model is the bundled starter, and no other is installed.
    `tools`: programs that offer tools. They are off until the user enables them.
    `thinking`: how the model's thinking is shown at first.
    `other_model`: a second model, which answers each question too; both answers are then compared.
    `own`: makes the chat's own engine for a model (None: the chat uses it already).
    """

    client: ChatClient
    history: History
    model: str
    resume: str | None = None
    system: str | None = None
    attached: tuple[tuple[str, str], ...] = ()
    greeting: str = ""
    model_service: ModelService | None = None
    first_run: bool = False
    tools: tuple[ToolHost, ...] = ()
    thinking: Literal["shown", "folded", "off"] = "folded"
    own: Callable[[str], ChatEngine] | None = None
    other_model: str = ""
