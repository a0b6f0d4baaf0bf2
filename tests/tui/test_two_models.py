"""`chat -m A -m B`: two models answer each question.

The tests use two real tiny models, and the screen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localllm.library import store
from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer

OPTIONS = ("--own", "--context", "512", "--max-tokens", "4", "--temperature", "0")


@pytest.fixture
def installed(tiny_model: Path, tmp_path: Path) -> tuple[str, str]:
    """Install two models and return their names."""
    folder = tmp_path / "library"
    folder.mkdir()
    for name in ("alpha", "beta"):
        shutil.copy(tiny_model, folder / f"{name}.gguf")
    store.adopt(folder)
    return "alpha", "beta"


def chat(*words: str, piped: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localllm", "chat", *words, *OPTIONS]
    return subprocess.run(
        command, input=piped, capture_output=True, text=True, env={**os.environ}, check=False
    )


def test_without_a_terminal_both_answers_are_printed_with_the_models_names(
    installed: tuple[str, str],
) -> None:
    single = [chat("-m", name, "Say hi").stdout for name in installed]
    both = chat("-m", "alpha", "-m", "beta", "Say hi")
    assert both.returncode == 0, both.stderr
    assert both.stdout.splitlines()[0] == "alpha:"
    assert both.stdout == f"alpha:\n{single[0]}beta:\n{single[1]}"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-m", "alpha", "-m", "nosuch", "hi"], "no model is called 'nosuch'"),
        (["-m", "alpha", "-m", "alpha", "hi"], "-m names alpha twice"),
        (["-m", "a", "-m", "b", "-m", "c", "hi"], "-m names 3 models"),
        (["-m", "alpha", "-m", "beta", "--continue", "hi"], "--continue and two models"),
    ],
)
def test_invalid_options_with_two_models_are_refused_before_any_answer(
    words: list[str], error: str, installed: tuple[str, str]
) -> None:
    refused = chat(*words)
    assert refused.returncode in (2, 3)
    assert error in refused.stderr
    assert refused.stdout == ""


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_the_line_based_chat_shows_both_models_in_turn(installed: tuple[str, str]) -> None:
    ours, theirs = os.openpty()
    words = ["chat", "--plain", "-m", "alpha", "-m", "beta", *OPTIONS]
    child = subprocess.Popen(
        [sys.executable, "-m", "localllm", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    seen = b""
    typed = {b"> ": b"hello\n", b"beta answers:": b"\x04"}
    try:
        while piece := os.read(ours, 65536):
            seen += piece
            for text in [text for text in typed if text in seen]:
                os.write(ours, typed.pop(text))
    except OSError:  # the child has ended
        pass
    os.close(ours)
    assert child.wait() == 0, seen
    assert seen.count(b"\n> ") + seen.startswith(b"> ") >= 1
    assert not typed, seen


def test_the_screen_compares_the_answers_to_each_question(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("first words")
    server.answer("other words")

    async def play(d: Driver) -> None:
        await d.send("hello?")
        await d.until(lambda: "two versions of the answer" in d.screen())
        assert "first words" in d.screen()
        assert "other words" in d.screen()

    drive(play, size=(120, 40), other_model="second")
    assert [request["model"] for request in server.requests] == ["scripted", "second"]


def test_an_answer_that_is_stopped_or_asked_again_is_not_compared(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("first words")
    server.answer("other words")
    server.answer("again words")

    async def play(d: Driver) -> None:
        await d.send("hello?")
        await d.until(lambda: "two versions of the answer" in d.screen())
        await d.press("escape")
        await d.send("/retry")
        await d.until(lambda: "again words" in d.screen() and not d.app.chat.answering)
        assert "two versions" not in d.screen()

    drive(play, size=(120, 40), other_model="second")
    assert [request["model"] for request in server.requests] == ["scripted", "second", "scripted"]
