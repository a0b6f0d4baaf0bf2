"""Anthropic's compaction.

The model's summary is a block before the answer, in streams and in complete replies. Later turns
continue from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from localllm.engine.messages import Request
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
COMPACT = "compact_20260112"
BETA = "compact-2026-01-12"
SYSTEM = "You repair ships. " * 20
SUMMARY = "The leak is on deck 3. The user wants copper plates."
TOOLS = [{"name": "read_file", "input_schema": {"type": "object"}}]
GO_ON = {"role": "user", "content": "Go on."}


class Model:
    """A model that writes a summary when it is asked for one, and otherwise one word."""

    def __init__(self) -> None:
        self.summary = SUMMARY

    def __call__(self, request: Request) -> list[str]:
        if "replaced by a summary that you write now" in str(request.prompt):
            return [self.summary]
        return ["Aye."]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def engine(model: Model) -> ScriptedEngine:
    return ScriptedEngine(model, n_ctx=60_000)


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server({"m": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def turn(i: int, size: int = 400) -> list[dict[str, Any]]:
    """A question, a call with a long result, and an answer."""
    call = {"type": "tool_use", "id": f"c{i}", "name": "read_file"}
    result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": f"dry {i} " * size}
    return [
        {"role": "user", "content": f"Look at deck {i}."},
        {"role": "assistant", "content": [{**call, "input": {"path": f"deck{i}.log"}}]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": f"Deck {i} is dry."},
    ]


def edit(tokens: int = 5000, **more: Any) -> dict[str, Any]:
    return {"type": COMPACT, "trigger": {"type": "input_tokens", "value": tokens}, **more}


def body(messages: list[dict[str, Any]], *edits: dict[str, Any], **more: Any) -> dict[str, Any]:
    managed = {"context_management": {"edits": list(edits)}} if edits else {}
    sent = {"messages": messages, "system": SYSTEM, "tools": TOOLS, "max_tokens": 64}
    return {**sent, **managed, **more}


def asked(http: httpx.Client, *args: Any, **more: Any) -> dict[str, Any]:
    reply = http.post(MESSAGES, json=body(*args, **more))
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def prompt_of(engine: ScriptedEngine) -> str:
    return str(engine.requests[-1].prompt)


LONG = [*turn(1), *turn(2), GO_ON]


def test_the_compaction_block_is_before_the_answer(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    answer = asked(http, LONG, edit())
    block, text = answer["content"]
    assert (block["type"], text["text"], answer["stop_reason"]) == (
        "compaction",
        "Aye.",
        "end_turn",
    )
    summary, prompt = (str(request.prompt) for request in engine.requests)
    assert "dry 2 dry 2" in summary
    assert block["content"] in prompt
    assert SYSTEM in prompt
    assert SUMMARY in block["content"]
    assert "dry 1" not in prompt
    # Compaction keeps the user's messages and the calls, whatever the model writes.
    assert all(
        said in block["content"] for said in ("Look at deck 1.", "Look at deck 2.", "Go on.")
    )
    assert 'read_file {"path": "deck1.log"}' in block["content"]


def test_the_totals_leave_the_summary_out(http: httpx.Client, engine: ScriptedEngine) -> None:
    usage = asked(http, LONG, edit())["usage"]
    made, message = usage["iterations"]
    assert (made["type"], message["type"], message["model"]) == ("compaction", "message", "m")
    counts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    assert [message[name] for name in counts] == [usage[name] for name in counts]
    # A token of this model is a byte.
    assert made["input_tokens"] > 2 * len("dry 1 " * 400) > message["input_tokens"]
    assert made["output_tokens"] > 0


def test_later_turns_begin_with_the_block(http: httpx.Client, engine: ScriptedEngine) -> None:
    answer = asked(http, LONG, edit())
    read = prompt_of(engine)
    said = {"role": "assistant", "content": answer["content"]}
    second = asked(http, [*LONG, said, {"role": "user", "content": "And then?"}], edit())
    assert len(engine.requests) == 3, "the conversation is short now"
    assert prompt_of(engine).startswith(read + "Aye.")
    assert [part["type"] for part in second["content"]] == ["text"]
    assert "iterations" not in second["usage"]


def test_only_the_last_block_counts(http: httpx.Client, engine: ScriptedEngine) -> None:
    blocks = [{"type": "compaction", "content": f"Summary {i}."} for i in range(3)]
    parts = [blocks[1], {"type": "text", "text": "lost"}, blocks[2], {"type": "text", "text": "b"}]
    early = {"role": "assistant", "content": [blocks[0]]}
    asked(http, [*turn(1), early, GO_ON, {"role": "assistant", "content": parts}, GO_ON])
    prompt = prompt_of(engine)
    assert [f"Summary {i}." in prompt for i in range(3)] == [False, False, True]
    assert ("lost" in prompt, prompt.count("Go on.")) == (False, 1)


def events(text: str) -> list[dict[str, Any]]:
    lines = (line for line in text.splitlines() if line.startswith("data: {"))
    found = [json.loads(line[6:]) for line in lines]
    return [event for event in found if event["type"] != "ping"]


@pytest.mark.parametrize("pauses", [False, True])
def test_a_stream_has_the_block_in_one_piece(http: httpx.Client, pauses: bool) -> None:
    stream = http.post(MESSAGES, json=body(LONG, edit(pause_after_compaction=pauses), stream=True))
    got = events(stream.text)
    kinds = [event["type"] for event in got]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    answer = [] if pauses else block
    assert kinds == ["message_start", *block, *answer, "message_delta", "message_stop"]
    empty = {"type": "compaction", "content": None, "encrypted_content": None}
    assert (got[1]["index"], got[1]["content_block"]) == (0, empty)
    assert got[2]["delta"]["type"] == "compaction_delta"
    assert SUMMARY in got[2]["delta"]["content"]
    ended = got[-2]
    assert ended["delta"]["stop_reason"] == ("compaction" if pauses else "end_turn")
    made = [one["type"] for one in ended["usage"]["iterations"]]
    assert made == ["compaction"] if pauses else ["compaction", "message"]


def test_a_pause_leaves_the_answer_to_the_next_request(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    answer = asked(http, LONG, edit(pause_after_compaction=True))
    (block,) = answer["content"]
    assert (answer["stop_reason"], len(engine.requests)) == ("compaction", 1)
    assert answer["usage"]["output_tokens"] == 0
    paused = [*LONG, {"role": "assistant", "content": [block]}]
    assert asked(http, paused, edit())["content"][0]["text"] == "Aye."
    assert block["content"] in prompt_of(engine)
    kept = [*paused, {"role": "user", "content": "Deck 9 first."}]
    asked(http, kept, edit())
    assert prompt_of(engine).index(SUMMARY) < prompt_of(engine).index("Deck 9 first.")
    assert "dry 1" not in prompt_of(engine)


@pytest.mark.parametrize("streams", [False, True])
def test_the_sdk_reads_and_returns_the_block(
    http: httpx.Client, engine: ScriptedEngine, streams: bool
) -> None:
    client = anthropic.Anthropic(base_url=str(http.base_url), api_key="none")
    sent: dict[str, Any] = {**body(LONG, edit()), "model": "m", "betas": [BETA]}
    if streams:
        with client.beta.messages.stream(**sent) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.beta.messages.create(**sent)
    block, text = answer.content
    assert isinstance(block, anthropic.types.beta.BetaCompactionBlock)
    assert block.content is not None
    assert (SUMMARY in block.content, text.text) == (True, "Aye.")
    assert answer.usage.iterations[0].type == "compaction"
    said = {"role": "assistant", "content": answer.content}
    sent["messages"] = [*LONG, said, GO_ON]
    client.beta.messages.create(**sent)
    assert block.content in prompt_of(engine)
    assert "dry 1" not in prompt_of(engine)


def test_a_second_compaction_keeps_what_the_first_kept(
    http: httpx.Client, engine: ScriptedEngine, model: Model
) -> None:
    first = asked(http, LONG, edit())["content"]
    model.summary = "Deck 4 leaks too."
    said = {"role": "assistant", "content": first}
    answer = asked(http, [*LONG, said, *turn(3), *turn(4), GO_ON], edit())
    content = answer["content"][0]["content"]
    assert (SUMMARY in content, model.summary in content) == (False, True)
    assert [content.count(f"deck{i}.log") for i in range(1, 5)] == [1] * 4
    assert [content.count(f"Look at deck {i}.") for i in range(1, 5)] == [1] * 4


@pytest.mark.parametrize("sealed", ["localllm-1.////", "gAAAAABpM0Yj-abc=", None, 7])
def test_a_block_of_another_server_is_a_plain_text(
    http: httpx.Client, engine: ScriptedEngine, sealed: Any
) -> None:
    block = {"type": "compaction", "content": "We met on deck 7.", "encrypted_content": sealed}
    talk = [{"role": "assistant", "content": [block]}, *turn(3), *turn(4), GO_ON]
    content = asked(http, talk, edit())["content"][0]["content"]
    assert "We met on deck 7." in str(engine.requests[0].prompt)
    assert "deck 7" not in content, "the model summarised it"


def test_below_the_trigger_nothing_is_compacted(http: httpx.Client, engine: ScriptedEngine) -> None:
    for edits in ([], [edit(9000)], [{"type": COMPACT}], [{"type": COMPACT, "trigger": None}]):
        answer = asked(http, LONG, *edits)
        assert [part["type"] for part in answer["content"]] == ["text"]
    assert len(engine.requests) == 4


def test_counting_tokens_makes_no_compaction(http: httpx.Client, engine: ScriptedEngine) -> None:
    counted = http.post(COUNT, json=body(LONG, edit())).json()["input_tokens"]
    assert counted > 5000
    block = asked(http, LONG, edit())["content"][0]
    after = [*LONG, {"role": "assistant", "content": [block]}]
    assert http.post(COUNT, json=body(after, edit())).json()["input_tokens"] < 2500
    assert len(engine.requests) == 2


def test_no_compaction_if_clearing_tool_results_is_enough(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    uses = {"type": "tool_uses", "value": 0}
    clear = {"type": "clear_tool_uses_20250919", "trigger": uses, "keep": uses}
    answer = asked(http, LONG, clear, edit())
    assert [part["type"] for part in answer["content"]] == ["text"]
    assert answer["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 2


def test_instructions_replace_the_description_of_the_summary(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    asked(http, LONG, edit())
    usual = str(engine.requests[0].prompt)
    asked(http, LONG, edit(instructions="Write only the numbers of the decks."))
    own = str(engine.requests[2].prompt)
    assert "Write only the numbers of the decks." in own
    assert ("lasting facts" in usual, "lasting facts" in own) == (True, False)


def test_a_context_smaller_than_the_trigger_is_compacted_before_it_is_full() -> None:
    engine = ScriptedEngine(Model(), n_ctx=6000)
    with (
        running_server({"m": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as http,
    ):
        whole = [*turn(1), *turn(2), *turn(3), GO_ON]
        assert http.post(MESSAGES, json=body(whole)).status_code == 400
        answer = asked(http, whole, {"type": COMPACT})
        assert [part["type"] for part in answer["content"]] == ["compaction", "text"]


def test_a_model_without_a_summary_changes_nothing(
    http: httpx.Client, engine: ScriptedEngine, model: Model
) -> None:
    model.summary = " "
    block, text = asked(http, LONG, edit())["content"]
    empty = {"type": "compaction", "content": None, "encrypted_content": None}
    assert (block, text["text"]) == (empty, "Aye.")
    said = {"role": "assistant", "content": [block, text]}
    asked(http, [*LONG, said, GO_ON])
    assert "dry 1" in prompt_of(engine)


def test_wrong_values_are_refused_with_their_place(http: httpx.Client) -> None:
    empty = {"role": "assistant", "content": [{"type": "compaction", "content": ""}]}
    uses = {"type": COMPACT, "trigger": {"type": "tool_uses", "value": 3}}
    cases = [
        (body([*LONG, empty, GO_ON]), "messages[9].content[0].content"),
        (body(LONG, uses), "context_management.edits.trigger.type"),
    ]
    for sent, place in cases:
        reply = http.post(MESSAGES, json=sent)
        assert (reply.status_code, place in reply.text) == (400, True)


def test_a_real_model_reads_its_conversation_from_the_cache(few_layers: Path) -> None:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=4096, n_seq_max=2)))
    talk = [*turn(1, 60), *turn(2, 60)]
    with (
        running_server({"m": host}) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=120) as http,
    ):
        asked(http, talk[:-1], temperature=0)
        answer = asked(http, [*talk, GO_ON], edit(300), temperature=0)
        made, message = answer["usage"]["iterations"]
        said = {"role": "assistant", "content": answer["content"]}
        later = asked(http, [*talk, GO_ON, said, GO_ON], edit(4000), temperature=0)["usage"]
    total = made["input_tokens"] + made["cache_read_input_tokens"]
    assert made["cache_read_input_tokens"] > 0.7 * total
    assert message["input_tokens"] + message["cache_read_input_tokens"] < total
    assert answer["content"][0]["content"] is not None
    assert later["cache_read_input_tokens"] > 0.7 * message["input_tokens"]
