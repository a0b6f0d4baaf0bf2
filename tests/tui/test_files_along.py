"""Files with a question: found by @, dropped on the terminal, or pasted.

Each file's token cost is shown before it is sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual import events

from localllm_tui.control.attachments import dropped_files, files_below
from localllm_tui.widgets.file_menu import FileMenu
from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "project"
    (here / "src" / "deep").mkdir(parents=True)
    (here / ".hidden").mkdir()
    (here / ".hidden" / "secret.txt").write_text("no")
    (here / "notes.txt").write_text("the secret is 7")
    (here / "src" / "deep" / "engine.py").write_text("x = 1\n" * 20)
    (here / "src" / "long.txt").write_text("word " * 1000)
    (here / "src" / "picture.bin").write_bytes(b"\0\1\2")
    monkeypatch.chdir(here)
    return here


def files_of(d: Driver) -> FileMenu:
    return d.app.page.query_one(FileMenu)


def test_the_file_list_omits_hidden_and_ignored_files(folder: Path) -> None:
    assert files_below(folder) == [
        "notes.txt",
        "src/deep/engine.py",
        "src/long.txt",
        "src/picture.bin",
    ]


def test_an_at_finds_a_file_shows_its_tokens_and_attaches_it(
    drive: Any, server: ScriptedServer, folder: Path
) -> None:
    server.count = lambda text: len(text.split())
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.until(lambda: d.app.chat.listed.n_ctx is not None)
        await d.type("look at ")
        await d.press("@")
        await d.until(
            lambda: "too long" in d.screen() and "tokens" in d.screen() and "binary" in d.screen()
        )
        await d.press(*"sdeg")
        await d.until(lambda: "engine.py" in d.screen() and "long.txt" not in d.screen())
        await d.press("enter")
        await d.until(lambda: bool(d.app.chat.attached))
        assert d.app.page.composer.text == "look at @engine.py "
        assert "engine.py" in str(d.app.page.composer.border_title)
        await d.press("enter")
        await d.until(lambda: bool(server.requests) and not d.app.chat.answering)

    drive(play)
    assert server.requests[0]["messages"][0]["content"].startswith("File engine.py:\n```py\nx = 1")


def test_every_visible_file_has_its_token_count_after_scrolling_too(
    drive: Any, server: ScriptedServer, folder: Path
) -> None:
    server.count = lambda text: len(text.split())
    for n in range(60):
        (folder / f"a{n:02}.txt").write_text("word")
    (folder / "a00.txt").write_bytes(b"\xff\xfe")

    async def play(d: Driver) -> None:
        def without_cost() -> list[str]:
            rows = [line for line in d.screen().splitlines() if ".txt" in line and "@" not in line]
            return [row for row in rows if "tokens" not in row and "not UTF-8 text" not in row]

        await d.press("@")
        await d.until(lambda: "a05.txt" in d.screen() and not without_cost())
        for _ in range(30):
            await d.press("down")
        await d.until(lambda: "a30.txt" in d.screen() and not without_cost())
        assert "tokens" in d.screen()

    drive(play, size=(120, 40))


def test_a_file_too_long_for_the_context_is_not_attached(
    drive: Any, server: ScriptedServer, folder: Path
) -> None:
    server.count = lambda text: len(text.split())

    async def play(d: Driver) -> None:
        await d.until(lambda: d.app.chat.listed.n_ctx is not None)
        await d.press("@")
        await d.press(*"long")
        await d.until(lambda: "too long: " in d.screen())
        await d.press("enter")
        await d.until(lambda: "long.txt can't be attached" in d.screen())
        await d.press("escape")
        assert not files_of(d).display
        assert d.app.page.composer.text == "@long"
        assert not d.app.chat.attached

    drive(play, toasts=True)


def test_an_at_within_a_word_opens_no_list(drive: Any, folder: Path) -> None:
    async def play(d: Driver) -> None:
        await d.press(*"me", "@", *"home")
        assert not files_of(d).display
        assert d.app.page.composer.text == "me@home"

    drive(play)


def test_paths_that_a_terminal_types_for_dropped_files_are_recognised(tmp_path: Path) -> None:
    plain, spaced = tmp_path / "a.txt", tmp_path / "b c'd.txt"
    for path in (plain, spaced):
        path.write_text("x")
    assert dropped_files(f"{plain}") == [plain]
    assert dropped_files(f"{spaced}\n") == [spaced]
    assert dropped_files(str(spaced).replace(" ", "\\ ").replace("'", "\\'")) == [spaced]
    assert dropped_files(f"'{plain}' \"{spaced}\"") == [plain, spaced]
    assert dropped_files(f"file://{str(spaced).replace(' ', '%20')}") == [spaced]
    for text in (
        "",
        "hello",
        "/no/such/file",
        f"{plain} and more",
        "a.txt",
        f"see {plain}",
        "'",
        "/" * 5000,
    ):
        assert dropped_files(text) == [], text


def test_a_dropped_file_is_attached_and_can_be_removed(
    drive: Any, server: ScriptedServer, folder: Path
) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        d.app.post_message(events.Paste(f"'{folder / 'notes.txt'}'"))
        await d.until(lambda: bool(d.app.chat.attached))
        assert d.app.page.composer.text == ""
        await d.ask("/attach -")
        assert not d.app.chat.attached
        d.app.post_message(events.Paste("/etc/nothing like a path"))
        await d.until(lambda: bool(d.app.page.composer.text))
        await d.press("enter")
        await d.until(lambda: bool(server.requests) and not d.app.chat.answering)

    drive(play)
    assert server.requests[0]["messages"][0]["content"] == "/etc/nothing like a path"


def test_a_pasted_megabyte_is_attached_as_a_file_or_refused_as_too_long(
    drive: Any, server: ScriptedServer
) -> None:
    server.models = [{"id": "scripted", "context_length": 200_000}]
    server.answer("ok")
    pasted = "line of text\n" * 80_000

    async def play(d: Driver) -> None:
        await d.until(lambda: d.app.chat.listed.n_ctx is not None)
        await d.type("draft")
        d.app.post_message(events.Paste(pasted))
        await d.until(lambda: "pasted-1.txt" in d.screen())
        d.app.post_message(events.Paste(pasted))
        await d.until(lambda: "can't fit" in d.screen())
        assert d.app.page.composer.text == "draft"
        await d.press("enter")
        await d.until(lambda: bool(server.requests) and not d.app.chat.answering)

    drive(play)
    assert pasted.strip() in server.requests[0]["messages"][0]["content"]


@pytest.mark.parametrize("said", ["hi @alice ok ?", "@ home", "@notes and more", "a @zz"])
def test_an_at_in_prose_loses_no_key(
    drive: Any, server: ScriptedServer, folder: Path, said: str
) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        for letter in said:
            await d.press(letter)
        assert d.app.page.composer.text == said
        await d.until(lambda: not files_of(d).display)
        await d.press("enter")
        await d.until(lambda: bool(server.requests) and not d.app.chat.answering)

    drive(play)
    assert server.requests[0]["messages"][0]["content"] == said


def test_the_list_of_files_is_below_the_message_and_is_filtered(
    drive: Any, server: ScriptedServer, folder: Path
) -> None:
    async def play(d: Driver) -> None:
        await d.press(*"see @")
        await d.until(lambda: files_of(d).option_count == 6)
        assert files_of(d).region.y >= d.app.page.composer.region.bottom
        assert d.app.focused is d.app.page.composer
        await d.until(lambda: "Enter attaches" in str(d.app.page.composer.border_subtitle))
        await d.press("down", "down", "up", *"no")
        assert d.app.page.composer.text == "see @no"
        await d.until(lambda: files_of(d).option_count == 1)
        await d.press("backspace", "backspace")
        await d.until(lambda: files_of(d).option_count == 6)
        await d.press("escape", "s", "r")
        assert not files_of(d).display
        await d.press("space", "@", "n", "o")
        await d.until(lambda: files_of(d).option_count == 1)
        await d.press("tab")
        await d.until(lambda: bool(d.app.chat.attached))
        assert d.app.page.composer.text == "see @sr @notes.txt "

    drive(play)
