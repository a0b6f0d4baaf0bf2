"""A checkpoint of a recurrent state ends a step before the end of the prompt. A short turn's end is
not split for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, run, settle
from localllm.engine.cache.store import KvStore, checkpoints
from localllm.engine.cache.tree import as_tokens
from localllm.engine.core import Engine
from localllm.engine.step_costs import PrefillCost
from support.examples import examples
from support.requests import request_for
from support.scripted_backend import TURN, ScriptedBackend


def never(token: int) -> bool:
    return False


def words(n: int, seed: int) -> list[int]:
    return [3 + (i * 7 + seed * 31) % 250 for i in range(n)]


@pytest.mark.parametrize(("tail", "steps"), [(20, 1), (60, 2)])
def test_a_short_turn_after_a_cached_prefix_takes_one_step(tail: int, steps: int) -> None:
    backend = ScriptedBackend(n_ctx=2048, n_batch=256, rewind="none", states=True)
    engine = Engine(backend)
    head = words(600, 1)
    for key, prompt in (("first", head + words(30, 2)), ("second", head + words(30, 3))):
        run(engine, request_for(key, prompt, 4, GREEDY, ignore_eos=True))
        settle(engine)
    before = len(backend.steps)
    outcome = run(engine, request_for("turn", head + words(tail, 4), 1, GREEDY, ignore_eos=True))
    assert outcome.finish("turn").usage.cached_tokens >= 600 - 16
    assert len(backend.steps) - before == steps


BLANK = 258


class Paragraphs(ScriptedBackend):
    """A backend in which one token is a blank line."""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        return b".\n\n" if token == BLANK else super().token_bytes(token, special=special)


@pytest.mark.parametrize("head", [300, 900])
def test_a_second_question_about_a_document_reads_the_question_alone(head: int) -> None:
    """A chat template without a separate turn for instructions (Gemma's) has a blank line between
    them and the question."""
    engine = Engine(Paragraphs(n_ctx=2048, n_batch=256, rewind="none", states=True))
    document = [*words(head, 1), BLANK]
    for key, question in (("first", words(30, 2)), ("second", words(30, 3))):
        outcome = run(engine, request_for(key, document + question, 4, GREEDY, ignore_eos=True))
        settle(engine)
    assert outcome.finish("second").usage.cached_tokens == len(document)


@settings(max_examples=examples(500))
@given(
    n=st.integers(20, 3000),
    behind=st.integers(1, 400),
    known=st.integers(0, 3000),
    opening=st.sampled_from([0, 3, 6]),
)
def test_a_branch_recomputes_at_most_a_few_times_the_tokens_after_the_divergence(
    n: int, behind: int, known: int, opening: int
) -> None:
    """A turn without paragraphs, optionally followed by a few tokens that open the answer's turn.
    The next prompt diverges `behind` tokens before the turn's end."""
    prompt = [TURN, *range(1000, 1000 + n), *[TURN, *range(2, opening + 1)][:opening]]
    branch = max(1 + n - behind, 0)
    points = checkpoints(prompt, 0, min(known, n), TURN.__eq__, never, 512)
    twice = branch - max((p for p in points if p <= branch), default=0)
    assert twice <= max(4 * behind, 72) + 32


@given(known=st.integers(0, 15), n=st.integers(34, 60))
def test_a_short_prompt_is_reused_even_if_many_prompts_share_its_first_tokens(
    known: int, n: int
) -> None:
    """All prompts share a template's first tokens. No state is kept after them, so they do not
    replace a checkpoint near the prompt's end."""
    points = checkpoints(range(n), known, known, never, never, 512)
    assert points
    assert points[-1] >= n - 36


@pytest.mark.parametrize(
    ("export_s", "token_s", "apart"),
    [
        # a device that needs a fence for each tensor: exports take at most a tenth of a prompt's
        # time
        (0.6, 2e-3, 4096),
        (0.6, 5e-4, 16384),
        (0.6, 0.0, 512),  # no prompt was computed yet
        (0.005, 2e-3, 512),
        (0.04, 2e-5, 512),
    ],
)
def test_the_interval_between_states_grows_with_the_cost_of_a_copy(
    export_s: float, token_s: float, apart: int
) -> None:
    ticks = iter([0.0, export_s, 10.0, 10.0 + 3 * export_s])  # a later export may be disturbed
    backend = ScriptedBackend(n_ctx=2048, rewind="none", states=True)
    store = KvStore(backend, 1 << 30, clock=lambda: next(ticks))
    store.speed = PrefillCost(token_s)
    for _ in range(2):
        sequence = backend.new_sequence()
        assert store.store_state(sequence, as_tokens(words(16, sequence))) == "free"
    assert store.state_interval(1000) == apart
