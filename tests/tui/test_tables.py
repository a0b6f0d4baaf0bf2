"""Commands and keys are data: whatever stands in their tables is in the frames, in /help, in the palette and in plain
mode, and works."""

from __future__ import annotations

import io
from typing import Any

import pytest
from textual.app import App
from textual.widget import Widget

from localllm.conversation.history import History
from localllm_tui import plain
from localllm_tui.app import ChatApp
from localllm_tui.composer import Composer
from localllm_tui.control.client import ChatClient
from localllm_tui.control.commands import COMMANDS, help_markdown
from localllm_tui.control.keys import APP, COMPOSER, KEYS, PICKER, Key, Moment, hints
from localllm_tui.control.session import Session
from localllm_tui.picker import Picker
from tui.conftest import Driver
from tui.scripted_sse import Gate, Say, ScriptedServer

OWNERS: dict[str, type[App[None]] | type[Widget] | type[Picker]] = {APP: ChatApp, COMPOSER: Composer, PICKER: Picker}


def test_every_command_completes_and_explains_itself_in_the_frame(drive: Any) -> None:
    async def play(d: Driver) -> None:
        for command in COMMANDS:
            d.app.composer.replace_text(f"/{command.name}")
            await d.pilot.pause()
            assert f"/{command.name} · {command.help}" in d.screen()
            await d.press("backspace", "tab")
            assert d.app.composer.text == f"/{command.name}" + (" " if command.argument else "")

    drive(play, size=(120, 40))


def test_the_palette_has_every_command_with_a_title(drive: Any) -> None:
    async def play(d: Driver) -> None:
        offered = {(c.title, c.help) for c in d.app.get_system_commands(d.app.screen)}
        titled = {(c.palette, c.help) for c in COMMANDS if c.palette}
        assert len(titled) > 5
        assert titled <= offered

    drive(play)


def test_a_command_runs_from_the_palette(drive: Any, server: ScriptedServer) -> None:
    server.answer("one")
    server.answer("two")

    async def play(d: Driver) -> None:
        await d.ask("q")
        (retry,) = (c for c in d.app.get_system_commands(d.app.screen) if c.title == "Retry the last answer")
        retry.callback()
        await d.until(lambda: "two" in d.screen() and not d.app.answering)

    drive(play)


@pytest.mark.parametrize("insisting", [c.name for c in COMMANDS if c.insist is None])
def test_only_what_can_be_insisted_on_takes_a_bang(drive: Any, insisting: str) -> None:
    async def play(d: Driver) -> None:
        await d.ask(f"/{insisting}!")
        assert f"there is no command /{insisting}!" in d.screen()

    drive(play)


def test_plain_mode_knows_its_commands_and_names_them_for_any_other(
    server: ScriptedServer, history: History, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [f"/{c.name}" for c in COMMANDS if c.plain]
    for command in COMMANDS:
        server.scripts.clear()
        server.answer("hello")
        server.answer("again")
        monkeypatch.setattr("sys.stdin", io.StringIO(f"hi\n/{command.name}\n"))
        plain.talk(ChatClient(server.base_url), "scripted", Session(history, "scripted"))
        said = capsys.readouterr().err
        assert ("without --plain the chat has more" in said) is not command.plain
        if not command.plain:
            assert all(name in said.splitlines()[-1] for name in known)


@pytest.mark.parametrize("key", [k for k in KEYS if k.action], ids=lambda k: f"{k.owner} {k.keys}")
def test_every_key_of_the_table_has_something_to_do(key: Key, drive: Any) -> None:
    """A caught key with an action that the input does not know would end the app with a KeyError."""

    async def play(d: Driver) -> None:
        await d.press(*key.keys.split(","))
        assert d.app.is_running

    if key.caught:
        assert key.owner == COMPOSER
        drive(play)
    else:
        assert callable(getattr(OWNERS[key.owner], f"action_{key.action.partition('(')[0]}"))


def test_help_has_every_key_that_says_something() -> None:
    shown = help_markdown().partition("**Keys**\n\n")[2].splitlines()
    assert shown == [f"- **{key.label}** {key.help}" for key in KEYS if key.help]
    assert len(shown) > 5


def test_the_frames_say_what_the_keys_do_now(drive: Any, server: ScriptedServer) -> None:
    gate = Gate()
    server.play(Say(["slow"]), gate)

    async def play(d: Driver) -> None:
        assert f"{hints(Moment.WRITING)} · /help" in d.screen()
        await d.send("/list")
        await d.until(lambda: isinstance(d.app.screen, Picker))
        assert hints(Moment.CHOOSING) in d.screen()
        await d.press("escape")
        await d.send("q")
        await d.until(lambda: "slow" in d.screen())
        assert hints(Moment.ANSWERING) in d.screen()
        await d.press("escape")
        gate.opened.set()
        await d.until(lambda: not d.app.answering)
        await d.send("/edit")
        assert hints(Moment.EDITING) in d.screen()

    drive(play)
    assert all(hints(moment) for moment in Moment)
