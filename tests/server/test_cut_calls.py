"""A token limit or a stop text in the middle of a call: no dialect returns an executable call."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from conversation.call_templates import TEMPLATES
from conversation.test_tool_formats import WRITERS, Calls
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools import format_for
from localllm.engine.messages import Request
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
WRITE = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}<tool_call><function=…>{% endif %}{% for m in messages %}{{ m.content "
    "}}{% "
    "endfor %}"
)
ASKED = "Write."
CALL = (
    "I write it.\n<tool_call>\n<function=write>\n<parameter=text>\nto return "
    "0\n</parameter>\n</function>\n</tool_call>"
)


def writer(reply: str, template: str, held: bool) -> ScriptedEngine:
    """Return a model that writes `reply` character by character.

    If `held` is false, its calls cannot be constrained by a grammar.
    """
    engine = ScriptedEngine(list(reply), chat_template=template)
    engine.holds_calls = held
    return engine


def choice(**body: Any) -> dict[str, Any]:
    """Return the one choice of the complete reply.

    The choice that is put together from the stream must be the same.
    """
    engine = writer(CALL, TEMPLATE, held=False)
    asked = {"messages": [{"role": "user", "content": ASKED}], "tools": [WRITE], **body}
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        whole: dict[str, Any] = http.post(CHAT, json=asked).json()["choices"][0]
        stream = http.post(CHAT, json={**asked, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    choices = [c for chunk in chunks for c in chunk["choices"]]
    text = "".join(c["delta"].get("content") or "" for c in choices)
    assert text == (whole["message"]["content"] or "")
    assert any(c["delta"].get("tool_calls") for c in choices) == bool(
        whole["message"].get("tool_calls")
    )
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [whole["finish_reason"]]
    return whole


def test_a_complete_call_is_returned() -> None:
    got = choice()
    assert got["finish_reason"] == "tool_calls"
    assert json.loads(got["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "text": "to return 0"
    }


@pytest.mark.parametrize("at", ["<tool_", "<function=wri", "return", "</param", "</funct"])
def test_a_call_cut_by_max_tokens_is_not_returned(at: str) -> None:
    got = choice(max_tokens=CALL.index(at) + len(at))
    assert (got["finish_reason"], got["message"]["content"]) == ("length", "I write it.")
    assert not got["message"].get("tool_calls")


def test_a_call_cut_by_a_stop_text_is_not_returned() -> None:
    got = choice(stop=["return"])
    assert (got["finish_reason"], got["message"]["content"]) == ("stop", "I write it.")
    assert not got["message"].get("tool_calls")


JSON_TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
JSON_CALL = (
    '<tool_call>\n{"name": "write", "arguments": {"text": "int main() { return 0; '
    '}"}}\n</tool_call>'
)
DIALECTS = {
    "/v1/chat/completions": lambda reply: (
        reply["choices"][0]["finish_reason"],
        reply["choices"][0]["message"],
    ),
    "/v1/messages": lambda reply: (reply["stop_reason"], reply["content"]),
    "/api/chat": lambda reply: (reply["done_reason"], reply["message"]),
}


def json_reply(path: str, stream: bool, held: bool = True, **body: Any) -> str:
    engine = writer(JSON_CALL, JSON_TEMPLATE, held)
    tool = {"name": "write", "input_schema": {"type": "object"}} if "messages" in path else WRITE
    asked = {
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [tool],
        "stream": stream,
        **body,
    }
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        return http.post(path, json={"model": "m", **asked}).text


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("at", ['"name": "wri', '"text": "int', "0; }"])
def test_a_call_with_truncated_json_is_left_out_of_a_complete_reply(path: str, at: str) -> None:
    most = JSON_CALL.index(at) + len(at)
    limit = {"options": {"num_predict": most}} if "api" in path else {"max_tokens": most}
    reason, message = DIALECTS[path](json.loads(json_reply(path, False, **limit)))
    assert reason in ("length", "max_tokens")
    assert "write" not in json.dumps(message)


def test_arguments_that_a_stop_text_cut_do_not_end_in_a_call() -> None:
    path = "/v1/chat/completions"
    reason, message = DIALECTS[path](
        json.loads(json_reply(path, False, held=False, stop=["return"]))
    )
    assert (reason, message.get("tool_calls")) == ("stop", None)
    stream = json_reply(path, True, held=False, stop=["return"])
    assert '"finish_reason":"stop"' in stream
    assert '"finish_reason":"tool_calls"' not in stream


def test_a_truncated_stream_ends_with_length_and_incomplete_arguments() -> None:
    most = JSON_CALL.index("return")
    stream = json_reply("/v1/chat/completions", True, max_tokens=most)
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    choices = [c for chunk in chunks for c in chunk["choices"]]
    calls = [call for c in choices for call in c["delta"].get("tool_calls") or []]
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads("".join(call["function"].get("arguments") or "" for call in calls))
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]


def test_ollamas_stream_contains_no_partial_call() -> None:
    lines = json_reply(
        "/api/chat", True, options={"num_predict": JSON_CALL.index("return")}
    ).splitlines()
    assert not any(json.loads(line).get("message", {}).get("tool_calls") for line in lines)
    assert json.loads(lines[-1])["done_reason"] == "length"


def test_a_truncated_constrained_call_is_not_an_internal_error_in_any_format() -> None:
    """A constrained call that is cut is not an internal error, in any format and dialect.

    The cut comes at any character, from the model's end, a limit or a stop, also with text that
    no format writes.
    """
    said = {"reply": "", "held": True}

    def script(request: Request) -> list[str]:
        return list(str(said["reply"]))

    engines = {
        name.replace(", ", "-"): ScriptedEngine(script, chat_template=t)
        for name, t in TEMPLATES.items()
    }
    writers = {
        style: [write for name, write in WRITERS.values() if name == style]
        for style, _ in WRITERS.values()
    }
    tools = [
        {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}}
        for n in ("write_file", "f")
    ]
    calls: Calls = [
        ("write_file", {"path": "a.c", "text": "int main() {\n  return 0;\n}"}),
        ("f", {"n": 12}),
    ]
    with (
        running_server(dict(engines)) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        for seed in range(150):
            rng = random.Random(seed)
            name = rng.choice(list(engines))
            style = format_for(ChatTemplate(TEMPLATES[name.replace("-", ", ")]).source).name
            reply = rng.choice(["", "Hm. "]) + rng.choice(writers[style])(
                calls[: rng.choice([1, 2])]
            )
            cut = rng.randrange(len(reply) + 1)
            said["reply"] = reply[:cut] + rng.choice(["", "", "}", '"', "]", "<", reply[cut:]])
            said["held"] = engines[name].holds_calls = rng.random() < 0.7
            engines[name].ends = rng.choice(["stop", "length"])
            asked: dict[str, Any] = {
                "model": name,
                "messages": [{"role": "user", "content": ASKED}],
                "stream": seed % 2 == 0,
            }
            path = rng.choice(list(DIALECTS))
            if path == "/v1/messages":
                asked |= {"max_tokens": rng.choice([cut + 1, 500])}
                sent: list[Any] = [
                    {"name": t["function"]["name"], "input_schema": {"type": "object"}}
                    for t in tools
                ]
            else:
                asked |= {"stop": ["return"]} if "v1" in path and rng.random() < 0.2 else {}
                sent = tools
            answer = http.post(path, json={**asked, "tools": sent})
            assert answer.status_code == 200, (seed, name, said, answer.text)
            assert not {"internal_error", "api_error"} & set(answer.text.split('"')), (
                seed,
                name,
                said,
                answer.text,
            )
