"""What this server does with every field it knows: the table below is the documentation, each row a request.

A row is honoured (its effect is looked for in what reached the engine or in the reply), tolerated (no effect on the
answer; named in x-localllm-ignored where nobody knows it) or refused (a 4xx that says why). Nothing that would change
the answer is accepted and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Generation, Sampling
from support.http_server import running_server
from support.scripted_engine import BOS, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
BARE_TOOL = {"type": "function", "function": {"name": "now"}}
A_TOOL = {"name": "look", "description": "d", "input_schema": TOOL["function"]["parameters"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@dataclass(frozen=True)
class Row:
    """`effect(request the engine got, JSON reply, response)` must be true, or the status must be `refused`."""

    name: str
    path: str
    body: Any
    effect: Callable[[Any, Any, httpx.Response], bool] | None = None
    refused: int = 0
    says: str = ""
    script: Any = ("Hello", " world")


def honoured(name: str, body: dict[str, Any], effect: Callable[[Any, Any, Any], bool], **more: Any) -> Row:
    path = more.pop("path", CHAT)
    return Row(name, path, _complete(path, body), effect, **more)


def refused(name: str, body: Any, says: str, status: int = 400, path: str = "/v1/chat/completions") -> Row:
    return Row(name, path, _complete(path, body) if isinstance(body, dict) else body, refused=status, says=says)


def sampling(field: str, sent: Any, reached: Any, path: str = "/v1/chat/completions", key: str | None = None) -> Row:
    return honoured(
        f"{key or field}={sent!r}",
        {key or field: sent},
        lambda r, j, h: getattr(r.generation.sampling, field) == reached,
        path=path,
    )


def tolerated(name: str, body: dict[str, Any], named: str = "", path: str = "/v1/chat/completions") -> Row:
    return honoured(name, body, lambda r, j, h: h.headers.get("x-localllm-ignored", "") == named, path=path)


def _complete(path: str, body: dict[str, Any]) -> dict[str, Any]:
    base = {
        CHAT: {"messages": HI}, TEXT: {"prompt": "ab"}, RESP: {"input": "hi"},
        ANTH: {"messages": HI, "max_tokens": 500}, OCHAT: {"messages": HI, "stream": False},
        OGEN: {"prompt": "ab", "stream": False}, LCPP: {"prompt": "ab"},
        INFILL: {"input_prefix": "ab", "input_suffix": "cd"}, FIM: {"prompt": "ab"},
    }.get(path, {})  # fmt: skip
    return {**base, **body}


CHAT, TEXT, RESP, ANTH = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OCHAT, OGEN, LCPP, INFILL, FIM = "/api/chat", "/api/generate", "/completion", "/infill", "/v1/fim/completions"


def _text(j: Any) -> str:
    return str(j["choices"][0]["message"]["content"])


def _says(part: str) -> Callable[[Any, Any, Any], bool]:
    return lambda r, j, h: part in r.prompt


CALL = ['<tool_call>\n{"name": "look", "argu', 'ments": {"q": "x"}}\n</tool_call>']

ROWS = [
    # --- OpenAI chat: how tokens are chosen ---
    sampling("temperature", 0, 0),
    sampling("temperature", 1.3, 1.3),
    sampling("top_p", 0.4, 0.4),
    sampling("top_k", 7, 7),
    sampling("top_k", -1, 0),
    sampling("min_p", 0.2, 0.2),
    sampling("typical_p", 0.7, 0.7),
    sampling("repeat_penalty", 1.2, 1.2),
    sampling("repeat_penalty", 1.3, 1.3, key="repetition_penalty"),
    sampling("repeat_last_n", 32, 32),
    sampling("presence_penalty", 1.5, 1.5),
    sampling("frequency_penalty", -2, -2),
    sampling("seed", 42, 42),
    sampling("seed", -1, None),
    sampling("seed", None, None),
    sampling("logit_bias", {"65": -100, "66": 3}, {65: -100.0, 66: 3.0}),
    refused("temperature is text", {"temperature": "hot"}, "temperature"),
    refused("temperature below 0", {"temperature": -1}, "temperature"),
    refused("top_p above 1", {"top_p": 1.5}, "top_p"),
    refused("top_k huge", {"top_k": 10**30}, "top_k"),
    refused("seed huge", {"seed": 10**30}, "seed"),
    refused("penalty out of range", {"presence_penalty": 3}, "presence_penalty"),
    refused("repeat_penalty 0", {"repeat_penalty": 0}, "repeat_penalty"),
    refused("logit_bias of a word", {"logit_bias": {"cat": 1}}, "token id"),
    refused("logit_bias out of range", {"logit_bias": {"1": 1000}}, "logit_bias"),
    refused("mirostat", {"mirostat": 2}, "mirostat"),
    tolerated("mirostat off", {"mirostat": 0}),
    refused("xtc", {"xtc_probability": 0.5}, "XTC"),
    refused("dry", {"dry_multiplier": 0.8}, "DRY"),
    refused("dynatemp", {"dynatemp_range": 0.5}, "dynamic"),
    refused("tfs", {"tfs_z": 0.5}, "tail-free"),
    refused("best_of", {"best_of": 3}, "best_of"),
    refused("beam search", {"use_beam_search": True}, "beam"),
    refused("min_tokens", {"min_tokens": 5}, "minimum"),
    refused("lora", {"lora": [{"id": 0}]}, "adapters"),
    # --- OpenAI chat: how long, how many ---
    honoured(
        "max_tokens",
        {"max_tokens": 3},
        lambda r, j, h: (_text(j), j["choices"][0]["finish_reason"]) == ("Hel", "length"),
    ),
    honoured("max_completion_tokens", {"max_completion_tokens": 2}, lambda r, j, h: _text(j) == "He"),
    honoured("n_predict", {"n_predict": 4}, lambda r, j, h: _text(j) == "Hell"),
    honoured("no limit is the remaining window", {}, lambda r, j, h: r.generation.max_tokens is None),
    honoured(
        "max_tokens beyond the window",
        {"max_tokens": 99999},
        lambda r, j, h: r.generation.max_tokens == 4096 - len(r.prompt),
    ),
    honoured("stop as text", {"stop": "lo"}, lambda r, j, h: _text(j) == "Hel"),
    honoured("stop as a list", {"stop": ["zz", " w"]}, lambda r, j, h: _text(j) == "Hello"),
    honoured("stop null", {"stop": None}, lambda r, j, h: r.generation.stop == ()),
    honoured("n", {"n": 3}, lambda r, j, h: [c["index"] for c in j["choices"]] == [0, 1, 2]),
    honoured("ignore_eos", {"ignore_eos": True}, lambda r, j, h: r.generation.ignore_eos),
    honoured("cache_prompt", {"cache_prompt": False}, lambda r, j, h: not r.generation.cache_prompt),
    honoured("t_max_predict_ms", {"t_max_predict_ms": 2500}, lambda r, j, h: r.generation.time_limit_s == 2.5),
    tolerated("prompt_cache_key", {"prompt_cache_key": "k"}, "prompt_cache_key"),
    refused("max_tokens below 0", {"max_tokens": -5}, "max_tokens"),
    refused("max_tokens is a fraction", {"max_tokens": 1.5}, "max_tokens"),
    refused("n is 0", {"n": 0}, "n:"),
    refused("n is 1000", {"n": 1000}, "n:"),
    refused("stop is a number", {"stop": 5}, "stop"),
    refused("stop has a number", {"stop": [5]}, "stop"),
    # --- OpenAI chat: what comes back ---
    honoured("logprobs", {"logprobs": True}, lambda r, j, h: len(j["choices"][0]["logprobs"]["content"]) == 11),
    honoured(
        "top_logprobs",
        {"logprobs": True, "top_logprobs": 4},
        lambda r, j, h: len(j["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 4,
    ),
    refused("top_logprobs alone", {"top_logprobs": 4}, "logprobs"),
    refused("top_logprobs 50", {"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
    refused("audio out", {"modalities": ["text", "audio"]}, "text only"),
    tolerated("modalities text", {"modalities": ["text"]}),
    refused("audio", {"audio": {"voice": "x"}}, "text only"),
    refused("web search", {"web_search_options": {}}, "search"),
    refused("store", {"store": True}, "stored"),
    tolerated("store false", {"store": False}),
    refused("verbosity low", {"verbosity": "low"}, "verbosity"),
    tolerated("verbosity medium", {"verbosity": "medium"}),
    honoured("stream null", {"stream": None}, lambda r, j, h: j["object"] == "chat.completion"),
    refused("stream is text", {"stream": "maybe"}, "stream"),
    # --- OpenAI chat: the conversation ---
    honoured("developer is system", {"messages": [{"role": "developer", "content": "d"}, *HI]}, _says("system\nd")),
    honoured(
        "content parts",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "p1"}, {"type": "text", "text": "p2"}]}]},
        _says("p1\np2"),
    ),
    honoured(
        "content null", {"messages": [*HI, {"role": "assistant", "content": None}, *HI]}, _says("assistant\n<|im_end|>")
    ),
    honoured("content absent", {"messages": [*HI, {"role": "assistant"}, *HI]}, _says("assistant\n<|im_end|>")),
    honoured(
        "two systems",
        {"messages": [{"role": "system", "content": "s1"}, {"role": "system", "content": "s2"}, *HI]},
        _says("s2"),
    ),
    honoured("system in the middle", {"messages": [*HI, {"role": "system", "content": "mid"}, *HI]}, _says("mid")),
    honoured(
        "a tool's result",
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "42"},
            ]
        },
        _says("<tool_response>\n42"),
    ),
    honoured(
        "arguments that are no JSON",
        {
            "messages": [
                *HI,
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{bad"}}]},
                *HI,
            ]
        },
        _says("{bad"),
    ),
    refused("no messages", {"messages": []}, "empty"),
    refused("messages missing", {"messages": None}, "messages"),
    refused("messages is text", {"messages": "hi"}, "messages"),
    refused("a message is text", {"messages": ["hi"]}, "object"),
    refused("an unknown role", {"messages": [{"role": "wizard", "content": "x"}]}, "known roles"),
    refused("no role", {"messages": [{"content": "x"}]}, "role"),
    refused("content is a number", {"messages": [{"role": "user", "content": 5}]}, "content"),
    refused(
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "images",
    ),
    refused(
        "audio in", {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "audio"
    ),
    refused("an unknown part", {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "hologram"),
    refused("too long", {"messages": [{"role": "user", "content": "x" * 5000}]}, "4096"),
    refused("an unknown model", {"model": "gpt-9"}, "tiny", 404),
    honoured("a model with :latest", {"model": "tiny:latest"}, lambda r, j, h: j["model"] == "tiny"),
    honoured("an alias", {"model": "small"}, lambda r, j, h: j["model"] == "tiny"),
    honoured("no model", {"model": None}, lambda r, j, h: j["model"] == "tiny"),
    tolerated("user, metadata, service_tier", {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto"}),
    tolerated("nobody knows these", {"zed_thing": 1, "abc": None}, "abc,zed_thing"),
    # --- OpenAI chat: tools ---
    honoured("tools are offered", {"tools": [TOOL]}, _says('"name": "look"')),
    honoured("a tool without parameters", {"tools": [BARE_TOOL]}, _says('"name": "now"')),
    honoured(
        "tool_choice auto",
        {"tools": [TOOL], "tool_choice": "auto"},
        lambda r, j, h: (
            j["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"q": "x"}'}
            and j["choices"][0]["finish_reason"] == "tool_calls"
        ),
        script=CALL,
    ),
    honoured("tool_choice none", {"tools": [TOOL], "tool_choice": "none"}, lambda r, j, h: "look" not in r.prompt),
    honoured(
        "tool_choice required",
        {"tools": [TOOL, BARE_TOOL], "tool_choice": "required"},
        lambda r, j, h: (
            r.grammar[0] == "json_schema" and "anyOf" in r.grammar[1] and r.prompt.endswith("<tool_call>\n")
        ),
        script=['{"name": "look", "arguments": {"q": "x"}}'],
    ),
    honoured(
        "tool_choice any",
        {"tools": [TOOL, BARE_TOOL], "tool_choice": "any"},
        lambda r, j, h: "anyOf" in r.grammar[1],
        script=['{"name": "now", "arguments": {}}'],
    ),
    honoured(
        "tool_choice named",
        {"tools": [TOOL, BARE_TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        lambda r, j, h: (
            json.loads(r.grammar[1])["required"] == ["q"]
            and r.prompt.endswith('"arguments": ')
            and j["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
        ),
        script=['{"q": "x"}'],
    ),
    honoured(
        "parallel_tool_calls false",
        {"tools": [TOOL], "parallel_tool_calls": False},
        lambda r, j, h: len(j["choices"][0]["message"]["tool_calls"]) == 1,
        script=CALL + CALL,
    ),
    honoured(
        "parallel_tool_calls",
        {"tools": [TOOL]},
        lambda r, j, h: len(j["choices"][0]["message"]["tool_calls"]) == 2,
        script=CALL + CALL,
    ),
    honoured(
        "a malformed call is text",
        {"tools": [TOOL]},
        lambda r, j, h: _text(j).split() == ["<tool_call>", "oops", "</tool_call>"],
        script=["<tool_call>oops"],
    ),
    refused("tool_choice unknown", {"tools": [TOOL], "tool_choice": "maybe"}, "maybe"),
    refused(
        "tool_choice of a missing tool",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "gone"}}},
        "gone",
    ),
    refused("required without tools", {"tool_choice": "required"}, "no tools"),
    refused("a tool without a name", {"tools": [{"type": "function", "function": {}}]}, "name"),
    refused("two tools of one name", {"tools": [TOOL, TOOL]}, "two tools"),
    refused("a custom tool", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "custom"),
    refused(
        "parameters is a list", {"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]}, "schema"
    ),
    refused("legacy functions", {"functions": [{"name": "f"}]}, "tools"),
    honoured(
        "prediction",
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "as before"}]}},
        lambda r, j, h: r.generation.prediction == "as before",
    ),
    refused("prediction of another type", {"prediction": {"type": "audio"}}, "prediction.type"),
    honoured(
        "tools and a format: the answer is in it, or a call",
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        lambda r, j, h: r.grammar[0] == "lark" and "answer | call" in r.grammar[1],
    ),
    refused("tools and a GBNF grammar", {"tools": [TOOL], "grammar": 'root ::= "x"'}, "combined"),
    # --- OpenAI chat: form ---
    honoured(
        "json_object",
        {"response_format": {"type": "json_object"}},
        lambda r, j, h: r.grammar == ("json_schema", '{"type": "object"}'),
    ),
    honoured(
        "json_schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        lambda r, j, h: json.loads(r.grammar[1]) == SCHEMA,
    ),
    honoured("text", {"response_format": {"type": "text"}}, lambda r, j, h: r.grammar is None),
    honoured("grammar", {"grammar": 'root ::= "x"'}, lambda r, j, h: r.grammar == ("gbnf", 'root ::= "x"')),
    refused(
        "a schema that is none", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"
    ),
    refused("an unknown format", {"response_format": {"type": "yaml"}}, "yaml"),
    refused("two constraints", {"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'}, "combined"),
    refused("chat_template_kwargs over messages", {"chat_template_kwargs": {"messages": []}}, "messages"),
    tolerated("reasoning_effort where there is none", {"reasoning_effort": "low"}, "reasoning_effort"),
    refused("an unknown effort", {"reasoning_effort": "extreme"}, "reasoning_effort"),
    # --- OpenAI completions ---
    honoured(
        "prompt as text", {}, lambda r, j, h: (r.prompt, j["choices"][0]["text"]) == ("ab", "Hello world"), path=TEXT
    ),
    honoured("prompt as ids", {"prompt": [1, 2, 3]}, lambda r, j, h: r.prompt == [1, 2, 3], path=TEXT),
    honoured(
        "prompts",
        {"prompt": ["a", "b"], "n": 2},
        lambda r, j, h: len(j["choices"]) == 4 and j["usage"]["prompt_tokens"] == 2,
        path=TEXT,
    ),
    honoured("echo", {"echo": True}, lambda r, j, h: j["choices"][0]["text"] == "abHello world", path=TEXT),
    honoured("suffix", {"suffix": "cd"}, lambda r, j, h: r.prompt == [200, 97, 98, 201, 99, 100, 202], path=TEXT),
    honoured(
        "legacy logprobs",
        {"logprobs": 2},
        lambda r, j, h: len(j["choices"][0]["logprobs"]["top_logprobs"][0]) == 2,
        path=TEXT,
    ),
    sampling("temperature", 0.1, 0.1, TEXT),
    sampling("seed", 3, 3, TEXT),
    refused("an empty list of prompts", {"prompt": []}, "empty", path=TEXT),
    refused("a prompt that is a number", {"prompt": 5}, "prompt", path=TEXT),
    refused("echo with logprobs", {"echo": True, "logprobs": 1}, "echo", path=TEXT),
    refused("suffix for many", {"prompt": ["a", "b"], "suffix": "c"}, "suffix", path=TEXT),
    refused("best_of", {"best_of": 2}, "best_of", path=TEXT),
    honoured(
        "Mistral's fim", {"suffix": "cd"}, lambda r, j, h: r.prompt[0] == 200 and _text(j) == "Hello world", path=FIM
    ),
    refused("embeddings of a chat model", {"input": "x"}, "generates text", path="/v1/embeddings"),
    # --- Responses ---
    honoured(
        "input text",
        {},
        lambda r, j, h: j["output"][0]["content"][0]["text"] == "Hello world" and j["status"] == "completed",
        path=RESP,
    ),
    honoured("instructions", {"instructions": "be nice"}, _says("system\nbe nice"), path=RESP),
    honoured(
        "input items",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "yo"}]}]},
        _says("user\nyo"),
        path=RESP,
    ),
    honoured(
        "an empty probe",
        {"input": [], "max_output_tokens": 1},
        lambda r, j, h: j["status"] == "incomplete" and j["incomplete_details"]["reason"] == "max_output_tokens",
        path=RESP,
    ),
    honoured(
        "a function",
        {"tools": [{"type": "function", "name": "look", "parameters": {}}]},
        lambda r, j, h: (j["output"][0]["type"], j["output"][0]["arguments"]) == ("function_call", '{"q": "x"}'),
        path=RESP,
        script=CALL,
    ),
    honoured(
        "a function's result",
        {
            "input": [
                *HI,
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "42"},
            ]
        },
        _says("<tool_response>\n42"),
        path=RESP,
    ),
    tolerated("tools of OpenAI's servers", {"tools": [{"type": "web_search"}]}, "tools.web_search", path=RESP),
    honoured(
        "text.format",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        lambda r, j, h: json.loads(r.grammar[1]) == SCHEMA,
        path=RESP,
    ),
    refused("an unknown previous response", {"previous_response_id": "resp_x"}, "stored", 404, RESP),
    refused("background", {"background": True}, "background", path=RESP),
    honoured("truncation auto", {"truncation": "auto"}, lambda r, j, h: j["truncation"] == "auto", path=RESP),
    refused("a truncation nobody knows", {"truncation": "middle"}, "truncation", path=RESP),
    refused("a summary of the conversation", {"context_management": [{"type": "compaction"}]}, "context", path=RESP),
    refused("a stored prompt", {"prompt": {"id": "x"}}, "prompt", path=RESP),
    refused("an item reference", {"input": [{"type": "item_reference", "id": "x"}]}, "previous_response_id", path=RESP),
    # --- Anthropic ---
    honoured(
        "a message",
        {},
        lambda r, j, h: j["content"] == [{"type": "text", "text": "Hello world"}] and j["stop_reason"] == "end_turn",
        path=ANTH,
    ),
    honoured("system blocks", {"system": [{"type": "text", "text": "sys"}]}, _says("system\nsys"), path=ANTH),
    honoured(
        "the billing line goes",
        {"system": "x-anthropic-billing-header: cch=1;\nsys"},
        lambda r, j, h: "billing" not in r.prompt and h.headers["x-localllm-normalised"] == "billing-header",
        path=ANTH,
    ),
    honoured(
        "stop_sequences",
        {"stop_sequences": ["lo"]},
        lambda r, j, h: (j["stop_reason"], j["stop_sequence"]) == ("stop_sequence", "lo"),
        path=ANTH,
    ),
    honoured("max_tokens", {"max_tokens": 2}, lambda r, j, h: j["stop_reason"] == "max_tokens", path=ANTH),
    honoured(
        "a tool use",
        {"tools": [A_TOOL]},
        lambda r, j, h: (
            (j["content"][0]["name"], j["content"][0]["input"], j["stop_reason"]) == ("look", {"q": "x"}, "tool_use")
        ),
        path=ANTH,
        script=CALL,
    ),
    honoured(
        "tool_choice tool",
        {"tools": [A_TOOL], "tool_choice": {"type": "tool", "name": "look"}},
        lambda r, j, h: j["content"][0]["input"] == {"q": "y"},
        path=ANTH,
        script=['{"q": "y"}'],
    ),
    honoured(
        "a tool's result",
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"q": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "42"}]},
            ]
        },
        _says("<tool_response>\n42"),
        path=ANTH,
    ),
    tolerated(
        "a server's tool",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.web_search",
        path=ANTH,
    ),
    sampling("top_k", 5, 5, ANTH),
    refused(
        "an image", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images", path=ANTH
    ),
    refused("no messages", {"messages": []}, "empty", path=ANTH),
    refused("mcp servers", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", path=ANTH),
    refused("a foreign tool_choice", {"tools": [A_TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice", path=ANTH),
    # --- Ollama ---
    honoured(
        "chat",
        {},
        lambda r, j, h: (j["message"]["content"], j["done_reason"], j["eval_count"]) == ("Hello world", "stop", 11),
        path=OCHAT,
    ),
    honoured(
        "options",
        {"options": {"temperature": 0, "num_predict": 2, "top_k": 3, "seed": 9, "stop": ["zz"]}},
        lambda r, j, h: (
            (r.generation, j["done_reason"])
            == (Generation(Sampling(temperature=0, top_k=3, seed=9), max_tokens=2, stop=("zz",)), "length")
        ),
        path=OCHAT,
    ),
    tolerated(
        "another num_ctx", {"options": {"num_ctx": 131072, "num_gpu": 1}}, "options.num_ctx,options.num_gpu", path=OCHAT
    ),
    tolerated("keep_alive", {"keep_alive": -1}, path=OCHAT),
    honoured(
        "tools",
        {"tools": [TOOL]},
        lambda r, j, h: j["message"]["tool_calls"] == [{"function": {"name": "look", "arguments": {"q": "x"}}}],
        path=OCHAT,
        script=CALL,
    ),
    honoured("format json", {"format": "json"}, lambda r, j, h: r.grammar[0] == "json_schema", path=OCHAT),
    honoured("format schema", {"format": SCHEMA}, lambda r, j, h: json.loads(r.grammar[1]) == SCHEMA, path=OCHAT),
    honoured(
        "tool_name",
        {"messages": [*HI, {"role": "tool", "tool_name": "look", "content": "42"}]},
        _says("42"),
        path=OCHAT,
    ),
    honoured(
        "generate", {}, lambda r, j, h: j["response"] == "Hello world" and "<|im_start|>user\nab" in r.prompt, path=OGEN
    ),
    honoured("generate raw", {"raw": True}, lambda r, j, h: r.prompt == "ab", path=OGEN),
    honoured(
        "generate with a suffix",
        {"suffix": "cd"},
        lambda r, j, h: r.prompt == [200, 97, 98, 201, 99, 100, 202],
        path=OGEN,
    ),
    honoured("generate with a system", {"system": "sys"}, _says("system\nsys"), path=OGEN),
    honoured("generate nothing loads", {"prompt": ""}, lambda r, j, h: j["done_reason"] == "load", path=OGEN),
    refused("mirostat", {"options": {"mirostat": 1}}, "mirostat", path=OCHAT),
    refused("an image", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "text only", path=OCHAT),
    refused("a template of one's own", {"template": "{{ x }}"}, "template", path=OGEN),
    refused("an unknown format", {"format": "xml"}, "format", path=OCHAT),
    refused("an option out of range", {"options": {"temperature": -3}}, "temperature", path=OCHAT),
    refused("embed with a chat model", {"input": "x"}, "generates text", path="/api/embed"),
    refused("pull over HTTP", {"model": "x"}, "command line", path="/api/pull"),
    # --- llama.cpp ---
    honoured(
        "completion",
        {"n_predict": 3},
        lambda r, j, h: (j["content"], j["stop_type"], j["tokens_predicted"]) == ("Hel", "limit", 3),
        path=LCPP,
    ),
    honoured("n_predict -1", {"n_predict": -1}, lambda r, j, h: r.generation.max_tokens is None, path=LCPP),
    honoured(
        "n_probs", {"n_probs": 2}, lambda r, j, h: len(j["completion_probabilities"][0]["top_logprobs"]) == 2, path=LCPP
    ),
    honoured("grammar", {"grammar": "root ::= x"}, lambda r, j, h: r.grammar == ("gbnf", "root ::= x"), path=LCPP),
    honoured("json_schema", {"json_schema": SCHEMA}, lambda r, j, h: json.loads(r.grammar[1]) == SCHEMA, path=LCPP),
    honoured("infill", {}, lambda r, j, h: r.prompt == [200, 97, 98, 201, 99, 100, 202], path=INFILL),
    honoured(
        "infill with extra",
        {"input_extra": [{"filename": "f", "text": "X"}]},
        lambda r, j, h: bytes(t for t in r.prompt if t < 128).decode().startswith("\n\n--- f\nX"),
        path=INFILL,
    ),
    honoured("infill continues", {"prompt": "zz"}, lambda r, j, h: r.prompt[-3:] == [202, 122, 122], path=INFILL),
    honoured(
        "infill's time limit", {"t_max_predict_ms": 1}, lambda r, j, h: r.generation.time_limit_s == 0.001, path=INFILL
    ),
    tolerated(
        "llama.vscode's warm-up",
        {"samplers": [], "n_indent": 4, "id_slot": 0, "t_max_prompt_ms": 500},
        "samplers",
        path=INFILL,
    ),
    refused("a negative n_discard field", {"prompt": [-1]}, "prompt", path=LCPP),
    refused("input_extra is text", {"input_extra": "x"}, "input_extra", path=INFILL),
    honoured("tokenize", {"content": "ab"}, lambda r, j, h: j == {"tokens": [97, 98]}, path="/tokenize"),
    honoured(
        "tokenize with pieces",
        {"content": "a", "with_pieces": True},
        lambda r, j, h: j["tokens"] == [{"id": 97, "piece": "a"}],
        path="/tokenize",
    ),
    honoured("detokenize", {"tokens": [97, 98]}, lambda r, j, h: j == {"content": "ab"}, path="/detokenize"),
    refused("detokenize beyond the vocabulary", {"tokens": [999999]}, "vocabulary", path="/detokenize"),
    honoured(
        "apply-template", {"messages": HI}, lambda r, j, h: j["prompt"].endswith("assistant\n"), path="/apply-template"
    ),
    honoured(
        "count_tokens", {"messages": HI}, lambda r, j, h: j["input_tokens"] == 52, path="/v1/messages/count_tokens"
    ),
    # --- bodies ---
    refused("not JSON", b"{bad", "not JSON"),
    refused("an array", b"[]", "object"),
    refused("nothing", b"", "not JSON"),
    refused("not UTF-8", b'{"a": "\xff"}', "UTF-8"),
    refused("NaN", b'{"temperature": NaN}', "NaN"),
    refused("deep", b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "deeper"),
    refused("a very long number", b'{"seed": ' + b"9" * 5000 + b"}", "number"),
    honoured("a lone surrogate", {"messages": [{"role": "user", "content": "cut \ud83d"}]}, _says("cut \ufffd")),
]


def test_the_table_is_long_enough_and_has_no_twins() -> None:
    names = [(r.path, r.name) for r in ROWS]
    assert len(ROWS) >= 120
    assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(fim_tokens={"pre": 200, "suf": 201, "mid": 202}, bos_token=BOS)


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine):
    from localllm.server.models.router import ServedModel

    with (
        running_server([ServedModel("tiny", engine, aliases=("small",))]) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.path}: {r.name}"[:90])
def test_row(row: Row, http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.script = row.script
    engine.requests.clear()
    data = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
    response = http.post(row.path, content=data, headers={"content-type": "application/json"})
    if row.refused:
        assert response.status_code == row.refused, response.text
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert row.says.lower() in (message + str(response.json())).lower()
        if not row.path.startswith("/api/") and row.path != ANTH:
            assert set(error) >= {"message", "type", "code", "param"}
        return
    assert response.status_code == 200, response.text
    assert row.effect is not None
    assert row.effect(engine.requests[-1] if engine.requests else None, response.json(), response), response.text
