"""Answers and errors of other programs' servers, in the shapes that they send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.conversation.history import History
from localllm.errors import LocalLLMError
from localllm_tui.control.server_errors import refused
from localllm_tui.control.stream_events import StreamEvent, TextDelta, ToolCall
from localllm_tui.control.stream_reader import AnswerReader
from localllm_tui.control.thinking_tags import ThinkingTags
from tui.conftest import Driver
from tui.scripted_sse import Json, Raw, Say, ScriptedServer

STOP: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def read(*chunks: dict[str, Any]) -> tuple[str, str, list[ToolCall]]:
    """The text, the thinking and the tool calls of these chunks."""
    answer = AnswerReader()
    events: list[StreamEvent] = []
    for chunk in chunks:
        events += answer.chunk(json.dumps(chunk))
    events += answer.end()
    texts = [event for event in events if isinstance(event, TextDelta)]
    calls = [event for event in events if isinstance(event, ToolCall)]
    return "".join(e.text for e in texts), "".join(e.reasoning for e in texts), calls


def delta(**members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": members}]}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "reasoning_text", "thinking"])
def test_thinking_is_read_under_each_of_its_names(name: str) -> None:
    assert read(delta(**{name: "hm"}), delta(content="yes"), STOP)[:2] == ("yes", "hm")


def test_thinking_that_is_sent_under_two_names_is_read_once() -> None:
    both = delta(reasoning="hm", reasoning_content="hm")
    assert read(both, delta(content="yes"), STOP)[:2] == ("yes", "hm")


def test_a_content_in_parts_is_text_and_thinking() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    text = {"type": "text", "text": "yes"}
    assert read(delta(content=[thinking, image, text]), STOP)[:2] == ("yes", "hm")


def test_a_refusal_is_the_text_of_the_answer() -> None:
    assert read(delta(refusal="I can't."), STOP)[0] == "I can't."


def test_only_the_first_of_several_answers_is_read() -> None:
    second = {"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "length"}]}
    assert read(delta(content="yes"), second, STOP)[0] == "yes"


def test_a_message_beside_deltas_is_not_read_twice() -> None:
    last = {"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]}
    assert read(delta(content="yes"), last)[0] == "yes"


@pytest.mark.parametrize("index", [{}, {"index": 0}])
def test_calls_without_an_index_of_their_own_are_told_apart_by_their_ids(
    index: dict[str, int],
) -> None:
    pieces = [
        {"id": "a", "function": {"name": "f", "arguments": "{"}, **index},
        {"function": {"arguments": "}"}, **index},
        {"id": "b", "function": {"name": "g", "arguments": "{}"}, **index},
    ]
    assert read(*(delta(tool_calls=[piece]) for piece in pieces), STOP)[2] == [
        ToolCall("a", "f", "{}"),
        ToolCall("b", "g", "{}"),
    ]


@pytest.mark.parametrize(
    ("said", "thinking", "text"),
    [
        ("<think>\nhm <b>\n</think>\n\nyes </think>", "hm <b>", "yes </think>"),
        (" <think></think>yes", "", "yes"),
        ("<think>hm", "hm", ""),
        ("<thin air>", "", "<thin air>"),
        ("<thi", "", "<thi"),
        ("a <think>b</think>", "", "a <think>b</think>"),
    ],
)
@given(sizes=st.lists(st.integers(1, 9), min_size=1))
def test_thinking_between_tags_at_the_beginning_is_thinking_with_any_division(
    said: str, thinking: str, text: str, sizes: list[int]
) -> None:
    tags = ThinkingTags()
    pairs = []
    at = 0
    while at < len(said):
        size = sizes[len(pairs) % len(sizes)]
        pairs.append(tags.feed(said[at : at + size]))
        at += size
    pairs.append(tags.end())
    assert "".join(pair[0] for pair in pairs).strip() == thinking
    assert "".join(pair[1] for pair in pairs) == text


def test_blanks_before_thinking_are_kept_back_only_up_to_a_limit() -> None:
    """Each piece of a beginning is looked at again, so a megabyte of blanks would take hours."""
    tags = ThinkingTags()
    pieces = [tags.feed(" ") for _ in range(1000)]
    assert "".join(text for _, text in pieces) == " " * 1000


def test_thinking_between_tags_is_folded_and_not_sent_again(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(Say(["<thi", "nk>\nhm", "\n</think>\n", "\nyes"]), Raw(_data(STOP)))
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.ask("why?")
        assert "<think>" not in d.screen()
        await d.ask("and now?")

    drive(play)
    assert server.requests[1]["messages"][1]["content"] == "yes"
    assert history.messages(history.list()[0].id)[1].reasoning == "hm"


def test_an_answer_that_is_not_streamed_is_read(drive: Any, server: ScriptedServer) -> None:
    message = {"role": "assistant", "content": "all at once"}
    server.play(Json({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "all at once" in d.screen()

    drive(play)


def test_an_error_by_its_event_is_shown(drive: Any, server: ScriptedServer) -> None:
    server.play(Say(["half"]), Raw(b'event: error\ndata: {"message":"overloaded"}\n\n'))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "half" in d.screen()
        assert "overloaded" in d.screen()

    drive(play)


def test_a_connection_that_ends_within_a_line_broke(drive: Any, server: ScriptedServer) -> None:
    server.play(Say(["half"]), Raw(b'data: {"choices":[{"delta":{"con'))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "half" in d.screen()
        assert "ended the answer before it was complete" in d.screen()

    drive(play)


PAGE = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
FIELD = {"loc": ["body", "top_k"], "msg": "not permitted"}


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"object": "error", "message": "too long"}, "the server answered 400: too long"),
        (400, {"detail": "not loaded"}, "the server answered 400: not loaded"),
        (422, {"detail": [FIELD]}, "the server answered 422: top_k: not permitted"),
        (502, PAGE, "the server answered 502: Bad Gateway"),
        (504, b"<!DOCTYPE html><p>sorry", "the server answered 504: Gateway Timeout"),
        (502, b"<html>" + b"<title " * 100_000, "the server answered 502: Bad Gateway"),
        (429, b"", "the server answered 429"),
        (400, {"error": "boom"}, "boom"),
        (400, {"detail": [1, {}]}, 'the server answered 400: {"detail": [1, {}]}'),
    ],
)
def test_a_refusal_says_the_server_s_words(status: int, body: Any, message: str) -> None:
    assert _refused(status, body).message == message


@pytest.mark.parametrize(
    ("status", "after", "hint"),
    [
        (429, "20", "the server asks to wait 20 s"),
        (503, "7", "the server asks to wait 7 s"),
        (429, "Wed, 21 Oct 2027 07:28:00 GMT", "wait until Wed, 21 Oct 2027 07:28:00 GMT"),
        (429, "", "limits requests"),
        (401, "", "--api-key"),
        (400, "", ""),
    ],
)
def test_the_hint_of_a_refusal_says_what_to_do(status: int, after: str, hint: str) -> None:
    shown = _refused(status, {"error": {"message": "no"}}, after).hint
    assert hint in shown if hint else not shown


def _refused(status: int, body: Any, after: str = "") -> LocalLLMError:
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    headers = {}
    if after:
        headers["retry-after"] = after
    return refused(status, headers, body)


def _data(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def test_tokens_are_not_shown_if_the_server_does_not_count(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    for _ in range(2):
        server.play(Say(["one ", "two ", "three"]), Raw(_data(STOP)))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "context" not in d.screen().splitlines()[-1]
        await d.ask("/retry")
        assert "context" not in d.screen().splitlines()[-1]
        await d.ask("/compare")
        await d.until(lambda: "1/2 scripted" in d.screen())
        assert "tokens" not in d.screen()

    drive(play, size=(100, 40))
    for turn in history.messages(history.list()[0].id):
        assert "prompt_tokens" not in turn.meta
