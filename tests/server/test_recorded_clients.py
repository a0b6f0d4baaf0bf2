"""Recorded requests of programs that cannot be installed with the tests.

They are Home Assistant's two integrations, n8n's nodes, Goose and Crush. Each calls a tool and
has its result read, disconnects in the middle of an answer, and gets the error for a prompt that
is too long in the words that it recognises.

The bodies follow the programs' sources of autumn 2026: homeassistant/components/ollama and
openai_conversation (entity.py), n8n's LmChatOpenAi and LmChatOllama over LangChain's JavaScript,
goose's providers/formats/openai.rs, and charmbracelet/fantasy under Crush.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Request
from server.test_thinking_budget import OWN
from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine
from support.until import until

CALL = '<tool_call>\n{"name": "HassTurnOn", "arguments": {"name": "kitchen"}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "floor": {"type": "string"}},
    "required": [],
}
FUNCTION = {"name": "HassTurnOn", "description": "Turns on a device", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
DEFAULTS = {"temperature": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "n": 1}
USAGE = {"stream_options": {"include_usage": True}}
OLLAMA_NODE = {"temperature": 0.7, "top_k": -1, "top_p": 1, "num_ctx": 2048, "use_mmap": True}
ASKED, RESULT = "Turn on the light", '{"data": {"done": "switched on"}, "error": null}'

# The path, and the fields of each body other than messages and tools.
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "Home Assistant, Ollama": (
        "/api/chat",
        {"keep_alive": -1, "options": {"num_ctx": 8192}, "think": False, "format": None},
    ),
    "Home Assistant, OpenAI": (
        "/v1/responses",
        {
            "max_output_tokens": 3000, "top_p": 1.0, "temperature": 1.0, "user": "01J", "store": False,
            "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "medium"},
            "include": ["reasoning.encrypted_content", "code_interpreter_call.outputs"],
        },
    ),
    "n8n, OpenAI": ("/v1/chat/completions", {**DEFAULTS, **USAGE, "max_tokens": -1}),
    "n8n, Ollama": ("/api/chat", {"options": OLLAMA_NODE, "keep_alive": "5m", "think": None}),
    "Goose": ("/v1/chat/completions", {**USAGE, "temperature": 0.0, "max_tokens": 16384}),
    "Crush": (
        "/v1/chat/completions",
        {**USAGE, "max_tokens": 4096, "tool_choice": "auto", "parallel_tool_calls": False},
    ),
}  # fmt: skip


def body(name: str, asked: str, *, called: bool = False) -> dict[str, Any]:
    """Return the program's body: a question, or a question with a call and its result."""
    path, more = PROGRAMS[name]
    question = {"role": "user", "content": asked}
    if path == "/v1/responses":
        call = {"type": "function_call", "name": "HassTurnOn", "arguments": "{}", "call_id": "c"}
        result = {"type": "function_call_output", "call_id": "c", "output": RESULT}
        search = {"type": "web_search_preview", "search_context_size": "medium"}
        items = [{"type": "message", **question}, *([call, result] if called else [])]
        tools = [{"type": "function", **FUNCTION, "strict": False}, search]
        return {**more, "input": items, "tools": tools, "stream": True}
    arguments: Any = {"name": "kitchen"} if path == "/api/chat" else '{"name": "kitchen"}'
    made = {"id": "c", "type": "function", "function": {"name": "HassTurnOn"}}
    made["function"]["arguments"] = arguments  # type: ignore[index]
    said = {"role": "assistant", "content": None, "tool_calls": [made]}
    result = {"role": "tool", "content": RESULT, "tool_call_id": "c"}
    if path == "/api/chat":  # whose results name no call
        made.pop("id")
        result.pop("tool_call_id")
        said["content"] = ""
    messages = [question, *([said, result] if called else [])]
    return {**more, "messages": messages, "tools": TOOLS, "stream": True}


def _script(request: Request) -> list[str]:
    return ["It is", " on."] if "switched on" in str(request.prompt) else [CALL]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server({"tiny": ScriptedEngine(_script, chat_template=OWN)}) as server:
        yield server


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tool_is_called_and_its_result_is_answered(running: Running, name: str) -> None:
    path = PROGRAMS[name][0]
    with httpx.Client(base_url=running.url, trust_env=False) as http:
        call = http.post(path, json=body(name, ASKED))
        assert call.status_code == 200, call.text
        assert "HassTurnOn" in call.text
        assert "kitchen" in call.text
        answer = http.post(path, json=body(name, ASKED, called=True))
        assert answer.status_code == 200, answer.text
        assert '"It is"' in answer.text
        ignored = set(answer.headers.get("x-localllm-ignored", "").split(",")) - {""}
        # Tools that only OpenAI's servers run, and options that a request cannot change in a loaded
        # model.
        assert ignored <= {
            "tools.web_search_preview", "options.num_ctx", "options.use_mmap", "reasoning_effort",
            "reasoning.effort", "include.code_interpreter_call.outputs",
            "include.reasoning.encrypted_content",
        }  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_client_that_disconnects_ends_the_answer(name: str) -> None:
    engine = ScriptedEngine(["It is", Gate(), " on."], chat_template=OWN)
    with (
        running_server({"tiny": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        with http.stream("POST", PROGRAMS[name][0], json=body(name, ASKED)) as reply:
            assert next(text for text in reply.iter_text() if "It is" in text)
        until(lambda: len(engine.cancelled) == 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_prompt_that_is_too_long_is_told_in_the_program_s_words(
    running: Running, name: str
) -> None:
    path = PROGRAMS[name][0]
    reply = httpx.post(running.url + path, json=body(name, "word " * 3000), trust_env=False)
    assert reply.status_code == 400, reply.text
    error = json.loads(reply.text)["error"]
    if path == "/api/chat":
        assert "exceeded max context length" in error
    else:
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in error["message"]
