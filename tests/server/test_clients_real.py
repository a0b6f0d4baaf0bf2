"""Third-party clients against the server on SmolLM2.

Whatever the model writes, the protocol is correct and no request hangs.

`openai` is always installed. The tests of other clients are skipped, and named, if the package
is not installed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.models.router import ModelRouter
from localllm.server.proxy.upstreams import Upstream, Upstreams
from localllm_backends.contract import LoadSpec
from support.http_server import Running, running_server

HI = [{"role": "user", "content": "Say hi."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS},
}


class Form(pydantic.BaseModel):
    """The schema of the structured answers."""

    model_config = pydantic.ConfigDict(extra="forbid")
    grade: int = pydantic.Field(ge=0, le=9)
    good: bool


@pytest.fixture(scope="module", params=["itself", pytest.param("upstream", marks=pytest.mark.long)])
def server(smollm2: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server that runs the model, or one that reaches it through an upstream."""
    supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(smollm2), n_ctx=2048, n_seq_max=2)))
    with ExitStack() as stack:
        running = stack.enter_context(running_server({"smollm2": supervisor}))
        if request.param == "upstream":
            every = ("openai", "responses", "anthropic", "ollama")
            upstream = Upstream(
                "behind", running.url + "/v1", models={"smollm2": "smollm2"}, speaks=every
            )
            running = stack.enter_context(
                running_server(ModelRouter([], upstreams=Upstreams([upstream])))
            )
        yield running


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"the client {name!r} is not installed")


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as c:
        yield c


def _anthropic(server: Running, request: pytest.FixtureRequest) -> Any:
    client = _package("anthropic").Anthropic(base_url=server.url, api_key="none", max_retries=0)
    request.addfinalizer(client.close)
    return client


def _ollama(server: Running, request: pytest.FixtureRequest) -> Any:
    client = _package("ollama").Client(host=server.url)
    request.addfinalizer(client.close)
    return client


def test_openai_stream_helper_builds_a_tool_call(client: openai.OpenAI) -> None:
    ask: Any = {"messages": HI, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    with client.chat.completions.stream(model="smollm2", **ask) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_openai_parses_structured_answers(client: openai.OpenAI) -> None:
    ask: Any = {"model": "smollm2", "messages": HI, "max_tokens": 60}
    assert isinstance(
        client.chat.completions.parse(**ask, response_format=Form).choices[0].message.parsed, Form
    )
    reply = client.responses.parse(
        model="smollm2", input="Hi", text_format=Form, max_output_tokens=60
    )
    assert isinstance(reply.output_parsed, Form)


def test_openai_responses_stream_and_go_on(client: openai.OpenAI) -> None:
    with client.responses.stream(model="smollm2", input="Say hi.", max_output_tokens=8) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    first = events[-1].response
    ask: Any = {"model": "smollm2", "input": "Again.", "max_output_tokens": 4}
    second = client.responses.create(**ask, previous_response_id=first.id)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1


def test_openai_responses_call_a_function(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "get_weather",
        "parameters": PARAMETERS,
        "strict": True,
    }
    ask: Any = {"model": "smollm2", "input": "Weather?", "max_output_tokens": 60}
    (call,) = client.responses.create(**ask, tools=[tool], tool_choice="required").output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}


def test_ollama(server: Running, request: pytest.FixtureRequest) -> None:
    client = _ollama(server, request)
    assert client.list().models[0].model == "smollm2"
    assert "completion" in client.show("smollm2").capabilities
    few = {"num_predict": 8, "num_ctx": 99999}
    assert client.chat(model="smollm2", messages=HI, options=few).done
    assert "".join(
        c.message.content
        for c in client.chat(model="smollm2", messages=HI, stream=True, options=few)
    )
    said = client.chat(
        model="smollm2", messages=HI, format=Form.model_json_schema(), options={"num_predict": 60}
    )
    Form.model_validate_json(said.message.content)
    assert client.generate(model="smollm2", prompt="Hi", options=few).response


def test_anthropic(server: Running, request: pytest.FixtureRequest) -> None:
    client = _anthropic(server, request)
    assert client.messages.create(model="smollm2", max_tokens=8, messages=HI).content[0].text
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}
    ask = {"model": "smollm2", "max_tokens": 60, "messages": HI, "tools": [tool]}
    with client.messages.stream(
        **ask, tool_choice={"type": "tool", "name": "get_weather"}
    ) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, set(final.content[0].input)) == ("tool_use", {"city"})
    assert client.messages.count_tokens(model="smollm2", messages=HI).input_tokens > 0


