"""Open the chat with scripted data in this terminal, without a model or a download.

Use `make screen`, or `make screen ARGS=/models` for another screen: the argument is submitted
first.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from localllm.conversation.history import History
from localllm_tui.app import ChatApp
from localllm_tui.control import commands
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import InstalledModel
from tui.scripted_models import ScriptedModelService, choice
from tui.scripted_sse import Comment, Finish, Say, ScriptedServer
from tui.test_glass import PHYSICS, TIMINGS
from tui.test_snapshots import conversation
from tui.test_tools import Host

ANSWER = (
    "Here is **Markdown**, $x^2$, a table and code:\n\n| a | b |\n|--|--|\n| 1 | 2 "
    "|\n\n```python\nprint('hello')\n```\n"
)
MODEL = {"id": "scripted", "object": "model", "context_length": 8192, "physics": PHYSICS}


def main(first: str) -> None:
    installed = InstalledModel("small", "Q4", 10**9, "localllm", "/models/small.gguf", True)
    service = ScriptedModelService(
        choice("small", 1.0, installed="small"), choice("large", 40.0), disk=[installed]
    )
    service.go_on.release(1000)
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedServer(models=[MODEL]) as server,
        History(Path(folder) / "conversations.db") as history,
    ):
        for _ in range(100):
            thought = Say(["Let me ", "think."], "reasoning_content")
            server.play(
                Comment("prefill 20/40"),
                thought,
                Say(re.findall(r"\S+\s*", ANSWER)),
                Finish(timings=TIMINGS),
            )
        resume = conversation(history)
        client = ChatClient(server.base_url)
        app = ChatApp(
            ChatOptions(client, history, "scripted", resume, model_service=service, tools=(Host(),))
        )

        async def begin(_: Any) -> None:
            if first:
                await commands.submit(app.chat, first)

        app.run(auto_pilot=begin)
        asyncio.run(client.aclose())


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
