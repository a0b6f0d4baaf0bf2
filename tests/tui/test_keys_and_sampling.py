"""Keys from config.toml, and visible sampling settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localllm import paths
from localllm.cli.chat.config import apply_key_bindings
from localllm.errors import UsageError
from localllm_tui.control import keys, sampling
from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer, UntilGone


@pytest.fixture(autouse=True)
def usual_keys() -> Iterator[None]:
    yield
    keys.remap({}, ())


def config(text: str) -> None:
    paths.private_dir(paths.config_dir())
    (paths.config_dir() / "config.toml").write_text(text)


def test_a_key_from_config_toml_works_and_is_shown_in_the_hints(
    drive: Any, server: ScriptedServer
) -> None:
    config('[chat_keys]\n"chat.stop" = "f9"\n"command.models" = "ctrl+g"\n')
    apply_key_bindings()
    gone = UntilGone()
    server.play(gone)

    async def play(d: Driver) -> None:
        await d.send("q")
        await d.until(lambda: "F9 stops" in d.screen())
        await d.press("escape")
        assert d.app.chat.answering
        await d.press("f9")
        await d.until(lambda: not d.app.chat.answering)
        await d.press("f1")
        await d.until(lambda: "Ctrl+G" in d.screen())

    drive(play, size=(100, 60))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[chat_keys]\n"chat.stopp" = "f9"', "unknown name: chat.stopp"),
        ('[chat_keys]\n"chat.stop" = 7', "must be keys"),
        ('[chat_keys]\n"turn.edit" = "r"', "two things at once: turn.edit and turn.again"),
        ("chat_keys = 3", "`chat_keys` must be a table"),
    ],
)
def test_an_invalid_key_in_config_is_an_error(text: str, why: str) -> None:
    config(text)
    with pytest.raises(UsageError, match=why):
        apply_key_bindings()


def test_every_name_of_a_key_is_unique() -> None:
    named = [(key.id, key.action) for key in keys.KEYS if key.id]
    assert len({name for name, _ in named}) == len(named)


def test_sampling_is_described_in_words_and_can_be_changed(drive: Any) -> None:
    models = [
        {
            "id": "scripted",
            "object": "model",
            "sampling": {"temperature": 0.6, "top_p": 0.9},
            "has_system": True,
        }
    ]

    async def play(d: Driver) -> None:
        await d.until(lambda: "balanced (temperature 0.6)" in d.screen().splitlines()[0])
        assert "the preset's system prompt" in d.screen().splitlines()[0]
        await d.send("/sampling temperature 0")
        await d.until(
            lambda: "always the most likely token (temperature 0)" in d.screen().splitlines()[0]
        )
        await d.send("/sampling seed 7")
        await d.until(lambda: "repeatable (seed 7)" in d.screen().splitlines()[0])
        await d.ask("q")
        assert (server.requests[0]["temperature"], server.requests[0]["seed"]) == (0.0, 7)
        await d.send("/sampling -")
        await d.until(lambda: "balanced (temperature 0.6)" in d.screen().splitlines()[0])

    with ScriptedServer(models=models) as server:
        server.answer("ok")
        drive(play, server_=server, size=(120, 30))


def test_invalid_sampling_is_refused() -> None:
    for text in ("warmth 3", "temperature hot", "top_p 2", "top_k 1.5"):
        with pytest.raises(UsageError):
            sampling.changed({}, text)
    assert sampling.changed({"truncation": "auto", "seed": 1}, "-") == {"truncation": "auto"}