def test_ollama_finishes_a_tool_loop_and_unloads(
    server: Running, request: pytest.FixtureRequest
) -> None:
    ollama = _package("ollama")
    client = _ollama(server, request)

    def get_weather(city: str) -> str:
        """Weather.

        Args:
          city: its name
        """
        return f"{city}: rain"

    messages: list[Any] = [
        {"role": "user", "content": "Answer with <tool_call> for get_weather with city Paris."}
    ]
    few = {"temperature": 0, "num_predict": 60}
    said = client.chat(model="smollm2", messages=messages, tools=[get_weather], options=few).message
    (call,) = said.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    result = get_weather(**call.function.arguments)
    messages += [said, {"role": "tool", "tool_name": "get_weather", "content": result}]
    pieces = list(
        client.chat(
            model="smollm2", messages=messages, tools=[get_weather], options=few, stream=True
        )
    )
    assert pieces[-1].done
    assert pieces[-1].prompt_eval_count > 0
    with_logprobs = client.generate(
        model="smollm2", prompt="Hi", options=few, logprobs=True, top_logprobs=1
    )
    # The token that ends an answer counts, but has no text.
    assert with_logprobs.eval_count - len(with_logprobs.logprobs) in (0, 1)
    here = [m.digest for m in client.ps().models]
    assert here in ([], [client.list().models[0].digest])  # an upstream has loaded it
    assert client.generate(model="smollm2", keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    with pytest.raises(ollama.ResponseError, match="--allow-pull"):
        client.pull("org/name")
    with pytest.raises(ollama.ResponseError, match="prompt too long"):
        client.chat(model="smollm2", messages=[{"role": "user", "content": "word " * 3000}])


def test_anthropic_finishes_a_tool_loop(server: Running, request: pytest.FixtureRequest) -> None:
    anthropic = _package("anthropic")
    client = _anthropic(server, request)
    shell = {"type": "bash_20250124", "name": "bash"}
    weather = {"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}
    ask: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 80,
        "tools": [weather, shell],
        "extra_body": {"temperature": 0},
    }
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    with client.messages.stream(**ask, messages=messages, tool_choice={"type": "any"}) as stream:
        said = stream.get_final_message()
    assert said.stop_reason == "tool_use"
    uses = [block for block in said.content if block.type == "tool_use"]
    assert {use.name for use in uses} <= {"get_weather", "bash"}
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "rain", "is_error": True}
        for use in uses
    ]
    messages += [
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": results},
    ]
    final = client.messages.create(**ask, messages=messages, tool_choice={"type": "none"})
    assert final.content[0].type == "text"
    counted = client.messages.count_tokens(
        model="smollm2", messages=messages, tools=[weather, shell]
    )
    assert (
        counted.input_tokens
        > client.messages.count_tokens(model="smollm2", messages=messages).input_tokens
    )
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(
        anthropic.BadRequestError,
        match=r"prompt is too long: \d+ tokens > 2048 "
        r"maximum",
    ):
        client.messages.create(**ask, messages=long)


def test_litellm_works_in_the_openai_and_ollama_dialects(server: Running) -> None:
    litellm = _package("litellm")
    ask: dict[str, Any] = {"messages": HI, "max_tokens": 60, "api_key": "none"}
    openai_way = {"model": "openai/smollm2", "api_base": server.url + "/v1", **ask}
    assert litellm.completion(**openai_way).choices[0].message.content
    assert list(litellm.completion(**openai_way, stream=True))
    (call,) = (
        litellm.completion(**openai_way, tools=[TOOL], tool_choice="required")
        .choices[0]
        .message.tool_calls
    )
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert (
        litellm.completion(model="ollama_chat/smollm2", api_base=server.url, **ask)
        .choices[0]
        .message.content
    )


def test_langchain_reads_answers_tool_calls_and_structured_output(server: Running) -> None:
    chat = _package("langchain_openai").ChatOpenAI(
        base_url=server.url + "/v1", api_key="none", model="smollm2", max_tokens=60
    )
    assert chat.invoke("Say hi").content
    assert "".join(c.content for c in chat.stream("Say hi"))
    (call,) = chat.bind_tools([TOOL], tool_choice="any").invoke("weather").tool_calls
    assert set(call["args"]) == {"city"}
    assert isinstance(chat.with_structured_output(Form).invoke("x"), Form)
