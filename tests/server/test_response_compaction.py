"""Compaction of a conversation into one item, as Codex requests it.

The tests use the path and the trigger, several compactions in a row, and items that this server
did not make.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Request
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.http.accounts import NamedKey, digest_of
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

RESPONSES, COMPACT = "/v1/responses", "/v1/responses/compact"
READ = {
    "type": "function",
    "name": "read_file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
TRIGGER = {"type": "compaction_trigger"}
INSTRUCTIONS = "You repair ships. " * 20
SUMMARY = "The leak is on deck 3. The user wants copper plates."
RECEIPT = re.compile(
    r"(\d+) messages, (\d+) tokens; cost (\d+) prompt tokens \((\d+) cached\), (\d+) output tokens"
)


class Model:
    """A model that answers a request for a summary with one, and other messages with one word."""

    def __init__(self) -> None:
        self.summaries = [SUMMARY]

    def __call__(self, request: Request) -> list[str]:
        asked = str(request.prompt)
        if "replaced by a summary that you write now" in asked:
            return [self.summaries[0]]
        return ["Aye."]


def turn(i: int, size: int = 400) -> list[dict[str, Any]]:
    """A question, a call with a long result, and an answer."""
    call = {"type": "function_call", "call_id": f"c{i}", "name": "read_file"}
    return [
        {"role": "user", "content": f"Look at deck {i}."},
        {**call, "arguments": json.dumps({"path": f"deck{i}.log"})},
        {"type": "function_call_output", "call_id": f"c{i}", "output": f"dry {i} " * size},
        {"role": "assistant", "content": f"Deck {i} is dry."},
    ]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(Model(), n_ctx=60_000)


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server({"m": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def post(http: httpx.Client, given: list[Any], path: str = RESPONSES, **more: Any) -> Any:
    body = {"input": given, "tools": [READ], "instructions": INSTRUCTIONS, **more}
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply


def prompt_of(engine: ScriptedEngine) -> str:
    return str(engine.requests[-1].prompt)


def test_the_path_answers_with_one_item(http: httpx.Client, engine: ScriptedEngine) -> None:
    reply = post(http, [*turn(1), *turn(2)], COMPACT)
    body = reply.json()
    (item,) = body["output"]
    assert (body["object"], item["type"], item["id"][:4]) == (
        "response.compaction",
        "compaction",
        "cmp_",
    )
    assert "deck" not in item["encrypted_content"]
    found = RECEIPT.fullmatch(reply.headers["x-localllm-compacted"])
    assert found is not None
    messages, saved, cost, _, written = map(int, found.groups())
    usage = body["usage"]
    assert (messages, cost, written) == (8, usage["input_tokens"], usage["output_tokens"])
    # A token of this model is a byte, so the two results are most of the conversation.
    assert saved > 2 * len("dry 1 " * 400) * 0.9
    # The prompt lists the tools, so it begins like the prompt of the last answer.
    assert '"read_file"' in prompt_of(engine)
    post(http, [*turn(1), item, {"role": "user", "content": "Go on."}])
    assert "dry 1" not in prompt_of(engine)


def test_the_trigger_streams_one_item(http: httpx.Client) -> None:
    reply = post(http, [*turn(1), TRIGGER], stream=True)
    events = [
        json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")
    ]
    kinds = [event["type"] for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
        "response.completed",
    ]
    done = events[-2]["item"]
    assert events[-1]["response"]["output"] == [done]
    assert (done["type"], done["id"]) == ("compaction", events[3]["item_id"])
    assert SUMMARY not in reply.text
    comment = next(line for line in reply.text.splitlines() if line.startswith(": compacted "))
    assert RECEIPT.fullmatch(comment.removeprefix(": compacted "))


@pytest.mark.parametrize("pruned", [True, False], ids=["only the item", "with the user's messages"])
def test_later_turns_have_the_summary_in_place_of_the_turns(
    http: httpx.Client, engine: ScriptedEngine, pruned: bool
) -> None:
    before = [*turn(1), *turn(2)]
    item = post(http, [*before, TRIGGER]).json()["output"][0]
    users = [one for one in before if one.get("role") == "user"]
    after = [*([] if pruned else users), item, {"role": "user", "content": "Go on."}]
    post(http, after)
    prompt = prompt_of(engine)
    assert prompt.index(INSTRUCTIONS) < prompt.index(SUMMARY) < prompt.index("Go on.")
    assert (prompt.count("Look at deck 1."), prompt.count("Look at deck 2.")) == (1, 1)
    assert 'read_file {"path": "deck1.log"}' in prompt
    assert "dry" not in prompt.replace("is dry", "")
    assert "Deck 1 is dry." not in prompt


def test_three_compactions_in_a_row(http: httpx.Client, engine: ScriptedEngine) -> None:
    """Three compactions in a row, with the history that Codex rebuilds.

    It contains the user's messages, the new item, and then new turns.
    """
    history: list[Any] = []
    model = engine.script
    assert isinstance(model, Model)
    for n in range(3):
        model.summaries = [f"Summary {n}. {SUMMARY}"]
        history += [*turn(3 * n), *turn(3 * n + 1), *turn(3 * n + 2)]
        before = len(prompt_of_answer(http, engine, history))
        item = post(http, [*history, TRIGGER]).json()["output"][0]
        history = [one for one in history if one.get("role") == "user"] + [item]
        prompt = prompt_of_answer(http, engine, history)
        assert len(prompt) < 0.5 * before
        assert f"Summary {n}." in prompt
        assert f"Summary {n - 1}." not in prompt
        assert prompt.count("Earlier messages were replaced") == 1
        # The calls of earlier compactions are still listed, and no question is repeated.
        assert [prompt.count(f"deck{i}.log") for i in range(3 * n + 3)] == [1] * (3 * n + 3)
        assert prompt.count("Look at deck 0.") == 1


def prompt_of_answer(http: httpx.Client, engine: ScriptedEngine, history: list[Any]) -> str:
    post(http, [*history, {"role": "user", "content": "Go on."}])
    return prompt_of(engine)


def test_a_response_that_compacted_is_continued_by_reference(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    for path, given in ((COMPACT, turn(1)), (RESPONSES, [*turn(1), TRIGGER])):
        body = post(http, given, path).json()
        post(http, [{"role": "user", "content": "And?"}], previous_response_id=body["id"])
        assert SUMMARY in prompt_of(engine)
        assert "dry 1" not in prompt_of(engine)


def test_results_make_room_if_the_summary_would_not_fit() -> None:
    engine = ScriptedEngine(Model(), n_ctx=6000)
    with (
        running_server({"m": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as http,
    ):
        assert post(http, [*turn(1), *turn(2), TRIGGER]).json()["output"]
        prompt = prompt_of(engine)
        assert '[The result of read_file {"path": "deck1.log"} was left out]' in prompt
        assert "dry 2 dry 2" in prompt


def test_a_model_without_a_summary_is_an_error(http: httpx.Client, engine: ScriptedEngine) -> None:
    model = engine.script
    assert isinstance(model, Model)
    model.summaries = [" "]
    reply = http.post(COMPACT, json={"input": turn(1)})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_summary")
    nothing = http.post(COMPACT, json={"input": []})
    assert (nothing.status_code, "nothing to compact" in nothing.text) == (400, True)


# --- items of other origin ------------------------------------------------------------------------


def _forged(sealed: str) -> list[Any]:
    head, _, data = sealed.partition(".")
    raw = bytearray(base64.urlsafe_b64decode(data))
    changed = []
    for place in (0, 40, len(raw) - 1):
        other = bytearray(raw)
        other[place] ^= 1
        changed.append(f"{head}.{base64.urlsafe_b64encode(other).decode()}")
    foreign = ["gAAAAABpM0Yj-abc=", "", "localllm-1.", "localllm-1.////", sealed[:-4], None, 7]
    return [*changed, *foreign, sealed + "A" * 2**21]


def test_an_item_of_another_key_or_a_forged_one_is_refused_alike() -> None:
    keys = tuple(NamedKey(name, digest_of(name.encode() * 20)) for name in ("anna", "ben"))
    engine = ScriptedEngine(Model(), n_ctx=60_000)

    def ask(http: httpx.Client, who: str, given: list[Any]) -> httpx.Response:
        headers = {"authorization": f"Bearer {who * 20}"}
        return http.post(RESPONSES, json={"input": given}, headers=headers)

    with (
        running_server({"m": engine}, keys=keys) as running,
        httpx.Client(base_url=running.url, trust_env=False) as http,
    ):
        item = ask(http, "anna", [*turn(1), TRIGGER]).json()["output"][0]
        question = {"role": "user", "content": "Go on."}
        assert ask(http, "anna", [item, question]).status_code == 200
        asked = len(engine.requests)
        refused = [ask(http, "ben", [item, question])]
        for forged in _forged(item["encrypted_content"]):
            refused.append(ask(http, "anna", [{**item, "encrypted_content": forged}, question]))
        assert {reply.status_code for reply in refused} == {400}
        assert len({reply.text for reply in refused}) == 1
        assert len(engine.requests) == asked


# --- on a real model --------------------------------------------------------------------------------


def test_a_real_model_summarises_from_the_cache_of_its_last_answer(few_layers: Path) -> None:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=2048, n_seq_max=2)))
    given = [*turn(1, 60), *turn(2, 60)]
    question = {"role": "user", "content": "Which deck is dry?"}
    with (
        running_server({"m": host}) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        more = {"temperature": 0, "max_output_tokens": 24}
        first = post(http, [*given, question], **more).json()
        answered = [*given, question, *first["output"]]
        compacted = post(http, [*answered, TRIGGER], **more).json()
        usage = compacted["usage"]
        fresh = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
        # Only the end of the last answer and the request for a summary are new.
        assert fresh < 160
        after = post(http, [compacted["output"][0], question], **more).json()["usage"]
        assert after["input_tokens"] < 0.6 * first["usage"]["input_tokens"]
        assert after["input_tokens_details"]["cached_tokens"] > 100  # instructions and tools
