"""Models without a chat template get a common one.

Its markers are plain text to these models. An answer ends if the model writes one, in every
dialect, and the client never sees this as a stop text that it did not send.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "Hi"}]
WROTE = ("Hello", " there<|im", "_end|> <|im_start|>", "user\nAnd now?")


def answered(path: str, script: tuple[str, ...] = WROTE, **body: Any) -> dict[str, Any]:
    engine = ScriptedEngine(script)
    with running_server({"m": engine}) as server:
        asked = {"model": "m", "messages": MESSAGES, "max_tokens": 64, "stream": False, **body}
        answer = httpx.post(server.url + path, json=asked, trust_env=False)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_an_answer_ends_at_the_marks_of_the_next_turn() -> None:
    choice = answered("/v1/chat/completions")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello there", "stop")


def test_the_template_marker_is_not_reported_as_a_stop_sequence() -> None:
    said = answered("/v1/messages")
    assert said["content"] == [{"type": "text", "text": "Hello there"}]
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)


def test_ollama() -> None:
    said = answered("/api/chat")
    assert (said["message"]["content"], said["done_reason"]) == ("Hello there", "stop")


def test_a_client_that_sets_the_marker_as_stop_sequence_gets_it_reported() -> None:
    said = answered("/v1/messages", stop_sequences=["<|im_end|>"])
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "<|im_end|>")


@pytest.mark.parametrize("body", [{"ignore_eos": True}])
def test_requests_that_ignore_the_end_of_an_answer_continue_after_it(body: dict[str, Any]) -> None:
    assert (
        "And now?" in answered("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    )


def test_a_plain_completion_does_not_end_at_the_marks_of_a_turn() -> None:
    engine = ScriptedEngine(WROTE)
    with running_server({"m": engine}) as server:
        body = {"model": "m", "prompt": "Hi", "max_tokens": 64}
        said = httpx.post(server.url + "/v1/completions", json=body, trust_env=False).json()
    assert said["choices"][0]["text"] == "".join(WROTE)
