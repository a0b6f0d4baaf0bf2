"""The sampler's choices for unusual rows, and the memory that they take."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from engine.sampling_reference import rows_like_models
from localllm.engine.messages import Sampling
from localllm.engine.sampling.filters import distribution
from localllm.engine.sampling.grammar import GrammarMatcher
from localllm.engine.sampling.row import GreatestLogits
from localllm.engine.sampling.sampler import Sampler

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=0), Sampling(top_k=0, typical_p=0.9), OPEN]
)
def test_ties_keep_their_order_for_any_much_lower_logits(sampling: Sampling) -> None:
    rng = np.random.default_rng(3)
    tied = rng.choice(50_000, 60, replace=False)
    drawn = set()
    orders = set()
    for far in range(4):
        row = np.full(50_000, -np.inf, dtype=np.float32)
        row[rng.choice(50_000, 20_000, replace=False)] = -200.0 - far
        row[tied] = 5.0
        found = distribution(row, sampling)
        orders.add(tuple(t for t in found.ids.tolist() if row[t] == 5.0))
        drawn.add(tuple(found.draw(Sampler(Sampling(seed=s)).uniform()) for s in range(20)))
    (order,) = orders
    assert list(order) == sorted(tied.tolist())[: len(order)]
    assert len(drawn) == 1


@pytest.mark.parametrize("n_vocab", [1, 40, 5_000, 9_001, 262_144])
@pytest.mark.parametrize("kind", ["words", "ties", "equal", "forbidden", "nothing"])
def test_the_greatest_are_ranked_by_logit_then_by_id(n_vocab: int, kind: str) -> None:
    row = rows_like_models(n_vocab, 3, kind)
    order = np.lexsort((np.arange(n_vocab), -row))
    order = order[row[order] > -np.inf]
    for k in (1, 3, 40, 512, 3_000):
        assert GreatestLogits(row).ranked(k).tolist() == order[:k].tolist()


def test_a_row_with_all_tokens_forbidden_still_gives_a_token() -> None:
    row = np.full(5_000, -np.inf, dtype=np.float32)
    for sampling in (Sampling(), Sampling(top_k=0), OPEN):
        found = distribution(row, sampling)
        assert found.ids.tolist() == [0]
        assert found.probs.tolist() == [1.0]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    row = np.zeros(4_000, dtype=np.float32)
    row[[17, 900]] = 2.0
    assert Sampler(Sampling(temperature=0)).choose(row, []) == 17


class Bits:
    """A matcher that allows the tokens whose bits are set."""

    def __init__(self, allowed: np.ndarray) -> None:
        self._packed = np.packbits(allowed, bitorder="little").tobytes()

    def compute_bitmask(self) -> bytes:
        return self._packed


@pytest.mark.parametrize("n_vocab", [1, 9, 40_003])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_a_grammar_mask_forbids_all_tokens_without_a_set_bit(n_vocab: int, share: float) -> None:
    row = rows_like_models(n_vocab, 1, "words")
    allowed = np.random.default_rng(2).random(n_vocab) < share
    found = row.copy()
    GrammarMatcher(Bits(allowed)).apply(found)
    assert np.array_equal(found, np.where(allowed, row, -np.inf))


@pytest.mark.parametrize("change", [{"top_k": 40}, {"top_p": 0.95}, {}], ids=str)
@pytest.mark.parametrize("kind", ["words", "flat"])
def test_no_row_is_allocated_for_a_token(kind: str, change: dict[str, float]) -> None:
    """Allocating a megabyte costs as much as a pass over it."""
    row, history = rows_like_models(262_144, 1, kind), list(range(5_000))
    sampler = Sampler(
        replace(OPEN, repeat_penalty=1.1, repeat_last_n=-1, logit_bias={5: 1.0}, **change)
    )  # type: ignore[arg-type]
    sampler.choose(row, history)
    tracemalloc.start()
    sampler.choose(row, history)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < row.nbytes
