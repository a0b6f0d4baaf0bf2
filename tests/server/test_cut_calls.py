"""A limit or a client's stop text in the middle of a call: the client gets no call that could be run, by any reply."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
# Open parameters are held by no grammar, so the script is the model's own words from beginning to end.
WRITE = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call><function=…>{% endif %}"
CALL = (
    "I write it.\n<tool_call>\n<function=write>\n<parameter=text>\nint main() { return 0; }\n</parameter>\n"
    "</function>\n</tool_call>"
)


def choice(**body: Any) -> dict[str, Any]:
    """The one choice of a reply, whole; the stream is folded and must say the same."""
    engine = ScriptedEngine([CALL], chat_template=TEMPLATE)
    asked = {"messages": [{"role": "user", "content": "Write."}], "tools": [WRITE], **body}
    with running_server({"m": engine}) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        whole: dict[str, Any] = http.post(CHAT, json=asked).json()["choices"][0]
        stream = http.post(CHAT, json={**asked, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    choices = [c for chunk in chunks for c in chunk["choices"]]
    text = "".join(c["delta"].get("content") or "" for c in choices)
    assert text == (whole["message"]["content"] or "")
    assert any(c["delta"].get("tool_calls") for c in choices) == bool(whole["message"].get("tool_calls"))
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [whole["finish_reason"]]
    return whole


def test_a_whole_call_is_one() -> None:
    got = choice()
    assert got["finish_reason"] == "tool_calls"
    assert json.loads(got["message"]["tool_calls"][0]["function"]["arguments"]) == {"text": "int main() { return 0; }"}


@pytest.mark.parametrize("at", ["<tool_", "<function=wri", "return", "</param", "</function"])
def test_one_that_max_tokens_cut_is_none(at: str) -> None:
    got = choice(max_tokens=CALL.index(at) + len(at))
    assert (got["finish_reason"], got["message"]["content"]) == ("length", "I write it.")
    assert not got["message"].get("tool_calls")


def test_one_that_a_stop_text_cut_is_none() -> None:
    got = choice(stop=["return"])
    assert (got["finish_reason"], got["message"]["content"]) == ("stop", "I write it.")
    assert not got["message"].get("tool_calls")
