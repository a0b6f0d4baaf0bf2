"""The conformance tables of Responses, Anthropic, Ollama and llama.cpp, and of malformed bodies."""

from __future__ import annotations

import json

from localllm.conversation.template import DEFAULT_MARKS
from localllm.engine.messages import Generation, Sampling
from server.rows import (
    A_TOOL,
    ANTH,
    CALL,
    CLOSED,
    HI,
    INFILL,
    LCPP,
    OCHAT,
    OGEN,
    RESP,
    SCHEMA,
    TOOL,
    Row,
    honoured,
    refused,
    sampling,
    says,
    tolerated,
)
from support.scripted_engine import grammar_of

OTHERS: list[Row] = [
    # --- Responses ---
    honoured(
        "input text",
        {},
        lambda r, j, h: (
            j["output"][0]["content"][0]["text"] == "Hello world" and j["status"] == "completed"
        ),
        path=RESP,
    ),
    honoured("instructions", {"instructions": "be nice"}, says("system\nbe nice"), path=RESP),
    honoured(
        "input items",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "yo"}]}]},
        says("user\nyo"),
        path=RESP,
    ),
    honoured(
        "an empty probe",
        {"input": [], "max_output_tokens": 1},
        lambda r, j, h: (
            j["status"] == "incomplete" and j["incomplete_details"]["reason"] == "max_output_tokens"
        ),
        path=RESP,
    ),
    honoured(
        "a function",
        {"tools": [{"type": "function", "name": "look", "parameters": {}}]},
        lambda r, j, h: (
            (j["output"][0]["type"], j["output"][0]["arguments"]) == ("function_call", '{"q": "x"}')
        ),
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
        says("<tool_response>\n42"),
        path=RESP,
    ),
    tolerated("a verbosity", {"text": {"verbosity": "low"}}, "text.verbosity", path=RESP),
    tolerated("a usual verbosity", {"text": {"verbosity": "medium"}}, path=RESP),
    tolerated(
        "what Codex wants included",
        {"include": ["reasoning.encrypted_content"]},
        "include.reasoning.encrypted_content",
        path=RESP,
    ),
    honoured(
        "max_output_tokens -1",
        {"max_output_tokens": -1},
        lambda r, j, h: r.generation.max_tokens is None,
        path=RESP,
    ),
    honoured(
        "allowed tools of the responses",
        {
            "tools": [{"type": "function", "name": "now"}, {"type": "function", "name": "look"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "now"}],
            },
        },
        lambda r, j, h: '"now"' in r.prompt and '"look"' not in r.prompt,
        path=RESP,
    ),
    tolerated(
        "tools of OpenAI's servers",
        {"tools": [{"type": "web_search"}]},
        "tools.web_search",
        path=RESP,
    ),
    honoured(
        "text.format",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        lambda r, j, h: json.loads(grammar_of(r)[1]) == CLOSED,
        path=RESP,
    ),
    refused(
        "an unknown previous response", {"previous_response_id": "resp_x"}, "stored", 404, RESP
    ),
    refused("background", {"background": True}, "background", path=RESP),
    honoured(
        "truncation auto",
        {"truncation": "auto"},
        lambda r, j, h: j["truncation"] == "auto",
        path=RESP,
    ),
    refused("a truncation nobody knows", {"truncation": "middle"}, "truncation", path=RESP),
    refused(
        "a summary of the conversation",
        {"context_management": [{"type": "compaction"}]},
        "context",
        path=RESP,
    ),
    refused("a stored prompt", {"prompt": {"id": "x"}}, "prompt", path=RESP),
    refused(
        "an item reference",
        {"input": [{"type": "item_reference", "id": "x"}]},
        "previous_response_id",
        path=RESP,
    ),
    # --- Anthropic ---
    honoured(
        "a message",
        {},
        lambda r, j, h: (
            j["content"] == [{"type": "text", "text": "Hello world"}]
            and j["stop_reason"] == "end_turn"
        ),
        path=ANTH,
    ),
    honoured(
        "system blocks",
        {"system": [{"type": "text", "text": "sys"}]},
        says("system\nsys"),
        path=ANTH,
    ),
    honoured(
        "the billing line goes",
        {"system": "x-anthropic-billing-header: cch=1;\nsys"},
        lambda r, j, h: (
            "billing" not in r.prompt and h.headers["x-localllm-normalised"] == "billing-header"
        ),
        path=ANTH,
    ),
    honoured(
        "stop_sequences",
        {"stop_sequences": ["lo"]},
        lambda r, j, h: (j["stop_reason"], j["stop_sequence"]) == ("stop_sequence", "lo"),
        path=ANTH,
    ),
    honoured(
        "max_tokens", {"max_tokens": 2}, lambda r, j, h: j["stop_reason"] == "max_tokens", path=ANTH
    ),
    honoured(
        "a tool use",
        {"tools": [A_TOOL]},
        lambda r, j, h: (
            (j["content"][0]["name"], j["content"][0]["input"], j["stop_reason"])
            == ("look", {"q": "x"}, "tool_use")
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
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"q": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "42"}],
                },
            ]
        },
        says("<tool_response>\n42"),
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
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "images",
        path=ANTH,
    ),
    refused("no messages", {"messages": []}, "empty", path=ANTH),
    refused("mcp servers", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", path=ANTH),
    refused(
        "a foreign tool_choice",
        {"tools": [A_TOOL], "tool_choice": {"type": "maybe"}},
        "tool_choice",
        path=ANTH,
    ),
    # --- Ollama ---
    honoured(
        "chat",
        {},
        lambda r, j, h: (
            (j["message"]["content"], j["done_reason"], j["eval_count"])
            == ("Hello world", "stop", 11)
        ),
        path=OCHAT,
    ),
    honoured(
        "options",
        {"options": {"temperature": 0, "num_predict": 2, "top_k": 3, "seed": 9, "stop": ["zz"]}},
        lambda r, j, h: (
            (r.generation, j["done_reason"])
            == (
                Generation(
                    Sampling(temperature=0, top_k=3, seed=9),
                    max_tokens=2,
                    stop=("zz", *DEFAULT_MARKS),
                ),
                "length",
            )
        ),
        path=OCHAT,
    ),
    tolerated(
        "another num_ctx",
        {"options": {"num_ctx": 131072, "num_gpu": 1}},
        "options.num_ctx,options.num_gpu",
        path=OCHAT,
    ),
    tolerated("keep_alive", {"keep_alive": -1}, path=OCHAT),
    honoured(
        "a forced call",
        {"tools": [TOOL], "tool_choice": "required"},
        lambda r, j, h: grammar_of(r) is not None,
        path=OCHAT,
    ),
    refused("a call without tools", {"tool_choice": "required"}, "no tools", path=OCHAT),
    honoured(
        "tools",
        {"tools": [TOOL]},
        lambda r, j, h: (
            [c["function"] for c in j["message"]["tool_calls"]]
            == [{"index": 0, "name": "look", "arguments": {"q": "x"}}]
        ),
        path=OCHAT,
        script=CALL,
    ),
    honoured(
        "format json",
        {"format": "json"},
        lambda r, j, h: grammar_of(r)[0] == "json_schema",
        path=OCHAT,
    ),
    honoured(
        "format schema",
        {"format": SCHEMA},
        lambda r, j, h: json.loads(grammar_of(r)[1]) == CLOSED,
        path=OCHAT,
    ),
    honoured(
        "tool_name",
        {"messages": [*HI, {"role": "tool", "tool_name": "look", "content": "42"}]},
        says("42"),
        path=OCHAT,
    ),
    honoured(
        "generate",
        {},
        lambda r, j, h: j["response"] == "Hello world" and "<|im_start|>user\nab" in r.prompt,
        path=OGEN,
    ),
    honoured("generate raw", {"raw": True}, lambda r, j, h: r.prompt == "ab", path=OGEN),
    honoured(
        "generate with a suffix",
        {"suffix": "cd"},
        lambda r, j, h: r.prompt == [200, 97, 98, 201, 99, 100, 202],
        path=OGEN,
    ),
    honoured("generate with a system", {"system": "sys"}, says("system\nsys"), path=OGEN),
    honoured(
        "generate nothing loads",
        {"prompt": ""},
        lambda r, j, h: j["done_reason"] == "load",
        path=OGEN,
    ),
    refused("mirostat", {"options": {"mirostat": 1}}, "mirostat", path=OCHAT),
    refused(
        "an image",
        {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
        "does not support images",
        path=OCHAT,
    ),
    refused("a template of one's own", {"template": "{{ x }}"}, "template", path=OGEN),
    refused("an unknown format", {"format": "xml"}, "format", path=OCHAT),
    refused("an option out of range", {"options": {"temperature": -3}}, "temperature", path=OCHAT),
    refused("embed with a chat model", {"input": "x"}, "generates text", path="/api/embed"),
    refused("pull over HTTP", {"model": "x"}, "command line", path="/api/pull"),
    # --- llama.cpp ---
    honoured(
        "completion",
        {"n_predict": 3},
        lambda r, j, h: (
            (j["content"], j["stop_type"], j["tokens_predicted"]) == ("Hel", "limit", 3)
        ),
        path=LCPP,
    ),
    honoured(
        "n_predict -1",
        {"n_predict": -1},
        lambda r, j, h: r.generation.max_tokens is None,
        path=LCPP,
    ),
    honoured(
        "n_probs",
        {"n_probs": 2},
        lambda r, j, h: len(j["completion_probabilities"][0]["top_logprobs"]) == 2,
        path=LCPP,
    ),
    honoured(
        "grammar",
        {"grammar": "root ::= x"},
        lambda r, j, h: grammar_of(r) == ("gbnf", "root ::= x"),
        path=LCPP,
    ),
    honoured(
        "json_schema",
        {"json_schema": SCHEMA},
        lambda r, j, h: json.loads(grammar_of(r)[1]) == CLOSED,
        path=LCPP,
    ),
    honoured(
        "infill", {}, lambda r, j, h: r.prompt == [200, 97, 98, 201, 99, 100, 202], path=INFILL
    ),
    honoured(
        "infill with extra",
        {"input_extra": [{"filename": "f", "text": "X"}]},
        lambda r, j, h: bytes(t for t in r.prompt if t < 128).decode().startswith("\n\n--- f\nX"),
        path=INFILL,
    ),
    honoured(
        "infill continues",
        {"prompt": "zz"},
        lambda r, j, h: r.prompt[-3:] == [202, 122, 122],
        path=INFILL,
    ),
    honoured(
        "infill's time limit",
        {"t_max_predict_ms": 1},
        lambda r, j, h: r.generation.time_limit_s == 0.001,
        path=INFILL,
    ),
    tolerated(
        "llama.vscode's warm-up",
        {"samplers": [], "n_indent": 4, "id_slot": 0, "t_max_prompt_ms": 500},
        "n_indent,samplers,t_max_prompt_ms",
        path=INFILL,
    ),
    refused("a negative n_discard field", {"prompt": [-1]}, "prompt", path=LCPP),
    refused("input_extra is text", {"input_extra": "x"}, "input_extra", path=INFILL),
    honoured(
        "tokenize", {"content": "ab"}, lambda r, j, h: j == {"tokens": [97, 98]}, path="/tokenize"
    ),
    honoured(
        "tokenize with pieces",
        {"content": "a", "with_pieces": True},
        lambda r, j, h: j["tokens"] == [{"id": 97, "piece": "a"}],
        path="/tokenize",
    ),
    honoured(
        "detokenize",
        {"tokens": [97, 98]},
        lambda r, j, h: j == {"content": "ab"},
        path="/detokenize",
    ),
    refused(
        "detokenize beyond the vocabulary", {"tokens": [999999]}, "vocabulary", path="/detokenize"
    ),
    honoured(
        "apply-template",
        {"messages": HI},
        lambda r, j, h: j["prompt"].endswith("assistant\n"),
        path="/apply-template",
    ),
    honoured(
        "count_tokens",
        {"messages": HI},
        lambda r, j, h: j["input_tokens"] == 52,
        path="/v1/messages/count_tokens",
    ),
    # --- bodies ---
    refused("not JSON", b"{bad", "not JSON"),
    refused("an array", b"[]", "object"),
    refused("nothing", b"", "not JSON"),
    refused("not UTF-8", b'{"a": "\xff"}', "UTF-8"),
    refused("NaN", b'{"temperature": NaN}', "NaN"),
    refused("deep", b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "deeper"),
    refused("a very long number", b'{"seed": ' + b"9" * 5000 + b"}", "number"),
    honoured(
        "a lone surrogate",
        {"messages": [{"role": "user", "content": "cut \ud83d"}]},
        says("cut \ufffd"),
    ),
]
