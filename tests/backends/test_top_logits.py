"""llama.cpp selects the largest logits on the device: the tokens equal those from complete rows.
Here the CPU stands in for a device, which llama.cpp supports on purpose ("CPU backend always
supported")."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.drive import GREEDY, Outcome, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Generation, Request, Sampling
from localllm.engine.sampling.filters import candidates
from localllm_backends import conformance
from localllm_backends.contract import Chunk, LoadSpec, SampleSpec
from localllm_backends.llamacpp import backend_type
from localllm_backends.llamacpp.backend import LlamaCppBackend

SAMPLINGS = (
    GREEDY,
    Sampling(),
    Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    Sampling(top_k=64, min_p=0.0, repeat_penalty=1.2),
    Sampling(temperature=0.0, presence_penalty=1.0),
    Sampling(logit_bias={30: 5.0, 40: -100.0}),
)


@pytest.fixture(params=[False, True])
def backend(smollm2: Path, request: pytest.FixtureRequest) -> Iterator[LlamaCppBackend]:
    made = backend_type.load(LoadSpec(str(smollm2), n_ctx=1024, n_seq_max=8))
    assert isinstance(made, LlamaCppBackend)
    if request.param:
        made.sort_where_computed()
    yield made
    made.close()


def chosen(row: NDArray[np.float32], spec: SampleSpec) -> int:
    """Return the token that the engine draws from a complete row."""
    sampling = Sampling(spec.temperature, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p)
    return candidates(row, sampling).draw(spec.uniform)


def softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    shares = np.exp(row.astype(np.float64) - row.max())
    return np.asarray(shares / shares.sum())


def may_be(token: int, row: NDArray[np.float32], spec: SampleSpec, moved: float) -> bool:
    """Return whether the row gives this token, or could give it after the probabilities `moved` by
    that much between two ways of computing them (kernels of some devices round by the shape of a
    batch)."""
    return conformance.may_be_sampled(token, row.astype(np.float64), spec, 1e-4 + 3 * moved)


_answers: list[Outcome] = []


def test_answers_from_top_logits_equal_those_from_complete_rows(backend: LlamaCppBackend) -> None:
    """Six streams with different samplings and the same prompt, so that the first tokens depend
    only on where they are selected."""
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    prompt = backend.tokenize("Once upon a time there was a lighthouse")
    outcome = run(
        engine,
        *(
            Request(
                f"r{i}",
                prompt,
                Generation(replace(s, seed=i), max_tokens=12, ignore_eos=True),
                draft="off",
            )
            for i, s in enumerate(SAMPLINGS)
        ),
    )
    backend.check_integrity()
    _answers.append(outcome)
    assert all(len(t) == 12 for t in outcome.tokens.values())
    if len(_answers) == 2:
        assert _answers[0].tokens == _answers[1].tokens


def test_a_draw_over_all_tokens_needs_only_the_top_tokens_and_the_total(
    backend: LlamaCppBackend,
) -> None:
    """This also holds for a single stream. If the draw falls outside of the selected tokens, the
    computed row is read."""
    text = backend.tokenize("The weather in the mountains was")
    backend.sort_where_computed()
    sequence = backend.new_sequence()
    for uniform in (0.0, 0.3, 0.7, 0.9999):
        backend.truncate(sequence, 0)
        spec = SampleSpec(1.0, 0, 1.0, 0.0, uniform)
        result = backend.step([Chunk(sequence, text, sample=spec, top_k_suffices=True)])
        token, row = result.sampled(0), result.logits(0)[0]
        assert (token is None) == (uniform > 0.99)
        assert token in (None, chosen(row, spec))
    nucleus = SampleSpec(0.5, 0, 0.5, 0.0, 0.95)
    backend.truncate(sequence, 0)
    result = backend.step([Chunk(sequence, text, sample=nucleus, top_k_suffices=True)])
    assert result.sampled(0) == chosen(result.logits(0)[0], nucleus)


def test_a_device_that_selects_top_logits_keeps_the_contract(backend: LlamaCppBackend) -> None:
    """`doctor --accelerator` makes this check on a GPU, where rows are complete if there are few
    streams."""
    if not backend.capabilities.samples:
        backend.sort_where_computed()
    check = conformance.what_is_sampled_follows_from_the_logits
    conformance.Subject(backend).examine(check)


def test_few_complete_rows_are_copied_and_every_row_is_available(backend: LlamaCppBackend) -> None:
    """If the selected tokens do not decide a draw, the row is read, for any other requests in the
    step. Sequence lengths do not change."""
    if not backend.capabilities.samples:
        backend.sort_where_computed()
    text = backend.tokenize("The weather in the mountains was")
    sequences = [backend.new_sequence() for _ in range(6)]
    spec = SampleSpec(0.8, 40, 0.95, 0.05, 0.3)
    chunks = [
        Chunk(s, text, sample=spec, top_k_suffices=True) if i != 1 else Chunk(s, text)
        for i, s in enumerate(sequences)
    ]
    result = backend.step(chunks)
    whole = result.logits(1)[0].copy()
    tokens = [result.sampled(i) for i in (0, 2, 3, 4, 5)]
    again = result.logits(2)[0].copy()
    # Neighbouring rows differ by more than 0.46 (conformance.py).
    assert conformance.difference(whole, again) < 0.15, "the same row but for how it was batched"
    for token in tokens:
        assert token is not None
        assert may_be(token, again, spec, np.abs(softmax(whole) - softmax(again)).sum())
    assert result.sampled(1) is None
    assert (result.logits(1)[0] == whole).all(), "what was there before"
    assert [backend.length(s) for s in sequences] == [len(text)] * 6
    backend.check_integrity()
    after = backend.step(
        [Chunk(s, [tokens[0]], sample=spec, top_k_suffices=True) for s in sequences]
    )
    drawn = [after.sampled(i) for i in range(6)]
    rows = [after.logits(i)[0].copy() for i in (0, 2, 3, 4, 5)]
    moved = max(np.abs(softmax(rows[0]) - softmax(row)).sum() for row in rows)
    for token, row in zip([drawn[0], *drawn[2:]], rows, strict=True):
        assert token is not None
        assert may_be(token, row, spec, moved)
    alone = backend.step([Chunk(sequences[0], [tokens[0]], top_k_suffices=True)])
    assert alone.argmax(0) == [int(alone.logits(0)[0].argmax())], "one stream's row is read whole"
