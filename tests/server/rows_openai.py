"""The conformance table of OpenAI's chat completions."""

from __future__ import annotations

import json
from typing import Any

from localllm.conversation.template import DEFAULT_MARKS
from localllm.engine.messages import LoopLimits
from server.rows import (
    BARE_TOOL,
    CALL,
    CLOSED,
    HI,
    SCHEMA,
    TOOL,
    Row,
    honoured,
    refused,
    sampling,
    says,
    text,
    tolerated,
)
from support.scripted_engine import grammar_of


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


OPENAI: list[Row] = [
    # --- OpenAI chat: sampling ---
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
    refused("logit_bias of a word", {"logit_bias": {"cat": 1}}, "logit_bias.cat"),
    refused("logit_bias out of range", {"logit_bias": {"1": 1000}}, "logit_bias"),
    refused("mirostat", {"mirostat": 2}, "mirostat"),
    tolerated("mirostat off", {"mirostat": 0}),
    sampling("xtc_probability", 0.5, 0.5),
    sampling("xtc_threshold", 0.2, 0.2),
    sampling("dry_multiplier", 0.8, 0.8),
    sampling("dry_base", 1.5, 1.5),
    sampling("dry_allowed_length", 3, 3),
    sampling("dry_penalty_last_n", -1, -1),
    sampling("dry_sequence_breakers", ["x", "", "yz"], ("x", "yz")),
    sampling("dry_sequence_breakers", [], ()),
    refused("xtc_probability above 1", {"xtc_probability": 2}, "xtc_probability"),
    refused("dry_base below 1", {"dry_base": 0.5}, "dry_base"),
    refused("dynatemp", {"dynatemp_range": 0.5}, "dynamic"),
    refused("tfs", {"tfs_z": 0.5}, "tail-free"),
    refused("best_of", {"best_of": 3}, "best_of"),
    refused("beam search", {"use_beam_search": True}, "beam"),
    refused("lora", {"lora": [{"id": 0, "scale": 1}]}, "lora: there is no adapter 0"),
    honoured("an empty lora", {"lora": []}, lambda r, j, h: r.generation.adapters is None),
    # --- OpenAI chat: length and number of answers ---
    honoured(
        "max_tokens",
        {"max_tokens": 3},
        lambda r, j, h: (text(j), j["choices"][0]["finish_reason"]) == ("Hel", "length"),
    ),
    honoured(
        "max_completion_tokens", {"max_completion_tokens": 2}, lambda r, j, h: text(j) == "He"
    ),
    honoured("n_predict", {"n_predict": 4}, lambda r, j, h: text(j) == "Hell"),
    honoured(
        "no limit is the remaining window", {}, lambda r, j, h: r.generation.max_tokens is None
    ),
    honoured(
        "max_tokens beyond the window",
        {"max_tokens": 99999},
        lambda r, j, h: text(j) == "Hello world",
    ),
    honoured("stop as text", {"stop": "lo"}, lambda r, j, h: text(j) == "Hel"),
    honoured("stop as a list", {"stop": ["zz", " w"]}, lambda r, j, h: text(j) == "Hello"),
    honoured("stop null", {"stop": None}, lambda r, j, h: r.generation.stop == DEFAULT_MARKS),
    honoured("n", {"n": 3}, lambda r, j, h: [c["index"] for c in j["choices"]] == [0, 1, 2]),
    honoured("ignore_eos", {"ignore_eos": True}, lambda r, j, h: r.generation.ignore_eos),
    honoured(
        "cache_prompt", {"cache_prompt": False}, lambda r, j, h: not r.generation.cache_prompt
    ),
    honoured("cache_salt", {"cache_salt": "s"}, lambda r, j, h: r.generation.salt == "\ns"),
    refused("an empty cache_salt", {"cache_salt": ""}, "cache_salt"),
    honoured(
        "t_max_predict_ms",
        {"t_max_predict_ms": 2500},
        lambda r, j, h: r.generation.time_limit_s == 2.5,
    ),
    tolerated("prompt_cache_key", {"prompt_cache_key": "k"}, "prompt_cache_key"),
    honoured("min_tokens", {"min_tokens": 5}, lambda r, j, h: r.generation.min_tokens == 5),
    refused("min_tokens above max_tokens", {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    honoured(
        "stop_token_ids",
        {"stop_token_ids": [7, 9]},
        lambda r, j, h: r.generation.stop_token_ids == (7, 9),
    ),
    honoured(
        "repetition_detection",
        {"repetition_detection": {"max_pattern_size": 20, "min_pattern_size": 3, "min_count": 4}},
        lambda r, j, h: r.generation.loops == LoopLimits(20, 3, 4),
    ),
    honoured(
        "repetition_detection off",
        {"repetition_detection": {"max_pattern_size": 0}},
        lambda r, j, h: r.generation.loops is None,
    ),
    refused(
        "repetition_detection upside down",
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}},
        "min_pattern_size",
    ),
    refused(
        "repetition_detection of one",
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
        "min_count",
    ),
    refused("stop_token_ids below 0", {"stop_token_ids": [-1]}, "stop_token_ids"),
    refused("max_tokens below 0", {"max_tokens": -5}, "max_tokens"),
    refused("max_tokens is a fraction", {"max_tokens": 1.5}, "max_tokens"),
    refused("n is 0", {"n": 0}, "n:"),
    refused("n is 1000", {"n": 1000}, "n:"),
    refused("stop is a number", {"stop": 5}, "stop"),
    refused("stop has a number", {"stop": [5]}, "stop"),
    # --- OpenAI chat: contents of the reply ---
    honoured(
        "logprobs",
        {"logprobs": True},
        lambda r, j, h: len(j["choices"][0]["logprobs"]["content"]) == 11,
    ),
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
    tolerated("store", {"store": True}, "store"),
    tolerated("store false", {"store": False}),
    tolerated("verbosity low", {"verbosity": "low"}, "verbosity"),
    *(
        honoured(f"{key} {sent}", {key: sent}, lambda r, j, h: r.generation.max_tokens is None)
        for key, sent in (("max_tokens", -1), ("max_completion_tokens", -1), ("n_predict", -2))
    ),
    refused("max_tokens -3", {"max_tokens": -3}, "max_tokens"),
    *(
        tolerated(f"reasoning_effort {effort}", {"reasoning_effort": effort}, "reasoning_effort")
        for effort in ("none", "minimal", "xhigh", "max")
    ),
    refused("an effort nobody knows", {"reasoning_effort": "heroic"}, "reasoning_effort"),
    honoured(
        "tool_choice as an object",
        {"tools": [TOOL], "tool_choice": {"type": "auto"}},
        lambda r, j, h: '"look"' in r.prompt,
    ),
    honoured(
        "tool_choice none as an object",
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        lambda r, j, h: '"look"' not in r.prompt,
    ),
    honoured(
        "allowed tools",
        {
            "tools": [TOOL, BARE_TOOL],
            "tool_choice": allowed("auto", {"type": "function", "function": {"name": "now"}}),
        },
        lambda r, j, h: '"now"' in r.prompt and '"look"' not in r.prompt,
    ),
    honoured(
        "an allowed tool that must be called",
        {
            "tools": [TOOL, BARE_TOOL],
            "tool_choice": allowed("required", {"type": "function", "function": {"name": "look"}}),
        },
        lambda r, j, h: j["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look",
        script=['{"q": "x"}'],
    ),
    refused(
        "an allowed tool that is none",
        {
            "tools": [TOOL],
            "tool_choice": allowed("auto", {"type": "function", "function": {"name": "gone"}}),
        },
        "allowed_tools",
    ),
    tolerated("verbosity medium", {"verbosity": "medium"}),
    honoured("stream null", {"stream": None}, lambda r, j, h: j["object"] == "chat.completion"),
    refused("stream is text", {"stream": "maybe"}, "stream"),
    # --- OpenAI chat: the conversation ---
    honoured(
        "developer is system",
        {"messages": [{"role": "developer", "content": "d"}, *HI]},
        says("system\nd"),
    ),
    honoured(
        "content parts",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "p1"}, {"type": "text", "text": "p2"}],
                }
            ]
        },
        says("p1\np2"),
    ),
    honoured(
        "content null",
        {"messages": [*HI, {"role": "assistant", "content": None}, *HI]},
        says("assistant\n<|im_end|>"),
    ),
    honoured(
        "content absent",
        {"messages": [*HI, {"role": "assistant"}, *HI]},
        says("assistant\n<|im_end|>"),
    ),
    honoured(
        "two systems",
        {
            "messages": [
                {"role": "system", "content": "s1"},
                {"role": "system", "content": "s2"},
                *HI,
            ]
        },
        says("s2"),
    ),
    honoured(
        "system in the middle",
        {"messages": [*HI, {"role": "system", "content": "mid"}, *HI]},
        says("mid"),
    ),
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
        says("<tool_response>\n42"),
    ),
    honoured(
        "arguments that are no JSON",
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{bad"}}],
                },
                *HI,
            ]
        },
        says("{bad"),
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
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "images",
    ),
    refused(
        "audio in",
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "audio",
    ),
    refused(
        "an unknown part",
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        "hologram",
    ),
    refused("too long", {"messages": [{"role": "user", "content": "x" * 5000}]}, "4096"),
    refused("an unknown model", {"model": "gpt-9"}, "tiny", 404),
    honoured(
        "a model with :latest", {"model": "tiny:latest"}, lambda r, j, h: j["model"] == "tiny"
    ),
    honoured("an alias", {"model": "small"}, lambda r, j, h: j["model"] == "tiny"),
    honoured("no model", {"model": None}, lambda r, j, h: j["model"] == "tiny"),
    tolerated(
        "user, metadata, service_tier",
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto"},
    ),
    tolerated("nobody knows these", {"zed_thing": 1, "abc": None}, "abc,zed_thing"),
    # --- OpenAI chat: tools ---
    honoured("tools are offered", {"tools": [TOOL]}, says('"name": "look"')),
    honoured("a tool without parameters", {"tools": [BARE_TOOL]}, says('"name": "now"')),
    honoured(
        "tool_choice auto",
        {"tools": [TOOL], "tool_choice": "auto"},
        lambda r, j, h: (
            j["choices"][0]["message"]["tool_calls"][0]["function"]
            == {"name": "look", "arguments": '{"q": "x"}'}
            and j["choices"][0]["finish_reason"] == "tool_calls"
        ),
        script=CALL,
    ),
    honoured(
        "tool_choice none",
        {"tools": [TOOL], "tool_choice": "none"},
        lambda r, j, h: "look" not in r.prompt,
    ),
    honoured(
        "tool_choice required",
        {"tools": [TOOL, BARE_TOOL], "tool_choice": "required"},
        lambda r, j, h: (
            grammar_of(r)[0] == "json_schema"
            and "anyOf" in grammar_of(r)[1]
            and r.prompt.endswith("<tool_call>\n")
        ),
        script=['{"name": "look", "arguments": {"q": "x"}}'],
    ),
    honoured(
        "tool_choice any",
        {"tools": [TOOL, BARE_TOOL], "tool_choice": "any"},
        lambda r, j, h: "anyOf" in grammar_of(r)[1],
        script=['{"name": "now", "arguments": {}}'],
    ),
    honoured(
        "tool_choice named",
        {
            "tools": [TOOL, BARE_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
        lambda r, j, h: (
            json.loads(grammar_of(r)[1])["required"] == ["q"]
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
        lambda r, j, h: text(j).split() == ["<tool_call>", "oops", "</tool_call>"],
        script=["<tool_call>oops\n</tool_call>"],
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
    honoured(
        "a custom tool",
        {"tools": [{"type": "custom", "custom": {"name": "look"}}]},
        lambda r, j, h: (
            j["choices"][0]["message"]["tool_calls"][0]["custom"] == {"name": "look", "input": "x"}
        ),
        script=['<tool_call>\n{"name": "look", "arguments": {"input": "x"}}\n</tool_call>'],
    ),
    honoured(
        "a call of a custom tool",
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "custom", "custom": {"name": "look", "input": "there"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "42"},
            ]
        },
        says('{"input": "there"}'),
    ),
    refused(
        "parameters is a list",
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]},
        "schema",
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
        lambda r, j, h: grammar_of(r)[0] == "lark" and "answer | call" in grammar_of(r)[1],
    ),
    refused("tools and a GBNF grammar", {"tools": [TOOL], "grammar": 'root ::= "x"'}, "combined"),
    # --- OpenAI chat: structured output ---
    honoured(
        "json_object",
        {"response_format": {"type": "json_object"}},
        lambda r, j, h: grammar_of(r) == ("json_schema", '{"type": "object"}'),
    ),
    honoured(
        "json_schema",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        lambda r, j, h: json.loads(grammar_of(r)[1]) == CLOSED,
    ),
    honoured("text", {"response_format": {"type": "text"}}, lambda r, j, h: grammar_of(r) is None),
    honoured(
        "grammar",
        {"grammar": 'root ::= "x"'},
        lambda r, j, h: grammar_of(r) == ("gbnf", 'root ::= "x"'),
    ),
    refused(
        "a schema that is none",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "schema",
    ),
    refused("an unknown format", {"response_format": {"type": "yaml"}}, "yaml"),
    refused(
        "two constraints",
        {"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'},
        "combined",
    ),
    refused(
        "chat_template_kwargs over messages", {"chat_template_kwargs": {"messages": []}}, "messages"
    ),
    tolerated(
        "reasoning_effort where there is none", {"reasoning_effort": "low"}, "reasoning_effort"
    ),
    refused("an unknown effort", {"reasoning_effort": "extreme"}, "reasoning_effort"),
]
