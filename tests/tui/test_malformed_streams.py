"""A server may send any data: no interface shows a traceback, and the good part is kept."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Any

import pytest

from localllm.conversation.history import History
from localllm.errors import LocalLLMError, ServerUnreachableError
from localllm_tui import line_chat
from localllm_tui.control.answering import AnswerStream
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.stream_events import AnswerDone, TextDelta, ToolCall
from localllm_tui.control.terminal import copyable
from localllm_tui.screens.dialogs import Approval
from support.examples import NEW
from tui.conftest import Driver
from tui.malformed_shapes import GOOD, shapes
from tui.scripted_sse import Finish, Raw, Say, ScriptedServer
from tui.test_chat_client import collect
from tui.test_tools import Host, asks

ALL = [*shapes()]
# The long tests show every shape on every interface. `test_every_shape_is_read` reads all of them.
SHOWN = ALL if NEW else ALL[::12]


@pytest.mark.parametrize(("name", "stream"), ALL, ids=[name for name, _ in ALL])
def test_every_malformed_stream_is_read_or_refused_with_a_short_error(
    server: ScriptedServer, name: str, stream: bytes
) -> None:
    server.play(Raw(stream))
    told = []

    async def main() -> None:
        async with ChatClient(server.base_url) as client:
            async for event in client.stream("m", [{"role": "user", "content": "hi"}]):
                told.append(event)

    try:
        asyncio.run(main())
        assert isinstance(told[-1], AnswerDone)
    except LocalLLMError as e:
        assert len(e.message.encode()) < 3000  # noqa: PT017
    text = "".join(event.text for event in told if isinstance(event, TextDelta))
    assert text.startswith(GOOD)
    text.encode()


def test_halves_of_a_character_are_joined_across_deltas(server: ScriptedServer) -> None:
    server.play(
        Raw(rb'data: {"choices":[{"delta":{"content":"smile \ud83d"}}]}' + b"\n\n"),
        Raw(rb'data: {"choices":[{"delta":{"content":"\ude00 a\ud800b\udc00 \ud83d"}}]}' + b"\n\n"),
        Finish(),
    )
    events = collect(ChatClient(server.base_url))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert text == "smile \N{GRINNING FACE} a\ufffdb\ufffd \ufffd"


def test_the_pieces_of_a_call_are_joined_before_they_are_decoded(server: ScriptedServer) -> None:
    delta = '{"choices":[{"delta":{"tool_calls":[{"id":"1","function":%s}]}}]}'
    pieces = (r'{"name":"f","arguments":"\ud83d"}', r'{"arguments":"\ude00"}')
    chunks = [Raw(f"data: {delta % piece}\n\n".encode()) for piece in pieces]
    server.play(*chunks, Finish())
    assert ToolCall("1", "f", "\N{GRINNING FACE}") in collect(ChatClient(server.base_url))


@pytest.mark.parametrize(
    ("chunk", "part"),
    [
        ('{"choices":[{"delta":{"content":5}}]}', "choices[0].delta.content is a number, not text"),
        ('{"choices":[{"delta":[1]}]}', "choices[0].delta is a list, not an object"),
        ('{"choices":{"a":1}}', "choices is an object, not a list"),
        (
            '{"choices":[{"delta":{"tool_calls":[{"index":"x"}]}}]}',
            "choices[0].delta.tool_calls[0].index is text, not an index",
        ),
        ("[1,2]", "it is a list, not an object"),
        ("[" * 200_000, "it nests deeper than 64 levels"),
    ],
)
def test_the_error_names_the_malformed_part(server: ScriptedServer, chunk: str, part: str) -> None:
    server.play(Raw(f"data: {chunk}\n\n".encode()), Finish())
    with pytest.raises(ServerUnreachableError) as told:
        collect(ChatClient(server.base_url))
    assert told.value.message == f"the server does not speak the OpenAI API: {part}"
    assert told.value.exit_code == 6


def _play(server: ScriptedServer) -> Sequence[str]:
    for _, stream in SHOWN:
        server.play(Raw(stream))
    for _ in range(len(SHOWN)):  # a tool call is answered, which is one more request
        server.play(Say([GOOD]), Finish())
    return [f"question {n}" for n in range(len(SHOWN) + 1)]


def _check_kept(history: History) -> None:
    answers = []
    for conversation in reversed(history.list()):
        kept = history.messages(conversation.id)
        answers += [turn.content for turn in kept if turn.role == "assistant"]
    assert len(answers) == len(SHOWN) + 1
    assert all(text.startswith(GOOD) for text in answers)


def test_malformed_streams_do_not_end_the_full_screen_chat(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    asked = _play(server)

    async def play(d: Driver) -> None:
        for n, question in enumerate(asked, 1):
            await d.ask(question)
            if n % 20 == 0:
                await d.ask("/new")
        assert d.app.is_running

    drive(play)
    _check_kept(history)


def test_malformed_streams_do_not_end_the_line_based_chat(
    server: ScriptedServer, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "".join(f"{question}\n" for question in _play(server))
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    line_chat.run_line_chat(ChatOptions(ChatClient(server.base_url), history, "scripted"))
    _check_kept(history)


def test_inline(server: ScriptedServer, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    from localllm_tui.inline.chat import InlineFace
    from localllm_tui.inline.page import InlinePage

    # a pipe has no terminal modes
    monkeypatch.setattr(InlinePage, "keep_terminal_over_sleep", lambda _: None)
    asked = _play(server)

    async def main() -> None:
        options = ChatOptions(ChatClient(server.base_url), history, "scripted")
        face = InlineFace(options, reflows=False, typed="")
        running = asyncio.create_task(face.run())
        for question in asked:
            await face.chat.send(question)
            await face.chat.answered()
        await face.chat.leave()
        await running

    with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):
        asyncio.run(main())
    _check_kept(history)


def test_malformed_streams_keep_the_good_part_of_a_single_answer(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in _play(server)[:-1]:
        stream = AnswerStream()
        messages = [{"role": "user", "content": "hi"}]
        try:
            line_chat.ask_once(ChatClient(server.base_url), "m", messages, stream)
        except LocalLLMError as e:
            print(e.message)
        assert capsys.readouterr().out.startswith(GOOD)


@pytest.mark.parametrize(
    "arguments", ["[" * 200_000, '{"zone": 1e999}', '{"zone": "\\ud83d"}', '{"a": ' + "1" * 5000]
)
def test_a_call_with_malformed_arguments_never_ends_the_chat(
    drive: Any, server: ScriptedServer, arguments: str
) -> None:
    host = Host()
    server.play(*asks("time", arguments))
    server.answer("done")

    async def play(d: Driver) -> None:
        await d.send("/tools on")
        await d.send("q")
        await d.until(lambda: isinstance(d.app.screen, Approval) or not d.app.chat.answering)
        if isinstance(d.app.screen, Approval):
            await d.press("y")
        await d.until(lambda: not d.app.chat.answering)
        assert "done" in d.screen()

    drive(play, tools=(host,), size=(100, 40))


def test_copies_have_no_control_characters(drive: Any, server: ScriptedServer) -> None:
    copied: list[str] = []
    server.play(Say(["```\nls\x1b[201~\rrm \u202ex\u2066y\u200bz\r\nend\n```"]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.ask("/copy code")
        assert copied == ["ls[201~rm xy\u200bz\nend"]
        assert copyable("a\x1bb\r\u202e\u200b")[1] == (
            "without 3 control characters, with 1 invisible character"
        )

    drive(play, copy=lambda text: copied.append(text) or True, toasts=True, size=(120, 30))
