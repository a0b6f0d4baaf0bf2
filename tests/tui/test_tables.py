"""Commands and keys are data.

Each entry of their tables appears in the frames, in /help, in the palette and in plain mode, and
works.
"""

from __future__ import annotations

import io
import itertools
from typing import Any, get_args

import pytest
from textual.app import App
from textual.widget import Widget

from localllm.conversation.history import History
from localllm_tui import line_chat
from localllm_tui.app import ChatApp
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.commands import COMMANDS, help_sections, offered
from localllm_tui.control.keys import (
    APP,
    APPROVAL,
    CHAT,
    COMPOSER,
    FILES,
    HELP,
    KEYS,
    MODELS,
    PICKER,
    SLIDER,
    TURN,
    KeyContext,
    hints,
)
from localllm_tui.screens.chat import ChatScreen
from localllm_tui.screens.dialogs import Approval, HelpScreen
from localllm_tui.screens.models import ModelsScreen
from localllm_tui.screens.picker import ConversationPicker
from localllm_tui.screens.picking import QuestionPicker
from localllm_tui.widgets.composer import Composer
from localllm_tui.widgets.slider import Slider
from localllm_tui.widgets.transcript import Transcript
from tui.conftest import Driver
from tui.scripted_sse import Gate, Say, ScriptedServer

OWNERS: dict[str, type[App[None]] | type[Widget] | type[ConversationPicker]] = {
    APP: ChatApp,
    CHAT: ChatScreen,
    COMPOSER: Composer,
    PICKER: ConversationPicker,
    TURN: Transcript,
    HELP: HelpScreen,
    FILES: QuestionPicker,
    MODELS: ModelsScreen,
    SLIDER: Slider,
    APPROVAL: Approval,
}


def test_every_command_completes_and_explains_itself_in_the_menu(drive: Any) -> None:
    async def play(d: Driver) -> None:
        for command in COMMANDS:
            d.app.page.composer.replace_text(f"/{command.name}")
            await d.pilot.pause()
            assert f"/{command.name} " in d.screen()
            assert command.help[:80] in d.screen()
            await d.press("backspace", "tab")
            first = offered(f"/{command.name[:-1]}")[0]
            assert d.app.page.composer.text == f"/{first.name}" + (" " if first.argument else "")

    drive(play, size=(120, 40))


def test_the_palette_has_every_command_with_a_title(drive: Any) -> None:
    async def play(d: Driver) -> None:
        offered = {(c.title, c.help) for c in d.app.get_system_commands(d.app.screen)}
        titled = {(c.palette, c.help) for c in COMMANDS if c.palette}
        assert len(titled) > 5
        assert titled <= offered
        titles = sorted(title for title, _ in titled)
        for title, following in itertools.pairwise(titles):
            assert not following.startswith(title)

    drive(play)


def test_a_command_runs_from_the_palette(drive: Any, server: ScriptedServer) -> None:
    server.answer("one")
    server.answer("two")

    async def play(d: Driver) -> None:
        await d.ask("q")
        (retry,) = (
            c for c in d.app.get_system_commands(d.app.screen) if c.title == "Retry the last answer"
        )
        retry.callback()
        await d.until(lambda: "two" in d.screen() and not d.app.chat.answering)

    drive(play)
    assert len(server.requests) == 2


def test_only_commands_that_can_be_forced_accept_an_exclamation_mark(drive: Any) -> None:
    async def play(d: Driver) -> None:
        for name in (c.name for c in COMMANDS if c.insist is None):
            await d.send(f"/{name}!")
            await d.until(lambda name=name: f"there is no command /{name}!" in d.screen())

    drive(play)


def test_plain_mode_knows_its_commands(
    server: ScriptedServer,
    history: History,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in COMMANDS:
        server.scripts.clear()
        server.answer("hello")
        server.answer("again")
        monkeypatch.setattr("sys.stdin", io.StringIO(f"hi\n/{command.name}\n"))
        line_chat.run_line_chat(ChatOptions(ChatClient(server.base_url), history, "scripted"))
        said = capsys.readouterr().err
        assert ("needs the full screen" in said) is (not command.plain)
        assert "there is no command" not in said


def test_plain_mode_moves_from_one_found_turn_to_the_next(
    server: ScriptedServer,
    history: History,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answer("The Danube flows\nfrom the Black Forest")
    monkeypatch.setattr("sys.stdin", io.StringIO("name a river\n/find danube\n1\n1\n\n/quit\n"))
    line_chat.run_line_chat(ChatOptions(ChatClient(server.base_url), history, "scripted"))
    out, said = capsys.readouterr()
    assert "1 turns" not in said
    assert said.count("  1  answer: ") == 3
    assert out.count("from the Black Forest") == 3  # as it arrived, and for both requests


def test_every_key_of_the_table_has_an_action(drive: Any) -> None:
    """Every key of the table has an action.

    A caught key with an action that the input does not know would end the app with a KeyError.
    """
    with_actions = [k for k in KEYS if k.action]
    for key in (k for k in with_actions if not k.caught):
        where, _, action = key.action.partition("(")[0].rpartition(".")
        owner = ChatScreen if where == "screen" else OWNERS[key.owner]
        assert callable(getattr(owner, f"action_{action}")), key
    caught = [k for k in with_actions if k.caught]
    assert {k.owner for k in caught} == {COMPOSER}

    async def play(d: Driver) -> None:
        for key in caught:
            await d.press(*key.keys.split(","))
            assert d.app.is_running, key
            await d.press("escape")

    drive(play)


def test_help_lists_every_key_and_command_with_a_help_text(drive: Any) -> None:
    entries = {entry for _, section in help_sections() for entry in section}
    assert {(k.label, k.help) for k in KEYS if k.help} <= entries
    assert {(c.usage, c.help) for c in COMMANDS} <= entries

    async def play(d: Driver) -> None:
        for ask in ("f1", "/help"):
            await (d.press(ask) if ask == "f1" else d.send(ask))
            await d.until(lambda: isinstance(d.app.screen, HelpScreen))
            await d.pilot.pause()
            assert "earlier questions" in d.screen()
            assert "keys and commands" in d.screen()
            await d.press("escape")
            assert not isinstance(d.app.screen, HelpScreen)

    drive(play)


def test_the_frames_show_the_current_keys(drive: Any, server: ScriptedServer) -> None:
    gate = Gate()
    server.play(Say(["slow"]), gate)

    async def play(d: Driver) -> None:
        assert f"{hints('writing')} · F1 help" in d.screen()
        await d.send("/list")
        await d.until(lambda: isinstance(d.app.screen, ConversationPicker))
        assert hints("choosing") in d.screen()
        await d.press("escape")
        await d.send("q")
        await d.until(lambda: "slow" in d.screen())
        assert hints("answering") in d.screen()
        await d.press("escape")
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        await d.send("/edit")
        assert hints("editing") in d.screen()
        await d.press("escape", "f2")
        assert hints("selecting")[:55] in d.screen()

    drive(play)
    assert all(hints(moment) for moment in get_args(KeyContext))


def test_the_palette_lists_the_themes_by_name(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.press("ctrl+p")
        await d.until(lambda: "Branch here" in d.screen())
        await d.press(*"theme nord")
        await d.until(lambda: "Theme: nord" in d.screen())
        await d.press("enter")
        await d.until(lambda: d.app.theme == "nord")

    drive(play)
