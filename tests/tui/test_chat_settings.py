"""The settings of the chat's screen, and hints without Markdown markers."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.errors import LocalLLMError
from localllm_tui.widgets.answer import AnswerView
from tui.conftest import Driver
from tui.scripted_sse import Finish, Say, ScriptedServer


@pytest.mark.parametrize(
    ("thinking", "title", "text"),
    [("shown", True, True), ("folded", True, False), ("off", False, False)],
)
def test_reasoning_is_shown_as_set_until_a_key_changes_it(
    drive: Any, server: ScriptedServer, thinking: str, title: bool, text: bool
) -> None:
    server.play(Say(["a deep thought"], "reasoning_content"), Say(["Yes."]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.until(lambda: "Yes." in d.screen())
        assert ("Thought (" in d.screen()) == title
        assert ("a deep thought" in d.screen()) == text
        assert d.app.screen.query_one(AnswerView).toggle_thinking()
        await d.until(lambda: ("a deep thought" in d.screen()) != text)

    drive(play, thinking=thinking)


def test_a_hint_is_shown_without_backticks(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.app.page.show_error(LocalLLMError("it failed", hint="run `localllm doctor` first"))
        await d.until(lambda: "Hint: run localllm doctor first" in d.screen())

    drive(play)
