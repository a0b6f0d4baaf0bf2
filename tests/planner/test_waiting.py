"""Time to an answer: reasoning counts, and a prompt that takes minutes is too slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.device.name_lookup import resolve
from localllm.device.types import Device, Figure, Memory
from localllm.planner import scoring
from localllm.planner.plan import plan_for
from localllm.planner.recommend import recommend
from localllm.planner.scoring import score
from localllm.planner.types import Workload
from localllm_catalog import catalog

BY_ID = catalog.load().by_id
CHAT = scoring.NEEDS["chat"]


def test_a_thinking_model_answers_later_than_its_twin_that_does_not_think() -> None:
    device, model = resolve("M4 Pro 48GB"), BY_ID["qwen3.8-27b"]
    assert model.reasoning_kind != "none"
    silent = replace(model, reasoning_kind="none")
    thinks, answers = (plan_for(device, m, m.variants[0], Workload()) for m in (model, silent))
    thoughts_s = CHAT.thinking_tokens / thinks.decode_tok_s.value
    assert scoring.answer_s(thinks, CHAT) - scoring.answer_s(answers, CHAT) == pytest.approx(
        thoughts_s
    )
    assert score(thinks, CHAT) < score(answers, CHAT)
    said = scoring.sentence(thinks, CHAT)
    assert said is not None
    assert "600 tokens (assumed)" in said
    assert scoring.sentence(answers, CHAT) is None


def test_a_model_that_prefills_an_agents_prompt_for_many_minutes_is_not_offered() -> None:
    pool = Memory(64 << 30, 62 << 30, 60 << 30, "given")
    slow = Device(
        "a server", "system", "cpu", "server", pool, Figure(200.0, "given"), n_cpu_cores=4
    )
    models = [BY_ID[name] for name in ("qwen3.6-35b-a3b", "qwen3-4b-instruct-2507")]
    answer = recommend(slow, models, Workload("coding"))
    longest = scoring.NEEDS["coding"].ttft_longest_s
    assert all(plan.ttft_s.value <= longest for plan in answer.plans)
    refused = [r for r in answer.rejected if "first token of 16,384" in r.reason]
    assert refused
    assert all(r.kind == "speed" and "5.0 min at most" in r.reason for r in refused)
