"""A model that is slower than before: the chat shows the server's notice once and stops asking."""

from __future__ import annotations

from collections.abc import Callable

from localllm_tui.control.chat import NOTICE_ASKS
from localllm_tui.widgets.turns import ChatNote
from tui.conftest import Driver
from tui.scripted_sse import Finish, Say, ScriptedServer

SAID = "scripted is slower than before on this machine: 12 tok/s instead of the usual 35"


def test_the_servers_notice_is_shown_once(
    server: ScriptedServer, drive: Callable[..., None]
) -> None:
    async def play(d: Driver) -> None:
        def notes() -> list[str]:
            return [n.text for n in d.app.screen.query(ChatNote) if "slower" in n.text]

        await d.ask("one")
        assert notes() == []
        server.models[0]["notice"] = SAID
        await d.ask("two")
        assert notes() == [SAID]
        await d.ask("three")
        assert notes() == [SAID]

    for _ in range(3):
        server.play(Say(["yes"]), Finish())
    drive(play)


def test_the_list_is_queried_only_a_few_times(
    server: ScriptedServer, drive: Callable[..., None]
) -> None:
    async def play(d: Driver) -> None:
        for i in range(NOTICE_ASKS):
            await d.ask(f"{i}")
        server.models[0]["notice"] = SAID
        await d.ask("late")
        assert not [n for n in d.app.screen.query(ChatNote) if "slower" in n.text]

    for _ in range(NOTICE_ASKS + 1):
        server.play(Say(["yes"]), Finish())
    drive(play)
