"""Text from models, tools, servers and file names cannot control the terminal or the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm.conversation.history import History
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.session import Session
from localllm_tui.screens.dialogs import Approval
from tui.conftest import Driver
from tui.scripted_models import ScriptedModelService, choice
from tui.scripted_sse import Comment, Finish, Refuse, Say, ScriptedServer
from tui.test_glass import PHYSICS, TIMINGS
from tui.test_tools import Host, asks

# The title, the clipboard, a C1 control, markup that runs an action, and unmatched closing markup.
EVIL = "\x1b]0;t\x07\x1b]52;c;ZXZpbA==\x07\x9b31m[@click=app.quit]go[/][/red]"
SHOWN = "[@click=app.quit]go"


def harmless(d: Driver) -> None:
    """Check that the screen has no control characters, and no clickable action of the text."""
    shown = d.screen()
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in shown), repr(shown)
    for strip in d.app.screen._compositor.render_strips():
        for segment in strip:
            meta = segment.style.meta if segment.style is not None else {}
            assert "app.quit" not in str(meta.get("@click", ""))
    assert d.app.is_running


def test_text_from_a_server_cannot_control_the_terminal(drive: Any) -> None:
    model = {
        "id": EVIL,
        "object": "model",
        "context_length": 9000,
        "physics": {**PHYSICS, "device": EVIL},
    }
    model |= {"notice": EVIL, "localllm": {"notice": EVIL}}
    with ScriptedServer(
        models=[model, {"id": "scripted", "context_length": 9000, "physics": model["physics"]}]
    ) as server:
        server.play(
            Comment(EVIL),
            Say([EVIL], field="reasoning_content"),
            Say([EVIL]),
            Finish(EVIL, timings=TIMINGS),
        )
        server.play(Refuse(400, {"message": EVIL, "hint": EVIL, "code": EVIL}))

        async def play(d: Driver) -> None:
            await d.ask("/model")
            harmless(d)
            await d.ask("q")
            await d.press("ctrl+t", "f3")
            harmless(d)
            await d.ask("r")
            assert f"Error: ]0;t]52;c;ZXZpbA==31m{SHOWN}" in d.screen()
            harmless(d)
            d.app.chat.use_model(await d.app.chat.client.listed(EVIL))
            await d.ask("/system " + EVIL)
            await d.ask("/title " + EVIL)
            harmless(d)

        drive(play, server_=server, size=(120, 60))


def test_text_from_a_tool_cannot_control_the_terminal(drive: Any, server: ScriptedServer) -> None:
    host = Host(EVIL)
    host.name = EVIL
    server.play(*asks("time", '{"zone": "[/red][@click=app.quit]go[/]"}'))
    server.play(*asks("[/red]" + EVIL.replace("\x1b", ""), "{}"))
    server.answer("done")

    async def play(d: Driver) -> None:
        await d.send("/tools on")
        await d.send("q")
        await d.until(lambda: isinstance(d.app.screen, Approval))
        await d.pilot.pause()
        harmless(d)
        assert SHOWN in d.screen()
        await d.press("y")
        await d.until(lambda: not d.app.chat.answering)
        assert SHOWN in d.screen()
        harmless(d)

    drive(play, tools=(host,), size=(120, 50))


def test_file_names_and_typed_text_cannot_control_the_terminal(
    drive: Any, server: ScriptedServer, tmp_path: Path
) -> None:
    name = EVIL.replace("/", "-")[:80]
    (tmp_path / name).write_text("x")
    server.answer("ok")

    async def play(d: Driver) -> None:
        d.app.chat.attach(name, "text")
        await d.pilot.pause()
        harmless(d)
        assert SHOWN[:12] in d.screen()
        await d.type(EVIL)
        harmless(d)
        await d.press("enter")
        await d.until(lambda: bool(server.requests) and not d.app.chat.answering)
        harmless(d)
        await d.type("/retr" + EVIL)
        await d.press("enter", "up")
        harmless(d)

    drive(play, size=(120, 40))


def test_titles_and_texts_in_lists_cannot_control_the_terminal(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    session = Session(history, EVIL, system=EVIL)
    session.ask(EVIL + " needle")
    answer = PendingAnswer(session)
    answer.add(EVIL, EVIL)
    answer.finish({"finish_reason": "stop", "model": EVIL, "reread_tokens": 9, "reread_why": EVIL})
    session.rename(EVIL)

    async def play(d: Driver) -> None:
        harmless(d)
        await d.send("/list")
        await d.pilot.pause()
        harmless(d)
        await d.press(*"needle", "right", "down")
        harmless(d)
        await d.press("enter")
        await d.until(lambda: d.app.chat.session.id == session.id)
        await d.pilot.pause()
        harmless(d)
        await d.press("f2", "e")
        harmless(d)
        assert "needle" in d.app.page.composer.text

    drive(play, size=(120, 40))


def test_plans_and_model_names_cannot_control_the_terminal(drive: Any) -> None:
    service = ScriptedModelService(choice(EVIL, 2.0, why=EVIL, reasons=[EVIL]), choice("b", 1.0))

    async def play(d: Driver) -> None:
        await d.press("f4")
        await d.until(lambda: "planning" not in d.screen() and SHOWN[:6] in d.screen())
        harmless(d)
        await d.press("w")
        await d.pilot.pause()
        harmless(d)
        await d.press("escape", "m")
        await d.press(*"[/red]", "enter")
        await d.pilot.pause()
        harmless(d)
        assert service.requests[-1].machine == "[/red]"

    drive(play, model_service=service, size=(120, 40))
