"""Stop texts and the model's own markers, in reasoning, prose and code.

The tests cover every format of calls and each chat dialect, with and without streaming.

A stop text counts only in the answer. A marker of the reasoning counts only at the beginning of
the answer. Everywhere else it is text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from conversation.call_templates import TEMPLATES
from localllm.conversation.tools import format_for, reasoning_markers
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

STOP = "STOPX"
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
# For formats that mark reasoning and answer: the texts before the reasoning's marker, before the
# answer, and after it.
FRAMES = {
    "harmony": ("", "<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
    "muse": ("", "<|start|>assistant to=user<|message|>", "<|eot|>"),
    "kimi_k3": ("", "<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    "cohere": ("", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
}


@dataclass(frozen=True)
class Model:
    """A format, and its markers of reasoning."""

    template: str
    opening: str
    closing: str
    marks_all: bool
    frame: tuple[str, str, str]

    def reply(self, reasoning: str, answer: str) -> str:
        """Return a reply with reasoning, as a model of this format writes it."""
        before, between, after = self.frame
        return f"{before}{self.opening}{reasoning}{self.closing}{between}{answer}{after}"


def model(name: str) -> Model:
    template = TEMPLATES[name]
    if reasoning_markers(template) is None:
        template += "{# <think> </think> #}"
    markers = reasoning_markers(template)
    assert markers is not None
    style = format_for(template)
    opening = markers[0]
    if style.header:
        template += f"{{% if add_generation_prompt %}}{style.header}{{% endif %}}"
        opening = opening.removeprefix(style.header)
    frame = FRAMES.get(name, ("", "\n\n", ""))
    return Model(template, opening, markers[1], bool(style.drops), frame)


MODELS = {name: model(name) for name in TEMPLATES}


@pytest.fixture(scope="module")
def engines() -> dict[str, ScriptedEngine]:
    return {n: ScriptedEngine(chat_template=m.template) for n, m in MODELS.items()}


@pytest.fixture(scope="module")
def server(engines: dict[str, ScriptedEngine]) -> Iterator[Running]:
    with running_server(dict(engines)) as running:
        yield running


PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}


def body(dialect: str, name: str, stops: list[str], tools: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
    function: dict[str, Any] = {"type": "function", "function": TOOL}
    if dialect == "responses":
        asked = {"model": name, "input": "Hi", "stop": stops}
        function = {"type": "function", **TOOL}
    elif dialect == "messages":
        asked |= {"max_tokens": 900, "stop_sequences": stops}
        function = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
    elif dialect == "ollama":
        asked["options"] = {"stop": stops}
    else:
        asked["stop"] = stops
    if tools:
        asked["tools"] = [function]
    return asked


def read_chat(objects: list[dict[str, Any]]) -> tuple[str, str]:
    choices = [choice for o in objects for choice in o["choices"]]
    parts = [c["delta"] if "delta" in c else c["message"] for c in choices]
    answer = "".join(p.get("content") or "" for p in parts)
    return answer, "".join(p.get("reasoning_content") or "" for p in parts)


def read_messages(objects: list[dict[str, Any]]) -> tuple[str, str]:
    parts = [o["delta"] for o in objects if o.get("type") == "content_block_delta"]
    parts += [part for o in objects for part in o.get("content", ())]
    answer = "".join(p.get("text", "") for p in parts)
    return answer, "".join(p.get("thinking", "") for p in parts)


def read_responses(objects: list[dict[str, Any]]) -> tuple[str, str]:
    ended = [o.get("response", o) for o in objects][-1]
    answer = reasoning = ""
    for item in ended["output"]:
        for part in (*item.get("content", ()), *item.get("summary", ())):
            if item["type"] == "reasoning":
                reasoning += part["text"]
            else:
                answer += part["text"]
    return answer, reasoning


def read_ollama(objects: list[dict[str, Any]]) -> tuple[str, str]:
    parts = [o["message"] for o in objects]
    answer = "".join(p.get("content", "") for p in parts)
    return answer, "".join(p.get("thinking") or "" for p in parts)


READERS = {
    "chat": read_chat,
    "messages": read_messages,
    "responses": read_responses,
    "ollama": read_ollama,
}


def ask(server: Running, dialect: str, asked: dict[str, Any], stream: bool) -> tuple[str, str]:
    """Return the answer and the reasoning."""
    sent = {**asked, "stream": stream}
    reply = httpx.post(server.url + PATHS[dialect], json=sent, trust_env=False, timeout=60)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    return READERS[dialect](objects)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("name", MODELS)
def test_stop_texts_and_markers_apply_only_in_the_right_places(
    server: Running, engines: dict[str, ScriptedEngine], name: str, dialect: str, stream: bool
) -> None:
    m = MODELS[name]
    engine = engines[name]
    quoted = f"Use the `{m.opening}` tag to open it and `{m.closing}` to close it."
    fenced = f"As code:\n\n```\n{m.opening}\nthought\n{m.closing}\n```\nThat is all."
    cases = [
        (m.reply(f"alpha {STOP} beta", f"answer {STOP} more"), "answer", f"alpha {STOP} beta"),
        (m.reply("one\ntwo", "three\nfour"), "three\nfour", "one\ntwo"),
    ]
    if not m.marks_all:
        cases += [
            (f"answer {STOP} more", "answer", ""),
            (quoted, quoted, ""),
            (fenced, fenced, ""),
            (m.reply("why", quoted), quoted, "why"),
            (m.reply("why", f"{fenced} {STOP}"), fenced, "why"),
        ]
    for tools in (False, True):
        for text, answer, reasoning in cases:
            engine.script = list(text)
            got = ask(server, dialect, body(dialect, name, [STOP], tools), stream)
            assert (got[0].strip(), got[1].strip()) == (answer, reasoning), (tools, text)


@pytest.mark.parametrize(
    "name", [n for n, m in MODELS.items() if not format_for(m.template).control]
)
def test_a_quoted_marker_of_a_call_is_text(
    server: Running, engines: dict[str, ScriptedEngine], name: str
) -> None:
    for marker in format_for(MODELS[name].template).markers:
        text = f"It writes `{marker}` and then the call."
        engines[name].script = list(text)
        for stream in (False, True):
            assert ask(server, "chat", body("chat", name, [], True), stream) == (text, "")


def test_a_white_space_stop_does_not_match_the_space_after_the_reasoning(
    server: Running, engines: dict[str, ScriptedEngine]
) -> None:
    m = MODELS["hermes"]
    engines["hermes"].script = list(m.reply("one\n\ntwo", "three\n\nfour"))
    for stream in (False, True):
        got = ask(server, "chat", body("chat", "hermes", ["\n\n"], False), stream)
        assert got == ("three", "one\n\ntwo")


def test_a_stop_that_begins_like_the_markers_leaves_them_alone(
    server: Running, engines: dict[str, ScriptedEngine]
) -> None:
    m = MODELS["hermes"]
    engines["hermes"].script = list(m.reply("a < b", "a < b"))
    for stream in (False, True):
        got = ask(server, "chat", body("chat", "hermes", ["<"], False), stream)
        assert (got[0].strip(), got[1]) == ("a", "a < b")
