"""Decisions at a real engine.

The state is prefilled once for any number of questions. Probabilities are the model's own, the
order of options has no effect, and temperatures are stored. The API's official client works too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Event, Finish, Generation, Request, Text
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.http.accounts import NamedKey, digest_of
from localllm_backends.contract import LoadSpec
from models.tiny_bert import write_bert
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

PATH = "/v1/systemone"
STATE = {
    "ticket": "I was charged twice for one order. Please send one of the two charges back "
    "today. " * 12
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "refund": {"type": "noul", "instructions": "Does the customer ask for money back?"},
    "team": {
        "type": "choice",
        "instructions": "Whose ticket is it?",
        "criteria": {"billing": "Payments", "bugs": {"about": "faults"}, "accounts": None},
    },
    "urgency": {"type": "score", "criteria": ["can wait", "this week", "today"]},
}


@pytest.fixture(scope="module")
def supervisor(few_layers: Path) -> Supervisor:
    return Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=4096, n_seq_max=4)))


@pytest.fixture(scope="module")
def server(supervisor: Supervisor) -> Iterator[Running]:
    with running_server({"small": supervisor}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=120) as client:
        yield client


def decide(http: httpx.Client, **body: Any) -> dict[str, Any]:
    r = http.post(PATH, json={"state": STATE, "questions": QUESTIONS, **body})
    assert r.status_code == 200, r.text
    found: dict[str, Any] = r.json()
    return found


def prefilled(http: httpx.Client) -> int:
    found = re.search(
        r"^localllm_prefilled_tokens_total\{.*\} (\d+)$", http.get("/metrics").text, re.MULTILINE
    )
    assert found is not None
    return int(found[1])


def test_any_number_of_questions_costs_one_prefill_of_the_state(http: httpx.Client) -> None:
    http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    )
    state = "A long report of what went wrong. " * 60
    size = len(http.post("/tokenize", json={"content": state}).json()["tokens"])
    before = prefilled(http)
    questions = {
        f"q{i}": {"type": "noul", "instructions": f"Is it about matter {i}?"} for i in range(12)
    }
    first = decide(http, state=state, questions=questions)["usage"]
    spent = prefilled(http) - before
    # The usage equals the tokens computed: the state once, and a line or two for each question.
    known = first["input_tokens_details"]["cached_tokens"]  # the template's own system prompt
    assert first["input_tokens_details"] == {"cached_tokens": known, "prefilled_tokens": spent}
    assert first["input_tokens"] == known + spent
    assert known < 40
    assert size < spent < size + 12 * 80
    assert first["output_tokens"] == 12
    more = {f"r{i}": {"type": "noul", "instructions": f"Is it number {i}?"} for i in range(12)}
    before = prefilled(http)
    again = decide(http, state=state, questions=more)["usage"]
    assert prefilled(http) - before == again["input_tokens_details"]["prefilled_tokens"] < 12 * 80
    assert again["input_tokens_details"]["cached_tokens"] >= size


def test_answers_have_the_form_of_their_question(http: httpx.Client) -> None:
    body = decide(http)
    assert body.keys() == {"model", "answers", "temperature", "usage"}
    assert list(body["answers"]) == list(QUESTIONS)
    refund, team, urgency = body["answers"].values()
    assert refund.keys() == {"type", "noul"}
    assert 0 < refund["noul"] < 1
    assert list(team["probabilities"]) == ["billing", "bugs", "accounts"]
    assert team["probabilities"][team["choice"]] == max(team["probabilities"].values())
    assert sum(team["probabilities"].values()) == pytest.approx(1)
    assert team["confidence"] == pytest.approx((max(team["probabilities"].values()) - 1 / 3) * 1.5)
    assert urgency["legend"] == {"0": "can wait", "1": "this week", "2": "today"}
    expected = urgency["probabilities"]["1"] + 2 * urgency["probabilities"]["2"]
    assert urgency["score"] == pytest.approx(expected)
    assert 0 <= urgency["confidence"] <= 1
    # A single option has probability 1.
    one = decide(http, questions={"a": {"type": "score", "criteria": ["so"]}})["answers"]["a"]
    assert (one["score"], one["confidence"], one["probabilities"]) == (0, 1, {"0": 1})


def test_with_all_orders_the_order_of_the_options_does_not_matter(
    http: httpx.Client,
) -> None:
    names = ["billing", "bugs", "accounts"]
    turned = [names[i:] + names[:i] for i in range(3)]
    found = []
    for order in turned:
        question = {
            "type": "choice",
            "instructions": "Whose is it?",
            "criteria": dict.fromkeys(order),
        }
        answers = decide(http, questions={"a": question}, orders=8)
        found.append(answers["answers"]["a"]["probabilities"])
        assert answers["usage"]["output_tokens"] == 3
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=0.02)
    alone = {"type": "choice", "instructions": "Whose is it?", "criteria": dict.fromkeys(turned[1])}
    once = decide(http, questions={"a": alone})["answers"]["a"]["probabilities"]
    assert once != pytest.approx(found[0], abs=0.02)


def test_the_engine_returns_the_log_probability_of_any_requested_token(few_layers: Path) -> None:
    async def top(supervisor: Supervisor, generation: Generation) -> list[tuple[int, float]]:
        engine = await supervisor.engine()
        heard: list[Event] = []
        end = await engine.listen(
            Request("r", "The capital of France is", generation), heard.append
        )
        assert isinstance(end, Finish)
        told = [p for e in heard if isinstance(e, Text) for p in e.logprobs]
        return [(token, p) for _, token, p in told[0].top]

    async def both() -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=256)))
        try:
            likeliest = await top(supervisor, Generation(max_tokens=1, logprobs=9))
            by_name = tuple(token for token, _ in likeliest[::-1])
            named = await top(supervisor, Generation(max_tokens=1, logprobs=0, logprobs_of=by_name))
        finally:
            await supervisor.close()
        return likeliest, named[::-1]

    likeliest, named = asyncio.run(both())
    assert len(likeliest) == 9
    assert [t for t, _ in named] == [t for t, _ in likeliest]
    assert [p for _, p in named] == pytest.approx([p for _, p in likeliest], abs=0.05)


def test_a_temperature_is_fitted_kept_and_can_be_overruled(http: httpx.Client) -> None:
    before = decide(http)
    assert before["temperature"] == 1
    # Half of the example answers are labelled wrong, so the fitted temperature flattens the
    # probabilities.
    examples = [
        {"state": f"Letter {i}.",
        "questions": {"a": {"type": "noul", "instructions": "Is it true?"}},
        "answers": {"a": i % 2 == 0}}
        for i in range(40)
    ]  # fmt: skip
    fitted = http.post(f"{PATH}/fit", json={"examples": examples})
    assert fitted.status_code == 200, fitted.text
    said = fitted.json()
    assert (said["examples"], said["model"]) == (40, "small")
    assert said["temperature"] > 1.02
    assert said["loss_nats"]["after"] < said["loss_nats"]["before"]
    after = decide(http)
    assert after["temperature"] == said["temperature"]
    sharp, flat = (
        decide(http, temperature=t)["answers"]["team"]["confidence"] for t in (0.01, 100)
    )
    assert sharp > 0.9
    assert flat < 0.1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"state": None}, "state"),
        ({"questions": {}}, "questions"),
        ({"questions": {"a": {"type": "box"}}}, "questions.a"),
        ({"questions": {"a": {"type": "choice", "criteria": {}}}}, "questions.a.criteria"),
        ({"questions": {"a": {"type": "score", "criteria": {"a": "b"}}}}, "questions.a.criteria"),
        (
            {"questions": {"a": {"type": "noul", "criteria": {"maybe": "x"}}}},
            "questions.a.criteria.maybe",
        ),
        ({"orders": 0}, "orders"),
        ({"temperature": 0}, "temperature"),
        ({"stream": True}, "stream"),
        ({"assets": {"a": {"type": "image"}}}, "assets"),
    ],
)
def test_what_can_not_be_asked_is_refused_by_its_name(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    r = http.post(PATH, json={"state": STATE, "questions": QUESTIONS, **change})
    assert (r.status_code, r.json()["error"]["param"]) == (400, param)


def test_a_model_that_cannot_decide_is_answered_with_501(tmp_path: Path) -> None:
    # A byte tokenizer has no label of one token after a space. An embedding model has no next
    # token.
    from localllm.server.models.router import ServedModel

    embedder = Supervisor(
        WorkerOptions(LoadSpec(path=str(write_bert(tmp_path / "embed.gguf")), n_ctx=64))
    )
    models = [
        ServedModel("bytes", ScriptedEngine()),
        ServedModel("embedder", embedder, embeds=True),
    ]
    with (
        running_server(models) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        for name, why in (("bytes", "labels"), ("embedder", "embeds")):
            r = http.post(PATH, json={"model": name, "state": "x", "questions": QUESTIONS})
            assert (r.status_code, r.json()["error"]["code"]) == (501, "not_implemented")
            assert why in r.json()["error"]["message"]
        picture = http.post(PATH, json={"state": "x", "questions": QUESTIONS, "images": ["aGk="]})
        assert (picture.status_code, picture.json()["error"]["param"]) == (501, "images")


def test_a_key_with_a_name_asks_but_does_not_fit() -> None:
    keys = (NamedKey("guest", digest_of(b"guest-key-of-some-length")),)
    shown = {"authorization": "Bearer guest-key-of-some-length"}
    with (
        running_server(
            {"bytes": ScriptedEngine()}, api_key="owner-key-of-some-length", keys=keys
        ) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60, headers=shown) as http,
    ):
        example = {"state": "x", "questions": {"a": {"type": "noul"}}, "answers": {"a": True}}
        assert http.post(f"{PATH}/fit", json={"examples": [example]}).status_code == 403
        assert (
            http.post(PATH, json={"state": "x", "questions": example["questions"]}).status_code
            == 501
        )


def test_the_official_client_works(server: Running) -> None:
    sdk = pytest.importorskip(
        "typesafe_sdk", reason="TypeSafe's own client: pip install typesafe-sdk"
    )
    with sdk.TypeSafeClient(api_key="none", base_url=server.url, model="small") as client:
        found = client.system_one(
            STATE,
            {
                "refund": sdk.Noul(instructions="Does the customer ask for money back?"),
                "team": sdk.Choice(
                    instructions="Whose is it?", criteria={"billing": None, "bugs": "Faults"}
                ),
                "urgency": sdk.Score(instructions="How urgent?", criteria=["can wait", "today"]),
            },
        )
        assert 0 < found.nouls["refund"].noul < 1
        assert found.choices["team"].choice in ("billing", "bugs")
        assert sum(found.scores["urgency"].probabilities.values()) == pytest.approx(1)
        assert found.scores["urgency"].legend == {0: "can wait", 1: "today"}
        assert found.usage.output_tokens == 3
        with pytest.raises(sdk.TypeSafeNotFoundError, match="nosuch"):
            client.system_one("x", {"a": sdk.Noul(instructions="Is it?")}, model="nosuch")
