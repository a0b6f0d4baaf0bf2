"""`connect --check`: make a program's API calls to the running server in the program's own dialect.

For tools, the check runs a full loop: it offers a tool, forces a call, returns the result, and
expects an answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import httpx

from localllm.cli.editors.recipes import ClientTarget, Probe
from localllm.errors import BackendError

_QUESTION = [{"role": "user", "content": "Say hi."}]
_TOOL_QUESTION = [{"role": "user", "content": "Write a note that says hi."}]
_NOTE: Mapping[str, Any] = {
    "name": "note",
    "description": "Write a note.",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 16}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
_RESULT = "noted"
_ANSWER_TOKENS = 16
_CALL_TOKENS = 200
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ClientCheck:
    """One line of the report. `run` makes the calls and raises BackendError or httpx.HTTPError."""

    capability: str
    run: Callable[[httpx.Client], None]


def run_checks(target: ClientTarget, probes: Iterable[Probe]) -> int:
    """Make the calls and print a line for each. Returns the number of failures."""
    failures = 0
    headers = {}
    if target.api_key:
        headers = {"Authorization": f"Bearer {target.api_key}"}
    with httpx.Client(
        base_url=target.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False
    ) as client:
        for probe in probes:
            for check in checks(probe, target.model):
                failures += not _run_check(check, client)
    return failures


def _run_check(check: ClientCheck, client: httpx.Client) -> bool:
    """Make the check's calls and print its line. Returns True if they succeeded."""
    started_s = time.monotonic()
    error = ""
    try:
        check.run(client)
    except BackendError as e:
        error = e.message
    except httpx.HTTPError as e:
        error = str(e) or type(e).__name__
    seconds = time.monotonic() - started_s
    result = "FAILED" if error else "ok"
    print(f"{result:<7} {check.capability:<22} {seconds:5.1f} s  {error}")
    return not error


def checks(probe: Probe, model: str) -> tuple[ClientCheck, ...]:
    """Return the checks for a program that makes calls of this kind."""
    if probe == "chat":
        return _chat_checks(model)
    if probe == "responses":
        return _responses_checks(model)
    if probe == "anthropic":
        return _messages_checks(model)
    if probe == "ollama":
        return _ollama_checks(model)
    if probe == "tools":
        return (ClientCheck("tool loop", partial(_chat_loop, model=model)),)
    if probe == "fim":
        body = {"model": model, "prompt": "a", "suffix": "b", "max_tokens": 4}
        return (ClientCheck("fill-in", _call("POST", "/v1/completions", body, "text")),)
    return (ClientCheck("list of models", _call("GET", "/v1/models", None, model)),)


def _chat_checks(model: str) -> tuple[ClientCheck, ...]:
    body = {"model": model, "messages": _QUESTION, "max_tokens": 4}
    stream_request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    whole_answer = _call("POST", "/v1/chat/completions", body, '"finish_reason"')
    stream = _call("POST", "/v1/chat/completions", stream_request, '"prompt_tokens"')
    return ClientCheck("whole answer", whole_answer), ClientCheck("streamed answer", stream)


def _responses_checks(model: str) -> tuple[ClientCheck, ...]:
    body = {"model": model, "input": "Say hi.", "stream": True, "max_output_tokens": 4}
    stream = _call("POST", "/v1/responses", body, '"type": "response.incomplete"')
    return (
        ClientCheck("responses stream", stream),
        ClientCheck("tool loop", partial(_responses_loop, model=model)),
    )


def _messages_checks(model: str) -> tuple[ClientCheck, ...]:
    count_request = {"model": model, "messages": _QUESTION}
    stream_request = {**count_request, "max_tokens": 4, "stream": True}
    stream = _call("POST", "/v1/messages", stream_request, "message_stop")
    count = _call("POST", "/v1/messages/count_tokens", count_request, "input_tokens")
    return (
        ClientCheck("message stream", stream),
        ClientCheck("token count", count),
        ClientCheck("tool loop", partial(_messages_loop, model=model)),
    )


def _ollama_checks(model: str) -> tuple[ClientCheck, ...]:
    body = {"model": model, "messages": _QUESTION, "options": {"num_predict": 4, "num_ctx": 4096}}
    version = _call("GET", "/api/version", None, "version")
    facts = _call("POST", "/api/show", {"model": model}, "capabilities")
    return (
        ClientCheck("Ollama's version", version),
        ClientCheck("Ollama's model facts", facts),
        ClientCheck("Ollama chat", _call("POST", "/api/chat", body, '"done": true')),
        ClientCheck("Ollama tool loop", partial(_ollama_loop, model=model)),
    )


def _call(
    method: str, path: str, body: Mapping[str, Any] | None, contains: str
) -> Callable[[httpx.Client], None]:
    def run(client: httpx.Client) -> None:
        answer = _checked_reply(client.request(method, path, json=body))
        if contains not in answer.text:
            raise BackendError(f"the answer lacks {contains}")

    return run


def _checked_reply(reply: httpx.Response) -> httpx.Response:
    """Return `reply`. Raises BackendError if it is an HTTP error."""
    if not reply.is_success:
        raise BackendError(f"{reply.status_code}: {reply.text[:200]}")
    return reply


