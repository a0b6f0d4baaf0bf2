"""A complete table of the documented fields of every dialect, and the effect of each.

HONOURED: the field changes the engine's request or the reply (how: test_conformance.py).
REFUSED: the reply is a 400 that names the field. NAMED: the field is tolerated, and named in
x-localllm-ignored. NO_EFFECT: the field does not concern the answer (billing, queue, cache), so
it is ignored without a note. A value that would change the answer is never ignored. The third
entry of a row is the fields that must also be sent for the field to take effect.

Sources: OpenAI's API reference (chat, completions, responses), docs.anthropic.com (messages),
Ollama's docs/api.md, llama.cpp's tools/server/README.md, vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from localllm.server.models.router import ServedModel
from support.http_server import running_server
from support.scripted_engine import BOS, ScriptedEngine, grammar_of

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object"}
OTHER = [{"role": "user", "content": "something else"}]
BEGUN = [*OTHER, {"role": "assistant", "content": "a beginning"}]
WITH_TOOLS = {"tools": [TOOL]}
FUNCTION = {"type": "function", "name": "f"}
# Too long for the context in total, although each turn is short.
LONG = [
    {"role": r, "content": f"{i} " + "word " * 40} for i in range(12) for r in ("user", "assistant")
] + HI
HONOURED, REFUSED, NAMED, NO_EFFECT = "honoured", "refused", "named", "no effect"

Table = dict[str, tuple[Any, ...]]

# The fields that all of OpenAI's and llama.cpp's dialects share.
SPELLED = [{"role": "user", "content": "a<|turn|>b"}]
SAMPLING: Table = {
    "temperature": (HONOURED, 0.5), "top_p": (HONOURED, 0.5), "top_k": (HONOURED, 5),
    "min_p": (HONOURED, 0.1),
    "typical_p": (HONOURED, 0.5), "repeat_penalty": (HONOURED, 1.1),
    "repetition_penalty": (HONOURED, 1.1),
    "repeat_last_n": (HONOURED, 5), "presence_penalty": (HONOURED, 1),
    "frequency_penalty": (HONOURED, 1),
    "seed": (HONOURED, 3), "logit_bias": (HONOURED, {"1": 1}), "stop": (HONOURED, ["x"]),
    "ignore_eos": (HONOURED, True),
    "min_tokens": (HONOURED, 5), "stop_token_ids": (HONOURED, [1]),
    "dry_multiplier": (HONOURED, 0.8),
    "dry_base": (HONOURED, 1.5), "dry_allowed_length": (HONOURED, 4),
    "dry_penalty_last_n": (HONOURED, 9),
    "dry_sequence_breakers": (HONOURED, ["x"]), "xtc_probability": (HONOURED, 0.5),
    "xtc_threshold": (HONOURED, 0.2),
    "repetition_detection": (HONOURED, {"max_pattern_size": 5}), "cache_prompt": (HONOURED, False),
    "cache_salt": (HONOURED, "s"),
    "t_max_predict_ms": (HONOURED, 5000), "grammar": (HONOURED, 'root ::= "x"'),
    "json_schema": (HONOURED, SCHEMA),
    "guided_choice": (HONOURED, ["a"]), "guided_grammar": (HONOURED, 'root ::= "x"'),
    "guided_json": (HONOURED, SCHEMA),
    "guided_regex": (HONOURED, "x"), "structured_outputs": (HONOURED, {"json": SCHEMA}),
    "regex": (HONOURED, "x"),
    "ebnf": (HONOURED, 'root ::= "x"'),
    "model": (HONOURED, "other"), "stream": (HONOURED, True),
}  # fmt: skip
# Fields that switch reasoning on or off, limit it or hide it, for a model that does not reason.
THINKING: Table = {
    "reasoning": (NAMED, {"max_tokens": 5}), "reasoning_effort": (NAMED, "low"),
    "thinking": (NAMED, {"type": "disabled"}), "think": (NAMED, False),
    "enable_thinking": (NAMED, False), "include_reasoning": (NAMED, False),
    "chat_template_kwargs": (HONOURED, {"a": 1}),
    "thinking_budget": (NAMED, 5), "thinking_token_budget": (NAMED, 5),
    "loop_guard": (NO_EFFECT, True),  # the conversation has no loop
    "thinking_budget_tokens": (NAMED, 5), "reasoning_budget_tokens": (NAMED, 5),
}  # fmt: skip
TELEMETRY: Table = {
    "timings_per_token": (HONOURED, True, {"stream": True}),
    "return_progress": (HONOURED, True, {"stream": True}),
}
CHAT: Table = {
    **THINKING,
    "parse_special": (HONOURED, True, {"messages": SPELLED}),
    **SAMPLING,
    "messages": (HONOURED, OTHER), "n": (HONOURED, 2),
    "logprobs": (HONOURED, True),
    "max_completion_tokens": (HONOURED, 5), "max_tokens": (HONOURED, 5),
    "parallel_tool_calls": (HONOURED, False, WITH_TOOLS),
    "prediction": (HONOURED, {"type": "content", "content": "x"}),
    "prompt_cache_key": (NAMED, "k"), "response_format": (HONOURED, {"type": "json_object"}),
    "stream_options": (HONOURED, {"include_usage": True}, {"stream": True}),
    "tools": (HONOURED, [TOOL]), "tool_choice": (HONOURED, "none", WITH_TOOLS),
    "top_logprobs": (REFUSED, 3),
    "audio": (REFUSED, {"voice": "x"}), "modalities": (REFUSED, ["audio"]),
    "functions": (REFUSED, [{"name": "f"}]),
    "function_call": (REFUSED, {"name": "f"}), "store": (NAMED, True), "verbosity": (NAMED, "low"),
    "web_search_options": (REFUSED, {}), "metadata": (NO_EFFECT, {"a": "b"}),
    "user": (NO_EFFECT, "u"),
    "safety_identifier": (NO_EFFECT, "u"), "service_tier": (HONOURED, "flex"),
    "prompt_cache_retention": (NO_EFFECT, "24h"),
    # llama.cpp's and vLLM's additions
    "n_predict": (HONOURED, 5),
    "truncation": (HONOURED, "auto", {"messages": LONG}),
    "add_generation_prompt": (HONOURED, True, {"messages": BEGUN}),
    "allowed_token_ids": (REFUSED, [1]), "bad_words": (REFUSED, ["x"]),
    "best_of": (REFUSED, 2), "continue_final_message": (HONOURED, False, {"messages": BEGUN}),
    "dynatemp_range": (REFUSED, 0.5), "grammar_lazy": (REFUSED, True),
    "include_stop_str_in_output": (REFUSED, True), "length_penalty": (REFUSED, 0.5),
    "lora": (REFUSED, [{"id": 0, "scale": 1}]),
    "mirostat": (REFUSED, 1), "prompt_logprobs": (REFUSED, 1),
    "reasoning_format": (REFUSED, "none"), "skip_special_tokens": (REFUSED, False),
    "tfs_z": (REFUSED, 0.5), "top_n_sigma": (REFUSED, 1),
    "truncate_prompt_tokens": (REFUSED, 5), "use_beam_search": (REFUSED, True),
    "id_slot": (NO_EFFECT, 0),
    # without the option that enables them, which is refused, these have no effect
    "dynatemp_exponent": (NAMED, 1), "mirostat_tau": (NAMED, 5),
    "priority": (NAMED, 1), "an_editors_own": (NAMED, 1),
    "verbose": (HONOURED, True), **TELEMETRY,
}  # fmt: skip
TEXT: Table = {
    **SAMPLING, **TELEMETRY, "lora": (REFUSED, [{"id": 0, "scale": 1}]),
    "prompt": (HONOURED, "other"), "suffix": (HONOURED, "cd"), "echo": (HONOURED, True),
    "logprobs": (HONOURED, 2),
    "max_tokens": (HONOURED, 5), "n_predict": (HONOURED, 5), "n": (HONOURED, 2),
    "response_format": (HONOURED, {"type": "json_object"}),
    "stream_options": (HONOURED, {"include_usage": True}, {"stream": True}),
    "best_of": (REFUSED, 2), "user": (NO_EFFECT, "u"),
    "service_tier": (HONOURED, "flex"),
}  # fmt: skip
RESPONSES: Table = {
    "lora": (REFUSED, [{"id": 0, "scale": 1}]),
    **TELEMETRY,
    **THINKING,
    "parse_special": (HONOURED, True, {"input": SPELLED[0]["content"]}),
    **SAMPLING,
    "input": (HONOURED, "something else"), "instructions": (HONOURED, "be kind"),
    "max_output_tokens": (HONOURED, 5),
    "parallel_tool_calls": (HONOURED, False, {"tools": [FUNCTION]}),
    "prompt_cache_key": (NAMED, "k"),
    "store": (HONOURED, False),
    "text": (HONOURED, {"format": {"type": "json_object"}}),
    "tool_choice": (HONOURED, "none", {"tools": [FUNCTION]}), "tools": (HONOURED, [FUNCTION]),
    "truncation": (HONOURED, "auto", {"input": LONG}),
    "context_management": (REFUSED, [{"type": "compaction"}]),
    "background": (REFUSED, True), "conversation": (REFUSED, "c"), "prompt": (REFUSED, {"id": "p"}),
    "n": (REFUSED, 2),
    "mirostat": (REFUSED, 1),
    "previous_response_id": (REFUSED, "resp_x"), "top_logprobs": (HONOURED, 3),
    "include": (HONOURED, ["message.output_text.logprobs"]), "max_tool_calls": (NO_EFFECT, 3),
    "metadata": (NO_EFFECT, {"a": "b"}), "safety_identifier": (NO_EFFECT, "u"),
    "service_tier": (HONOURED, "flex"),
    "user": (NO_EFFECT, "u"), "prompt_cache_retention": (NO_EFFECT, "24h"),
    "stream_options": (NO_EFFECT, {"include_obfuscation": False}),
}  # fmt: skip
_NONE = {"type": "tool_uses", "value": 0}
CLEARED = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": _NONE, "keep": _NONE}]}
USED = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": "dry " * 30}],
    },
]
MESSAGES: Table = {
    "lora": (REFUSED, [{"id": 0, "scale": 1}]),
    **THINKING,
    "parse_special": (HONOURED, True, {"messages": SPELLED}),
    # the samplers of the other dialects, which clients send in an extra body
    **SAMPLING,
    "stop": (HONOURED, ["x"]), "grammar": (HONOURED, 'root ::= "x"'),
    "json_schema": (HONOURED, SCHEMA), "n": (REFUSED, 2),
    "mirostat": (REFUSED, 1),
    "model": (HONOURED, "other"),
    "messages": (HONOURED, OTHER), "max_tokens": (HONOURED, 5), "system": (HONOURED, "be kind"),
    "stream": (HONOURED, True),
    "stop_sequences": (HONOURED, ["x"]), "temperature": (HONOURED, 0.5), "top_k": (HONOURED, 5),
    "top_p": (HONOURED, 0.5),
    "tools": (HONOURED, [{"name": "f", "input_schema": SCHEMA}]),
    "output_config": (HONOURED, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    "output_format": (HONOURED, {"type": "json_schema", "schema": SCHEMA}),
    "thinking": (NAMED, {"type": "enabled", "budget_tokens": 2000}),
    "tool_choice": (REFUSED, {"type": "maybe"}),
    "container": (REFUSED, "c"), "mcp_servers": (REFUSED, [{"url": "x"}]),
    "context_management": (HONOURED, CLEARED, {"messages": USED}),
    "metadata": (NO_EFFECT, {"user_id": "u"}), "service_tier": (NO_EFFECT, "auto"),
    "betas": (NO_EFFECT, ["b"]), "speed": (NO_EFFECT, "fast"),
    "cache_control": (NO_EFFECT, {"type": "ephemeral"}),
}  # fmt: skip
OLLAMA_CHAT: Table = {
    **THINKING,
    "parse_special": (HONOURED, True, {"messages": SPELLED}),
    "model": (HONOURED, "other"),
    "messages": (HONOURED, OTHER), "stream": (HONOURED, True), "tools": (HONOURED, [TOOL]),
    "format": (HONOURED, SCHEMA),
    "options": (HONOURED, {"temperature": 0.5}), "keep_alive": (NO_EFFECT, "5m"),
    "an_apps_own": (NAMED, 1),
    "logprobs": (HONOURED, True), "top_logprobs": (HONOURED, 2, {"logprobs": True}),
    "shift": (NAMED, True),
    "truncate": (HONOURED, True, {"messages": LONG}),
    "tool_choice": (HONOURED, "required", {"tools": [TOOL]}),
}  # fmt: skip
OLLAMA_GENERATE: Table = {
    **THINKING,
    "parse_special": (HONOURED, True, {"prompt": SPELLED[0]["content"]}),
    "model": (HONOURED, "other"), "stream": (HONOURED, True),
    "prompt": (HONOURED, "other"), "suffix": (HONOURED, "cd"), "system": (HONOURED, "be kind"),
    "raw": (HONOURED, True),
    "format": (HONOURED, "json"), "options": (HONOURED, {"num_predict": 3}),
    "keep_alive": (NO_EFFECT, 0),
    "logprobs": (HONOURED, True), "top_logprobs": (NAMED, 2), "shift": (NAMED, True),
    # A raw prompt has no older messages to leave out.
    "truncate": (NAMED, True, {"raw": True}),
    "images": (REFUSED, ["aGk="]), "template": (REFUSED, "{{ x }}"), "context": (REFUSED, [1, 2]),
}  # fmt: skip
LLAMACPP: Table = {
    **SAMPLING,
    "prompt": (HONOURED, "other"), "n_predict": (HONOURED, 3), "n_probs": (HONOURED, 2),
    "n": (HONOURED, 2), "n_cmpl": (HONOURED, 2), "max_tokens": (HONOURED, 3),
    "logprobs": (HONOURED, 2),
    "image_data": (REFUSED, [{"data": "x", "id": 1}]),
    "post_sampling_probs": (REFUSED, True), "lora": (REFUSED, [{"id": 0, "scale": 1}]),
    "mirostat": (REFUSED, 2),
    "samplers": (NAMED, ["top_k"]), "return_tokens": (HONOURED, True),
    "response_fields": (HONOURED, ["content"]),
    "min_keep": (NAMED, 1), "id_slot": (NO_EFFECT, 0), "n_keep": (NO_EFFECT, 5),
    "n_discard": (NO_EFFECT, 0),
    "n_indent": (NAMED, 4), **TELEMETRY,
    "t_max_prompt_ms": (NAMED, 500), "service_tier": (HONOURED, "flex"),
}  # fmt: skip
DIALECTS: dict[str, tuple[dict[str, Any], Table]] = {
    "/v1/chat/completions": ({"messages": HI}, CHAT),
    "/v1/completions": ({"prompt": "ab"}, TEXT),
    "/v1/responses": ({"input": "hi"}, RESPONSES),
    "/v1/messages": ({"messages": HI, "max_tokens": 9}, MESSAGES),
    "/api/chat": ({"messages": HI, "stream": False}, OLLAMA_CHAT),
    "/api/generate": ({"prompt": "ab", "stream": False}, OLLAMA_GENERATE),
    "/completion": ({"prompt": "ab"}, LLAMACPP),
}
ROWS = [
    (path, field, *row) for path, (_, table) in DIALECTS.items() for field, row in table.items()
]
TEMPLATE = "{{ a }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
CALLS = "Well.\n" + "".join(
    f'<tool_call>\n{{"name": "f", "arguments": {{"n": {n}}}}}\n</tool_call>\n' for n in (1, 2)
)  # fmt: skip
# Values that differ between replies to the same request.
FRESH = re.compile(
    r'(?<=[-_])[0-9a-f]{24}\b|"created(_at)?": ?("[^"]*"|\d+)|"total_duration": '
    r'?\d+|"completed_at": ?\d+|(?<=_ms": )[0-9.e-]+|(?<=_per_second": )[0-9.e-]+'
)


def scripted() -> ScriptedEngine:
    fim = {"pre": 200, "suf": 201, "mid": 202}
    return ScriptedEngine(
        [CALLS], chat_template=TEMPLATE, fim_tokens=fim, bos_token=BOS, control_texts=("<|turn|>",)
    )


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return scripted()


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine):
    with (
        running_server([ServedModel("tiny", engine), ServedModel("other", scripted())]) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def effect(
    http: httpx.Client, engine: ScriptedEngine, path: str, body: dict[str, Any], field: str
) -> tuple[httpx.Response, Any]:
    """Return the reply to `body` and all observable effects.

    These are the engine's requests, the reply's content, and whether the response is stored. An
    echo of the field itself does not count as an effect.
    """
    engine.requests.clear()
    reply = http.post(path, json=body)
    said: Any = FRESH.sub("", reply.text)
    kept = False
    if path == "/v1/responses" and "json" in reply.headers["content-type"]:
        plain = reply.json()
        kept = http.get(f"{path}/{plain.get('id')}").status_code == 200
        said = {
            k: FRESH.sub("", str(v))
            for k, v in plain.items()
            if k not in (field, "id", "created_at", "completed_at", "reasoning")
        }
    asked = [
        replace(r, id="", generation=replace(r.generation, choices_of="")) for r in engine.requests
    ]
    return reply, (reply.status_code, said, kept, asked)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:3]))
def test_each_field_has_its_documented_effect(
    http: httpx.Client, engine: ScriptedEngine, row: tuple[Any, ...]
) -> None:
    path, field, fate, value = row[:4]
    body = {**DIALECTS[path][0], **(row[4] if len(row) > 4 else {})}
    reply, seen = effect(http, engine, path, {**body, field: value}, field)
    if fate == REFUSED:
        assert reply.status_code in (400, 404), reply.text
        assert field.rstrip("s") in reply.text or "resp_x" in reply.text
        return
    assert reply.status_code == 200, reply.text
    ignored = [
        name.split(".")[0]
        for name in reply.headers.get("x-localllm-ignored", "").split(",")
        if name
    ]
    # A model without reasoning has neither an effort nor a reasoning budget, in any dialect.
    named = {field}
    if "reasoning" in field or "think" in field:
        named |= {"reasoning_effort", "thinking_budget"}
    assert named & set(ignored) if fate == NAMED else not ignored, ignored
    _, without = effect(http, engine, path, body, field)
    assert (seen != without) == (fate == HONOURED)
    # A random difference would look like an effect, so the same request must give the same result.
    assert effect(http, engine, path, {**body, field: value}, field)[1] == seen


@pytest.mark.parametrize("path", DIALECTS)
def test_no_field_is_without_a_row(http: httpx.Client, path: str) -> None:
    """Every field of a dialect's OpenAPI document has a row.

    Without a row the field could be dropped, and no test would fail.
    """
    document = http.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "$ref"
    ]
    fields = document["components"]["schemas"][body.rpartition("/")[2]]["properties"]
    assert set(fields) <= set(DIALECTS[path][1])


def test_a_schema_in_anthropics_dialect_reaches_the_engine() -> None:
    engine = ScriptedEngine(["{}"])
    with running_server({"tiny": engine}) as running:
        body = {
            **DIALECTS["/v1/messages"][0],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        }
        reply = httpx.post(running.url + "/v1/messages", json=body, trust_env=False)
        assert reply.status_code == 200
        assert grammar_of(engine.requests[-1]) == ("json_schema", '{"type": "object"}')
        body["output_config"] = {"format": {"type": "yaml"}}
        reply = httpx.post(running.url + "/v1/messages", json=body, trust_env=False)
        assert (reply.status_code, "json_schema" in reply.text) == (400, True)
