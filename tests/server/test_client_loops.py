"""Third-party Python clients complete the tool loop: call, result, answer.

The model is scripted and writes one format of calls. The tests check that each library reads the
server's output, and that the server reads what the library sends back: the history that it
built, numbers as numbers, and a token limit above the size of the context. The same libraries,
agents and real templates: benchmarks/clients.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from localllm.engine.messages import Request
from localllm.server.models.router import ServedModel
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

QUESTION = "How many birds are on the pond?"
LARGE = 1_234_567
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 9_007_199_254_740_991},
    },
    "required": ["place", "limit"],
    "additionalProperties": False,
}
RESULT = "41 geese"
ANSWER = "There are 41 geese."
CALL = (
    '<tool_call>\n{"name": "count", "arguments": {"place": "the pond", "limit": '
    "1234567}}\n</tool_call>"
)
# More tokens than the context has left: agents ask for as many with any context.
TOO_MANY = 32_000


def script(request: Request) -> list[str]:
    """Call the tool, and answer when its result and the original call are in the prompt."""
    prompt = (
        request.prompt
        if isinstance(request.prompt, str)
        else bytes(t for t in request.prompt if t < 256).decode()
    )
    if RESULT not in prompt:
        return [CALL]
    assert str(LARGE) in prompt.partition(RESULT)[0], "the call is not in the history"
    return [ANSWER]


@pytest.fixture
def server() -> Iterator[Running]:
    engine = ScriptedEngine(script)
    with running_server([ServedModel("tiny", engine, info=engine.info)]) as running:
        yield running


def count(name: str, arguments: dict[str, Any]) -> str:
    """The tool."""
    assert (name, arguments) == ("count", {"place": "the pond", "limit": LARGE})
    return RESULT


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.fail(f"the client {name!r} is not installed: run `make test`, which installs it")


def openai_client(server: Running) -> openai.OpenAI:
    # This client validates every answer and event against the package's own types.
    return openai.OpenAI(
        base_url=server.url + "/v1",
        api_key="none",
        max_retries=0,
        timeout=30,
        _strict_response_validation=True,
    )


def openai_chat(server: Running, stream: bool) -> str:
    tools: Any = [{"type": "function", "function": {"name": "count", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai_client(server) as client:
        while True:
            ask: Any = {
                "model": "tiny",
                "messages": messages,
                "tools": tools,
                "max_completion_tokens": TOO_MANY,
            }
            if stream:
                with client.chat.completions.stream(**ask) as answer:
                    message = answer.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**ask).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return str(message.content)
            for call in message.tool_calls:
                said = count(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def openai_responses(server: Running, stream: bool) -> str:
    tools: Any = [{"type": "function", "name": "count", "parameters": PARAMETERS, "strict": True}]
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    before: str | None = None
    with openai_client(server) as client:
        while True:
            ask: Any = {
                "model": "tiny",
                "input": asked,
                "tools": tools,
                "max_output_tokens": TOO_MANY,
            }
            ask |= {"previous_response_id": before} if before else {}
            if stream:
                with client.responses.stream(**ask) as events:
                    answer = events.get_final_response()
            else:
                answer = client.responses.create(**ask)
            calls = [i for i in answer.output if i.type == "function_call"]
            if not calls:
                return str(answer.output_text)
            before = answer.id
            results = [(c.call_id, count(c.name, json.loads(c.arguments))) for c in calls]
            asked = [
                {"type": "function_call_output", "call_id": i, "output": r} for i, r in results
            ]


def anthropic_messages(server: Running, stream: bool) -> str:
    client = package("anthropic").Anthropic(
        base_url=server.url,
        api_key="none",
        max_retries=0,
        timeout=30,
        _strict_response_validation=True,
    )
    tools = [{"name": "count", "description": "Count birds.", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client:
        while True:
            ask = {"model": "tiny", "max_tokens": TOO_MANY, "messages": messages, "tools": tools}
            if stream:
                with client.messages.stream(**ask) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**ask)
            messages.append({"role": "assistant", "content": answer.content})
            calls = [b for b in answer.content if b.type == "tool_use"]
            if not calls:
                return "".join(b.text for b in answer.content)
            results = [
                {"type": "tool_result", "tool_use_id": c.id, "content": count(c.name, c.input)}
                for c in calls
            ]
            messages.append({"role": "user", "content": results})


def ollama_chat(server: Running, stream: bool) -> str:
    tools = [
        {
            "type": "function",
            "function": {"name": "count", "description": "Count.", "parameters": PARAMETERS},
        }
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with package("ollama").Client(host=server.url) as client:
        while True:
            ask = {
                "model": "tiny",
                "messages": messages,
                "tools": tools,
                "options": {"num_predict": TOO_MANY},
            }
            parts = list(client.chat(**ask, stream=True)) if stream else [client.chat(**ask)]
            text = "".join(p.message.content or "" for p in parts)
            calls = [c for p in parts for c in p.message.tool_calls or ()]
            messages.append({"role": "assistant", "content": text, "tool_calls": calls})
            if not calls:
                return text
            for call in calls:
                said = count(call.function.name, dict(call.function.arguments))
                messages.append({"role": "tool", "tool_name": call.function.name, "content": said})


Loop = Callable[[Running, bool], str]
LOOPS: list[Loop] = [openai_chat, openai_responses, anthropic_messages, ollama_chat]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_client_finishes_its_loop(server: Running, loop: Loop, stream: bool) -> None:
    assert loop(server, stream) == ANSWER


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_full_context_is_reported_in_the_words_that_clients_recognise(
    server: Running, stream: bool
) -> None:
    """A full context is reported in OpenAI's words.

    LiteLLM, pi, Continue and Cline shorten the conversation if they find these words.
    """
    messages: Any = [{"role": "user", "content": "x" * 5_000}]
    words = (
        r"This model's maximum context length is 4096 tokens\. However, your messages "
        r"resulted "
        r"in "
        r"5\d\d\d tokens"
    )
    with openai_client(server) as client, pytest.raises(openai.APIError, match=words) as told:
        # The request is refused before the stream begins.
        client.chat.completions.create(model="tiny", messages=messages, stream=stream)
    assert told.value.code == "context_length_exceeded"


@pytest.fixture
def talks() -> Iterator[Running]:
    with running_server({"tiny": ScriptedEngine((ANSWER,))}) as running:
        yield running


def test_every_kind_of_answer_is_of_openais_types(talks: Running) -> None:
    with openai_client(talks) as client:
        said: list[Any] = [{"role": "user", "content": RESULT}]
        assert client.models.list().data[0].id == client.models.retrieve("tiny").id == "tiny"
        chat = client.chat.completions.create(
            model="tiny", messages=said, n=2, logprobs=True, top_logprobs=2, max_tokens=2
        )
        assert [c.finish_reason for c in chat.choices] == ["length", "length"]
        for chunk in client.chat.completions.create(
            model="tiny",
            messages=said,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        ):
            assert chunk.object == "chat.completion.chunk"
        text = client.completions.create(model="tiny", prompt=RESULT, logprobs=2, max_tokens=2)
        assert text.choices[0].logprobs is not None
        made = client.responses.create(model="tiny", input=RESULT)
        assert client.responses.retrieve(made.id).output_text == made.output_text == ANSWER
        assert [i.type for i in client.responses.input_items.list(made.id)] == ["message"]
        assert client.responses.input_tokens.count(model="tiny", input=RESULT).input_tokens > 0
        for event in client.responses.create(model="tiny", input=RESULT, stream=True):
            assert event.type.startswith("response.")


def test_every_kind_of_answer_is_of_anthropics_types(talks: Running) -> None:
    client = package("anthropic").Anthropic(
        base_url=talks.url,
        api_key="none",
        max_retries=0,
        timeout=30,
        _strict_response_validation=True,
    )
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": RESULT}]}
    with client:
        assert client.messages.count_tokens(**asked).input_tokens > 0
        assert client.messages.create(**asked, max_tokens=2).stop_reason == "max_tokens"
        kinds = [
            event.type for event in client.messages.create(**asked, max_tokens=99, stream=True)
        ]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
