"""Additions to a question other than files (a command's output, a folder), and second answers.

A second answer comes from another model.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from localllm.conversation.history import History
from localllm.errors import UsageError
from localllm_tui.control import commands, shell
from localllm_tui.control.attachments import MAX_OF_A_FOLDER, files_and_folders, read_files
from localllm_tui.screens.dialogs import Approval
from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer
from tui.test_images import PIXEL

posix = pytest.mark.skipif(os.name != "posix", reason="a POSIX shell")


@posix
def test_a_command_runs_after_approval_and_its_output_is_sent_with_the_question(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.send("!echo first-$((40+2))")
        await d.until(
            lambda: isinstance(d.app.screen, Approval) and "echo first-$((40+2))" in d.screen()
        )
        await d.press("n")
        await d.until(lambda: "not run" in d.screen())
        assert d.app.chat.attached == []
        await d.send("!echo first-$((40+2))")
        await d.until(lambda: isinstance(d.app.screen, Approval))
        await d.press("y")
        await d.until(lambda: "first-42" in d.screen() and len(d.app.chat.attached) == 1)
        await d.send("!echo second >&2; exit 3")
        await d.until(lambda: len(d.app.chat.attached) == 2)
        await d.ask("what do they say?")

    drive(play)
    sent = server.requests[0]["messages"][0]["content"]
    assert "File $ echo first-$((40+2)):" in sent
    assert "\nfirst-42\n" in sent
    assert "\nsecond\n[ended with 3]\n" in sent


@posix
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("printf '\\033[31mred\\033[0m\\033]0;title\\007 and \\rback'", "red and back"),
        ("yes", f"[cut after {shell.MAX_BYTES:,} bytes]"),
        ("printf '\\377\\376'", "\ufffd\ufffd"),
        ("true", "[it printed nothing]"),
        ("no-such-program-at-all", "[ended with 127]"),
        ("sleep 60 & sleep 60", "[stopped after 0.5 s]"),
        ("cat", "[it printed nothing]"),
    ],
)
def test_the_output_of_a_command_is_limited_and_has_no_escape_codes(
    command: str, says: str
) -> None:
    before = set(psutil.Process().children(recursive=True))
    said = asyncio.run(shell.output_of(command, within_s=0.5 if "sleep" in command else 20))
    assert said.endswith(says)
    assert "\x1b" not in said
    assert len(said) < shell.MAX_BYTES + 100
    _, alive = psutil.wait_procs(
        [p for p in psutil.Process().children(recursive=True) if p not in before], timeout=60
    )
    assert alive == []


@posix
def test_escape_ends_a_command(drive: Any) -> None:
    async def play(d: Driver) -> None:
        d.app.chat.runs_commands = True
        await d.send("!sleep 300")
        await d.until(
            lambda: any("sleep" in p.name() for p in psutil.Process().children(recursive=True))
        )
        await d.press("escape")
        await d.until(
            lambda: not any("sleep" in p.name() for p in psutil.Process().children(recursive=True))
        )
        assert d.app.chat.attached == []

    drive(play)


def test_text_after_a_mark_that_is_not_a_command_is_a_question() -> None:
    assert [commands.parse(text) for text in ("! dear", "!!ls", "!", "!?", "a !ls")] == [None] * 5
    assert commands.parse("!ls -l | wc") == ("run", "ls -l | wc")
    assert commands.question("!!ls") == "!ls"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "project"
    (here / "src" / "deep").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", here], check=True)
    (here / ".gitignore").write_text("*.log\nbuild/\n")
    (here / "build").mkdir()
    for name in ("notes.txt", "src/a.py", "src/deep/b.py", "src/noise.log", "build/out.txt"):
        (here / name).write_text(f"text of {name}")
    (here / "src" / "shot.png").write_bytes(PIXEL)
    (here / "src" / "picture.bin").write_bytes(b"\0\1\2")
    monkeypatch.chdir(here)
    return here


def test_a_folder_is_attached_without_files_that_git_ignores(
    drive: Any, server: ScriptedServer, folder: Path
) -> None:
    server.count = lambda text: len(text.split())
    server.answer("ok")
    assert [name for name in files_and_folders(folder) if name.endswith("/")] == [
        "src/",
        "src/deep/",
    ]

    async def play(d: Driver) -> None:
        await d.until(lambda: d.app.chat.listed.n_ctx is not None)
        await d.press("@", *"src/")
        await d.until(
            lambda: any("src/ " in line and "tokens" in line for line in d.screen().splitlines())
        )
        await d.press("enter")
        # The sentence wraps at a place that depends on the folder's path.
        await d.until(
            lambda: (
                "attached 2 files, 14 tokens; 2 are skipped, because they are not text"
                in " ".join(d.screen().split())
            )
        )
        await d.ask("what is there?")

    drive(play, size=(120, 40))
    sent = server.requests[0]["messages"][0]["content"]
    assert "File src/a.py:" in sent
    assert "text of src/deep/b.py" in sent
    assert "noise" not in sent


def test_a_folder_with_too_many_files_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no text files"):
        read_files(tmp_path)
    for n in range(MAX_OF_A_FOLDER + 1):
        (tmp_path / f"{n}.txt").write_text("x")
    with pytest.raises(UsageError, match=f"at most {MAX_OF_A_FOLDER}"):
        read_files(tmp_path)


def test_a_retry_with_another_model_is_kept_next_to_the_first_answer(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("the first answer")
    server.answer("the other answer")
    server.answer("the third")

    async def play(d: Driver) -> None:
        await d.ask("which?")
        await d.send("/compare")
        await d.until(lambda: "nothing to compare yet" in d.screen())
        await d.send("/retry nosuch")
        await d.until(lambda: "has no model 'nosuch'" in d.screen())
        names = [m.name for m in await d.app.chat.client.models()]
        other = next((name for name in names if name != "scripted"), names[0])
        await d.ask(f"/retry {other}")
        assert d.app.chat.model == "scripted"  # only for this question
        await d.until(lambda: "◂ 2/2 ▸" in d.screen() and "the other answer" in d.screen())
        await d.ask("/retry")
        await d.until(lambda: "◂ 3/3 ▸" in d.screen() and "the third" in d.screen())
        for argument, beside in (("", "the other answer"), (" 1", "the first answer")):
            await d.send(f"/compare{argument}")
            await d.until(lambda: "two versions of the answer" in d.screen())
            rows = d.screen().splitlines()
            assert any(beside in row and "the third" in row for row in rows), d.screen()
            assert any("scripted" in row and "3/3" in row for row in rows), d.screen()
            await d.press("escape")
        await d.send("/compare 3")
        await d.until(lambda: "version 3 is shown" in d.screen())

    drive(play, size=(120, 40))
    asked = [r["model"] for r in server.requests]
    models = [
        m.meta["model"] for m in history.tree(history.list()[0].id)[0] if m.role == "assistant"
    ]
    assert models == asked
