"""When an answer may end, and when its reasoning must end: min_tokens, stop_token_ids, thinking
budget."""

from __future__ import annotations

import pytest

from engine.drive import GREEDY, Outcome, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Sampling, ThinkingLimit
from support.requests import request_for
from support.scripted_backend import END, ScriptedBackend

PROMPT = "say something "
DRAFTS = pytest.mark.parametrize("draft", ["off", "ngram"])


def answer(
    draft: str = "off", sampling: Sampling = GREEDY, max_tokens: int = 80, **more: object
) -> Outcome:
    """Run one request. With drafts, the prediction is the answer without drafts, so nearly all
    drafts are accepted."""
    if draft != "off":
        more["prediction"] = answer("off", sampling, max_tokens, **more).text["r"] + " "
    engine = Engine(ScriptedBackend(n_ctx=1024), EngineSettings(draft=draft))
    engine.speculator.cost.set({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0})
    request = request_for("r", PROMPT, max_tokens, sampling, **more)
    outcome = run(engine, request)
    engine.close()
    return outcome


def a_seed_that_ends_soon() -> Sampling:
    hot = [Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=s) for s in range(200)]
    return next(s for s in hot if answer(sampling=s).finish("r").usage.completion_tokens < 30)


@DRAFTS
def test_an_answer_does_not_end_before_min_tokens(draft: str) -> None:
    sampling = a_seed_that_ends_soon()
    early = answer(draft, sampling).finish("r")
    assert early.reason == "stop"
    late = answer(draft, sampling, min_tokens=60)
    assert late.finish("r").usage.completion_tokens >= 60
    assert END not in late.tokens["r"][:60]


@DRAFTS
@pytest.mark.parametrize("hot", [False, True], ids=["greedy", "drawn"])
def test_an_ignored_end_token_is_never_generated(draft: str, hot: bool) -> None:
    """As in llama.cpp's server: tokens that end a turn have no text, and later tokens would belong
    to another turn."""
    sampling = a_seed_that_ends_soon() if hot else GREEDY
    outcome = answer(draft, sampling, max_tokens=300, ignore_eos=True)
    assert END not in outcome.tokens["r"]
    assert outcome.finish("r").usage.completion_tokens == 300


def test_min_tokens_bars_stop_tokens_too_and_ends_with_the_limit() -> None:
    said = answer(min_tokens=0).tokens["r"]
    stop = said[3]
    kept = answer(min_tokens=20, stop_token_ids=(stop,)).tokens["r"]
    assert stop not in kept[:20]
    assert answer(min_tokens=50, max_tokens=10).finish("r").reason == "length"


@DRAFTS
def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(draft: str) -> None:
    said = answer().tokens["r"]
    at = said.index(said[5])
    outcome = answer(draft, stop_token_ids=(said[5], 10**9), ignore_eos=True)
    assert outcome.tokens.get("r", []) == said[:at]
    assert (outcome.finish("r").reason, outcome.finish("r").usage.completion_tokens) == (
        "stop",
        at + 1,
    )


THINKS = ThinkingLimit(tokens=25, opening="<think>", closing="</think>", after="\n\n", opened=True)


@DRAFTS
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=4)], ids=["greedy", "drawn"])
def test_the_end_of_reasoning_is_forced_at_the_end_of_the_budget(
    draft: str, sampling: Sampling
) -> None:
    free = answer(draft, sampling, ignore_eos=True)
    held = answer(draft, sampling, ignore_eos=True, thinking=THINKS)
    assert "</think>" not in free.text["r"]
    assert held.tokens["r"][:25] == free.tokens["r"][:25]
    assert held.text["r"][25:35] == "</think>\n\n"
    assert held.text["r"].count("</think>") == 1
    assert len(held.tokens["r"]) == 80


def test_a_reasoning_budget_of_zero_ends_the_reasoning_at_once() -> None:
    none = ThinkingLimit(0, "<think>", "</think>", "\n\n", opened=True)
    assert answer(ignore_eos=True, thinking=none).text["r"].startswith("</think>\n\n")


class Saying(ScriptedBackend):
    """A backend that writes `words`, token by token, after the prompt, and then continues like the
    scripted backend."""

    words = ""

    def step(self, chunks):  # type: ignore[no-untyped-def]
        result = super().step(chunks)
        first = len(self.tokenize(PROMPT))
        (line,) = [self.lines[c.sequence] for c in chunks]
        words = self.tokenize(self.words)
        for row, length in zip(reversed(result.rows[0]), range(len(line), 0, -1), strict=False):
            if first <= length < first + len(words):
                row[words[length - first]] = 100.0
        return result


def saying(words: str, limit: ThinkingLimit) -> str:
    backend = Saying(n_ctx=1024)
    backend.words = words
    engine = Engine(backend)
    text = run(engine, request_for("r", PROMPT, 120, GREEDY, ignore_eos=True, thinking=limit)).text[
        "r"
    ]
    engine.close()
    return text


def limit(tokens: int) -> ThinkingLimit:
    return ThinkingLimit(tokens, "<think>", "</think>", "\n\n")


def test_the_budget_counts_from_the_point_where_the_model_opens_its_reasoning() -> None:
    assert saying("\n<think>" + "hm " * 30, limit(9)).startswith("\n<think>hm hm hm </think>\n\n")


def test_a_reasoning_budget_does_not_change_an_answer_without_reasoning() -> None:
    assert saying("plain words " * 5, limit(9)).startswith("plain words " * 5)
    assert "</think>" not in saying("plain <think>words " * 5, limit(9))


def test_a_reasoning_budget_does_not_change_reasoning_that_ended_in_time() -> None:
    words = "<think>short</think>\n\nThe answer is a long one."
    said = saying(words, limit(14))
    assert said.startswith(words)
    assert said.count("</think>") == 1


def test_a_closing_marker_that_is_begun_is_finished() -> None:
    assert saying("<think>abcdef</thought", limit(10)).startswith("<think>abcdef</think>\n\n")
