"""Makes the README's pictures: the real chat with a real model, driven as a person would, written
as SVG.

python benchmarks/pictures.py [MODEL]     # docs/pictures/chat.svg, glass.svg (the README has it)
                                          and models.svg
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from localllm.cli.chat import engines
from localllm.cli.chat.model_service import LocalModelService
from localllm.conversation.history import History
from localllm_tui.app import ChatApp
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.screens.models import ModelsScreen

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = (120, 36)
QUESTION = "Explain in three short points why the sky is blue."
LONGEST_S = 300.0


async def until(pilot: Any, what: Callable[[], bool]) -> None:
    """Wait until `what` holds; raises TimeoutError."""

    async def wait() -> None:
        while not what():
            await pilot.pause(0.1)

    await asyncio.wait_for(wait(), LONGEST_S)


async def draw(app: ChatApp) -> None:
    """Ask, and draw the conversation, what it cost, and the models."""

    def keep(name: str) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{name}.svg").write_text(
            app.export_screenshot(title="localllm"), encoding="utf-8"
        )
        print(FOLDER / f"{name}.svg")

    app.chat.titles_after_s = None
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.chat.client.ready and app.chat.n_ctx is not None)
        app.page.composer.insert(QUESTION)
        await pilot.press("enter")
        await until(pilot, lambda: not app.chat.answering)
        await pilot.pause(0.5)
        keep("chat")
        await pilot.press("f3")
        await pilot.pause(0.5)
        keep("glass")
        await pilot.press("f4")
        await until(
            pilot, lambda: isinstance(app.screen, ModelsScreen) and bool(app.screen.rows.choices)
        )
        await pilot.press("down")  # a plan: the model's own row shows where its file lies
        await pilot.pause(0.5)
        keep("models")


def main() -> None:
    """Load the model named (default: the best at hand) and draw."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        engine = engines.engine_for(stack, engines.Wanted(model, own=True), None, at_once=False)
        history = stack.enter_context(History(Path(folder) / "conversations.db"))
        client = ChatClient.of(engine, {"seed": 7, "max_tokens": 200})
        asyncio.run(
            draw(
                ChatApp(
                    ChatOptions(client, history, engine.model, model_service=LocalModelService())
                )
            )
        )


if __name__ == "__main__":
    main()
