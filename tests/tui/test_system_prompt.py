"""The system prompt is always visible above the conversation, and /new says that it is kept."""

from __future__ import annotations

from typing import Any

from localllm.conversation.history import History
from localllm_tui.control.session import Session
from tui.conftest import Driver
from tui.scripted_sse import Comment, Finish, Say, ScriptedServer


def _top(d: Driver) -> str:
    return d.screen().splitlines()[0].strip()


def test_the_system_prompt_is_shown_above_the_conversation_until_removed(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        assert _top(d) == "system: Be brief"
        await d.ask("a")
        assert _top(d) == "a · system: Be brief"
        await d.ask("/system Answer in rhyme,\nand " + "at length " * 30)
        assert _top(d).startswith("a · system: Answer in rhyme, and at length")
        assert len(_top(d)) <= 80
        await d.ask("/system -")
        assert "system:" not in _top(d)

    drive(play, system="Be brief")


def test_a_new_conversation_shows_that_the_system_prompt_is_kept(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.ask("a")
        await d.ask("/new")
        assert _top(d) == "system: Be brief"
        assert "the system prompt is set" in d.screen()
        await d.ask("/system -")
        await d.ask("/new")
        assert "system" not in _top(d)

    drive(play, system="Be brief")


def test_the_system_prompt_is_restored_with_its_conversation(drive: Any, history: History) -> None:
    kept = Session(history, "m", system="Be brief")
    kept.ask("q")

    async def play(d: Driver) -> None:
        assert "system:" not in d.screen()
        await d.ask("/continue")
        await d.until(lambda: _top(d) == "q · system: Be brief")

    drive(play)


def test_changing_the_system_prompt_shows_the_tokens_to_prefill_again(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("ok", usage=(300, 12, 0))

    async def play(d: Driver) -> None:
        await d.ask("/system Be brief")
        assert "prefilled again" not in d.screen()
        await d.ask("a")
        await d.ask("/system Rhyme")
        assert "the whole conversation (312 tokens) is prefilled again" in " ".join(
            d.screen().split()
        )

    drive(play)


def test_tokens_prefilled_again_are_shown_with_the_servers_reason(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("ok", usage=(300, 12, 0))
    server.play(
        Say(["fine"]),
        Comment("cache 290/330 tokens; differs from the cached prompt from token 290"),
        Finish(usage=(330, 2, 290)),
    )
    server.play(
        Say(["well"]),
        Comment("cache 5/350 tokens; 327 known tokens were evicted"),
        Finish(usage=(350, 2, 5)),
    )

    async def play(d: Driver) -> None:
        await d.ask("a")
        await d.ask("b")
        assert "prefilled again" not in d.screen()  # only the end was prefilled, as usual
        await d.ask("c")
        assert "327 tokens were prefilled again: 327 known tokens were evicted" in " ".join(
            d.screen().split()
        )

    drive(play, size=(120, 40))
