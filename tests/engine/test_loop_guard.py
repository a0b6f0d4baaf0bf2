"""The loop guard ends periodic output at the token that completes the pattern, and ends no other
output."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.messages import LoopLimits
from localllm.engine.request import LoopGuard
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.examples import examples
from support.http_server import running_server


def ends_at(tokens: list[int], limits: LoopLimits) -> int | None:
    guard = LoopGuard(limits)
    return next((i for i, token in enumerate(tokens) if guard.loops(token)), None)


def read_slowly(tokens: list[int], limits: LoopLimits) -> int | None:
    for end in range(1, len(tokens) + 1):
        for size in range(limits.min_pattern_size, limits.max_pattern_size + 1):
            whole = size * limits.min_count
            if (
                whole <= end
                and tokens[end - whole : end] == tokens[end - size : end] * limits.min_count
            ):
                return end - 1
    return None


@settings(max_examples=examples(300))
@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.builds(LoopLimits, st.integers(4, 9), st.integers(1, 4), st.integers(2, 5)),
)
def test_the_loop_guard_equals_its_definition(tokens: list[int], limits: LoopLimits) -> None:
    assert ends_at(tokens, limits) == read_slowly(tokens, limits)


@pytest.fixture(scope="module")
def url(few_layers: Path):
    supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=2048, n_seq_max=2)))
    with running_server({"smollm2": supervisor}) as running:
        yield running.url


LOOPING = {
    "prompt": "Once upon a time there was",
    "temperature": 0,
    "max_tokens": 400,
    "ignore_eos": True,
}
LIMITS = {"repetition_detection": {"max_pattern_size": 64, "min_pattern_size": 4, "min_count": 3}}


def test_a_models_loop_ends_with_the_finish_reason_repetition(url: str) -> None:
    def ask(**more: object) -> dict[str, object]:
        return httpx.post(
            url + "/v1/completions", json={**LOOPING, **more}, timeout=120, trust_env=False
        ).json()["choices"][0]

    loose, held = ask(), ask(**LIMITS)
    assert (loose["finish_reason"], held["finish_reason"]) == ("length", "repetition")
    assert len(str(held["text"])) < len(str(loose["text"])) / 2
    assert str(loose["text"]).startswith(str(held["text"]))
    body = {**LOOPING, **LIMITS, "n_predict": 400}
    native = httpx.post(url + "/completion", json=body, timeout=120, trust_env=False).json()
    assert native["stop_type"] == "repetition"