def _post_streamed(
    client: httpx.Client, path: str, body: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the JSON objects of a streamed answer, from event data or from JSON lines."""
    text = _checked_reply(client.post(path, json=body)).text
    lines = [line.removeprefix("data:").strip() for line in text.split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def _chat_loop(client: httpx.Client, model: str) -> None:
    tools = [{"type": "function", "function": _NOTE}]
    base_request = {"model": model, "tools": tools, "stream": True}
    forced_request = {
        **base_request,
        "messages": _TOOL_QUESTION,
        "tool_choice": "required",
        "max_tokens": _CALL_TOKENS,
    }
    call: dict[str, str] = {"id": "", "name": "", "arguments": ""}
    for event in _post_streamed(client, "/v1/chat/completions", forced_request):
        for choice in event.get("choices", ()):
            for part in choice["delta"].get("tool_calls") or ():
                call["id"] += part.get("id") or ""
                call["name"] += part["function"].get("name") or ""
                call["arguments"] += part["function"].get("arguments") or ""
    _check_call(call["name"], call["arguments"])
    function = {"name": call["name"], "arguments": call["arguments"]}
    call_message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": _RESULT}
    result_request = {
        **base_request,
        "messages": [*_TOOL_QUESTION, call_message, result],
        "max_tokens": _ANSWER_TOKENS,
    }
    events = _post_streamed(client, "/v1/chat/completions", result_request)
    choices = chain.from_iterable(event.get("choices", ()) for event in events)
    _check_end(any(choice.get("finish_reason") for choice in choices))


def _responses_loop(client: httpx.Client, model: str) -> None:
    base_request = {
        "model": model,
        "tools": [{"type": "function", **_NOTE}],
        "stream": True,
        "store": False,
    }
    forced_request = {
        **base_request,
        "input": _TOOL_QUESTION,
        "tool_choice": "required",
        "max_output_tokens": _CALL_TOKENS,
    }
    events = _post_streamed(client, "/v1/responses", forced_request)
    items = [event["item"] for event in events if event.get("type") == "response.output_item.done"]
    call = next(
        (item for item in items if item["type"] == "function_call"), {"name": "", "arguments": ""}
    )
    _check_call(call["name"], call["arguments"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": _RESULT}
    result_request = {
        **base_request,
        "input": [*_TOOL_QUESTION, *items, result],
        "max_output_tokens": _ANSWER_TOKENS,
    }
    final_types = ("response.completed", "response.incomplete")
    _check_end(
        any(
            event.get("type") in final_types
            for event in _post_streamed(client, "/v1/responses", result_request)
        )
    )


def _messages_loop(client: httpx.Client, model: str) -> None:
    tool = {
        "name": _NOTE["name"],
        "description": _NOTE["description"],
        "input_schema": _NOTE["parameters"],
    }
    base_request = {"model": model, "tools": [tool], "stream": True}
    forced_request = {
        **base_request,
        "messages": _TOOL_QUESTION,
        "tool_choice": {"type": "any"},
        "max_tokens": _CALL_TOKENS,
    }
    name = call_id = arguments = ""
    for event in _post_streamed(client, "/v1/messages", forced_request):
        block = event.get("content_block", {})
        delta = event.get("delta", {})
        if block.get("type") == "tool_use":
            name = block["name"]
            call_id = block["id"]
        arguments += delta.get("partial_json", "")
    _check_call(name, arguments)
    call_block = {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": _RESULT}
    turns = [
        *_TOOL_QUESTION,
        {"role": "assistant", "content": [call_block]},
        {"role": "user", "content": [result]},
    ]
    result_request = {**base_request, "messages": turns, "max_tokens": _ANSWER_TOKENS}
    events = _post_streamed(client, "/v1/messages", result_request)
    _check_end(any(e.get("type") == "message_stop" for e in events))


def _ollama_loop(client: httpx.Client, model: str) -> None:
    base_request = {"model": model, "tools": [{"type": "function", "function": _NOTE}]}
    # Ollama's API has no field that forces a call. This one is our addition.
    forced_request = {
        **base_request,
        "messages": _TOOL_QUESTION,
        "tool_choice": "required",
        "options": {"num_predict": _CALL_TOKENS},
    }
    lines = _post_streamed(client, "/api/chat", forced_request)
    calls = chain.from_iterable(line.get("message", {}).get("tool_calls", ()) for line in lines)
    call = next(calls, {"function": {"name": "", "arguments": ""}})
    _check_call(call["function"]["name"], json.dumps(call["function"]["arguments"]))
    call_message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {
        "role": "tool",
        "tool_call_id": call["id"],
        "tool_name": _NOTE["name"],
        "content": _RESULT,
    }
    result_request = {
        **base_request,
        "messages": [*_TOOL_QUESTION, call_message, result],
        "options": {"num_predict": _ANSWER_TOKENS},
    }
    lines = _post_streamed(client, "/api/chat", result_request)
    for line in lines:
        if "error" in line:
            raise BackendError(line["error"])
    _check_end(any(line.get("done") for line in lines))


def _check_call(name: str, arguments: str) -> None:
    """Raise BackendError if this is not a call of our tool."""
    if not name:
        raise BackendError("the answer lacks the forced tool call")
    if name != _NOTE["name"]:
        raise BackendError(f"the model called {name!r} instead of the given tool")
    try:
        parsed_arguments = json.loads(arguments)
    except ValueError:
        raise BackendError(f"the call's arguments are not JSON: {arguments[:80]!r}") from None
    if not (isinstance(parsed_arguments, dict) and isinstance(parsed_arguments.get("text"), str)):
        raise BackendError(f"the call's arguments lack the text: {arguments[:80]!r}")


def _check_end(has_ended: bool) -> None:
    if not has_ended:
        raise BackendError("the answer after the tool's result has no finish reason")
