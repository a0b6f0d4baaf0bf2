"""Images in the chat are attached like files and sent as parts of the question.

The server counts their tokens.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.conversation.history import History
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import UsageError
from localllm_backends.contract import LoadSpec, Placement
from localllm_tui.app import ChatApp
from localllm_tui.control.attachments import as_sent, check_fits_context, read_text, with_files
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.meter import file_cost
from models.tiny_audio import write_hearing
from models.tiny_vision import write_vision
from support.http_server import running_server
from support.pictures import needs_mtmd, needs_pillow, png
from support.sounds import MP3, needs_miniaudio, wav

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def _asked_once(url: str, shot: Path) -> subprocess.CompletedProcess[str]:
    """Run `localllm chat` with one question about `shot`, at the server at `url`."""
    chat = [sys.executable, "-m", "localllm", "chat", "--url", url, "--attach", str(shot)]
    return subprocess.run(
        [*chat, "--max-tokens", "4", "what is wrong here?"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "LOCALLLM_API_KEY": "none"},
        stdin=subprocess.DEVNULL,
    )


async def _cost(url: str, file: Path) -> tuple[str, bool]:
    """Return the cost that the list of `@` shows for `file`, and whether it can be attached."""
    client = ChatClient(url + "/v1")
    try:
        return await file_cost(client, "tiny", file, 512)
    finally:
        await client.aclose()


def test_an_image_is_attached_like_a_text_file(tmp_path: Path) -> None:
    shot, notes = tmp_path / "shot [1].png", tmp_path / "notes.txt"
    shot.write_bytes(PIXEL)
    notes.write_text("three lines")
    attached = [read_text(shot), read_text(notes)]
    check_fits_context(attached, 64)
    question = with_files("what is wrong?", attached)
    (sent,) = as_sent([{"role": "user", "content": question}])
    image, text = sent["content"]
    assert image["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    assert text["text"].startswith("File notes.txt:")
    assert text["text"].endswith("what is wrong?")
    (item,) = as_sent([{"role": "user", "content": question}], items=True)
    assert [p["type"] for p in item["content"]] == ["input_image", "input_text"]


def test_text_that_looks_like_an_image_stays_text() -> None:
    for text in ("![a](b.png)", "see ![x](data:image/png;base64, …)", "data:image/png;base64,AAAA"):
        message = {"role": "user", "content": text}
        assert as_sent([message]) == [message]
    answer = {"role": "assistant", "content": "![a](data:image/png;base64,AAAA)"}
    assert as_sent([answer]) == [answer]


def test_a_file_that_is_not_text_image_or_sound_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "x.bin"
    other.write_bytes(b"abc\0def")
    with pytest.raises(UsageError, match="text, images and sounds"):
        read_text(other)


def test_a_sound_is_attached_and_utf_16_text_is_not_taken_for_one(tmp_path: Path) -> None:
    talk = tmp_path / "talk.mp3"
    talk.write_bytes(MP3)
    question = with_files("what is said?", [read_text(talk)])
    for items in (False, True):
        (sent,) = as_sent([{"role": "user", "content": question}], items=items)
        sound, text = sent["content"]
        data = base64.b64encode(MP3).decode()
        assert sound == {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}}
        assert text["text"] == "what is said?"
    wide = tmp_path / "notes.txt"
    wide.write_bytes("notes".encode("utf-16"))
    with pytest.raises(UsageError, match="not UTF-8"):
        read_text(wide)


@needs_mtmd()
@needs_miniaudio()
def test_a_sound_is_answered_and_its_length_and_tokens_are_shown(tmp_path: Path) -> None:
    model = write_hearing(tmp_path / "m", "gemma4ua")
    talk = tmp_path / "talk.wav"
    talk.write_bytes(wav(2.0, 1))
    spec = LoadSpec(
        str(model.text),
        n_ctx=512,
        n_seq_max=2,
        placement=Placement(gpu_layers=0),
        projector=str(model.projector),
    )
    with running_server({"tiny": Supervisor(WorkerOptions(spec))}) as running:
        done = _asked_once(running.url, talk)
        assert done.returncode == 0, done.stderr
        words, goes = asyncio.run(_cost(running.url, talk))
    assert goes
    length, tokens = words.split(", ")
    assert length == "0:02"
    assert 50 < int(tokens.removesuffix(" tokens")) < 100


@needs_mtmd()
@needs_pillow()
def test_a_picture_is_answered_and_its_tokens_are_shown(tmp_path: Path) -> None:
    model = write_vision(tmp_path / "m", "llava")
    shot = tmp_path / "shot.png"
    shot.write_bytes(png(80, 60, 1))
    spec = LoadSpec(
        str(model.text),
        n_ctx=512,
        n_seq_max=2,
        placement=Placement(gpu_layers=0),
        projector=str(model.projector),
    )
    with running_server({"tiny": Supervisor(WorkerOptions(spec))}) as running:
        done = _asked_once(running.url, shot)
        assert done.returncode == 0, done.stderr

        words, goes = asyncio.run(_cost(running.url, shot))
    assert goes
    assert 16 < int(words.removesuffix(" tokens")) < 100


def test_a_model_without_image_input_is_reported_before_and_after_sending(
    tmp_path: Path, few_layers: Path
) -> None:
    """A model without image input causes a clear message before and after sending.

    It appears in the list of `@`, in a single answer, and in the chat, which continues without
    the image.
    """
    shot = tmp_path / "shot.png"
    shot.write_bytes(PIXEL)
    engine = Supervisor(
        WorkerOptions(
            LoadSpec(str(few_layers), n_ctx=512, n_seq_max=2, placement=Placement(gpu_layers=0))
        )
    )
    said = "this model does not support images"
    with running_server({"tiny": engine}) as running:
        done = _asked_once(running.url, shot)
        assert done.returncode == 2
        assert done.stdout == ""
        assert said in done.stderr
        assert "recommend --sees" in done.stderr

        async def chat() -> None:
            async with ChatClient(running.url + "/v1") as client:
                assert await file_cost(client, "tiny", shot, 512) == (said, False)
                with History(tmp_path / "chats.db") as history:
                    app = ChatApp(ChatOptions(client, history, "tiny", attached=(read_text(shot),)))
                    async with app.run_test(size=(100, 30)) as pilot:

                        async def ask(text: str) -> None:
                            app.page.composer.insert(text)
                            await pilot.pause()
                            await pilot.press("enter")
                            await pilot.pause()
                            while app.chat.answering:
                                await pilot.pause()
                            await pilot.pause()

                        await ask("what is this?")
                        while said not in str(
                            [static.render() for static in app.query("ErrorNote Static")]
                        ):
                            await pilot.pause(0.05)
                        await ask("say hi")
                        assert app.chat.session.turns[-1].role == "assistant"

        asyncio.run(chat())
