"""Prompt lookup: it finds the longest match, follows a copy through changes, and learns its hit
rate without drafting."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.speculation.controller import HitRates
from localllm.engine.speculation.ngram import (
    PromptLookup,
    RecentOutputs,
    SearchedText,
    longest_match,
)
from localllm.engine.tokens import TokenBuffer

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def lookup(
    tokens: list[int], recent: RecentOutputs | None = None, predicted: list[int] | None = None
) -> PromptLookup:
    return PromptLookup(tokens, HitRates(), recent or RecentOutputs(), predicted or [])


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_longest_match_equals_a_plain_search(hay: list[int], suffix: list[int], most: int) -> None:
    best: tuple[int, int] | None = None
    for end in range(1, len(hay)):
        n = 0
        while n < min(most, end, len(suffix)) and hay[end - 1 - n] == suffix[-1 - n]:
            n += 1
        if n and (best is None or n >= best[1]):
            best = (end, n)
    assert longest_match(np.asarray(hay, np.int32), np.asarray(suffix, np.int32), most) == best


@given(st.lists(TOKENS, max_size=8))
def test_a_token_buffer_behaves_like_a_list(parts: list[list[int]]) -> None:
    line, plain = TokenBuffer(), []
    for part in parts:
        line.extend(part)
        plain += part
        assert line.view.tolist() == plain


def test_a_copy_is_proposed_whole() -> None:
    text = list(range(100, 160))
    drafter = lookup([*text, 7, 8, *text[:5]])
    tokens, match = drafter.propose(20)
    assert tokens == text[5:25]
    assert match == 5


def test_a_copy_continues_at_its_place_after_a_changed_word() -> None:
    text = list(range(100, 160))
    drafter = lookup([*text, 7, 8, *text[:20]])
    drafter.propose(8)
    drafter.advance([999])
    tokens, _ = drafter.propose(4)
    assert tokens == text[21:25]


def test_a_repeating_text_is_predicted_beyond_its_end() -> None:
    drafter = lookup([1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert drafter.propose(7)[0] == [1, 2, 3, 1, 2, 3, 1]


def test_the_predicted_output_is_drafted_from_its_first_token() -> None:
    drafter = lookup([1, 2, 3], predicted=[50, 51, 52, 53])
    assert drafter.propose(3)[0] == [50, 51, 52]
    drafter.advance([50, 51])
    assert drafter.propose(3)[0] == [52, 53]


def test_recent_answers_serve_other_requests_and_stay_apart() -> None:
    recent = RecentOutputs()
    recent.add(list(range(200, 220)))
    recent.add(list(range(300, 320)))
    assert lookup([1, 205, 206, 207], recent).propose(4)[0] == [208, 209, 210, 211]
    # The end of one answer is not followed by the beginning of the next.
    assert lookup([1, 216, 217, 218], recent).propose(4)[0] == [219]


def test_recent_answers_are_bounded() -> None:
    recent = RecentOutputs(capacity_tokens=50)
    for i in range(20):
        recent.add(list(range(i * 100, i * 100 + 30)))
    assert len(recent.tokens) <= 50


def test_no_draft_is_proposed_without_seen_text() -> None:
    assert lookup([1, 2, 3, 4]).propose(8) == ([], 0)
    assert lookup([]).propose(8) == ([], 0)


@given(TOKENS.filter(bool), st.lists(TOKENS, max_size=10), st.integers(1, 12))
def test_a_proposal_is_always_text_that_was_seen(
    prompt: list[int], steps: list[list[int]], most: int
) -> None:
    drafter = lookup(prompt)
    seen = list(prompt)
    for tokens in steps:
        proposed, match = drafter.propose(most)
        assert len(proposed) <= most
        assert set(proposed) <= set(seen)
        assert bool(proposed) == bool(match)
        drafter.advance(tokens)
        seen += tokens


def test_acceptance_is_learnt_without_drafting() -> None:
    """Decoding without drafts shows whether guesses would have been right, so learning costs no
    draft."""
    rates = HitRates()
    text = list(range(100, 160))
    drafter = PromptLookup([*text, 7, *text[:10]], rates, RecentOutputs())
    before = rates.rate(10)
    for token in text[10:16]:
        drafter.propose(1)
        drafter.advance([token])
    assert rates.rate(14) > before


def test_a_repetition_is_followed_through_steps_without_a_proposal() -> None:
    """The drafter learns from the guesses for all tokens since the last proposal, including those
    whose source is newer than that proposal."""
    often, seldom = HitRates(), HitRates()
    for rates, n_between in ((often, 1), (seldom, 8)):
        drafter = PromptLookup([1, 2, 7, 7, 7], rates, RecentOutputs())
        for _ in range(40 // n_between):
            drafter.propose(1)
            drafter.advance([7] * n_between)
        drafter.propose(1)
    assert [seldom.rate(n) for n in (2, 8, 32)] == [often.rate(n) for n in (2, 8, 32)]


def test_a_text_is_continued_only_by_a_text_with_its_last_pair() -> None:
    text = SearchedText([1, 2, 3])
    text.extend([4])
    assert text.may_continue(SearchedText([9, 2, 3]))
    # No token follows the last pair yet.
    assert not text.may_continue(SearchedText([3, 4]))
    assert not text.may_continue(SearchedText([2]))
    text.extend([5])
    assert text.may_continue(SearchedText([3, 4]))
