"""!COMMAND on the screen: beside what else goes on, until it ends or Esc stops it."""

from __future__ import annotations

from localllm.errors import LocalLLMError
from localllm_tui.control import command_actions
from localllm_tui.screens.background import start
from localllm_tui.screens.chat import ChatScreen


async def run_beside(chat: ChatScreen, command: str) -> None:
    """/run, !COMMAND."""

    async def work() -> None:
        try:
            await command_actions.run_shell(chat, command)
        except LocalLLMError as e:
            await chat.trouble(e)

    start(chat, work, "shell")
