"""Trained drafters for a model: however a sequence was built, they propose the same tokens as if
they had read it at once.

The expected drafts are computed separately from the product: drafter_reference.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.drafted_lines import (
    MOST,
    guesses_are_those_from_scratch,
    resting_heads_guess_from_the_newest_tokens,
    words,
)
from backends.drafter_reference import DSparkHeads, Reference
from localllm_backends.contract import Backend, BackendFailure, Chunk, LoadError, LoadSpec
from localllm_backends.llamacpp import backend_type
from localllm_backends.llamacpp.native import start_native
from models import tiny_drafters, tiny_gguf

KINDS: dict[str, int] = {
    "eagle3": 0,
    "eagle3-d2t": 0,
    "eagle3-shared": 0,
    "dflash-4": 4,
    "dflash-16": 16,
    "dflash-window": 4,
    "assistant": -1,
}


def write(kind: str, path: Path) -> Path:
    if kind == "assistant":
        return tiny_drafters.write_assistant(path)
    if kind.startswith("eagle3"):
        return tiny_drafters.write_eagle3(
            path, n_draft_vocab=100 * kind.endswith("d2t"), own=not kind.endswith("shared")
        )
    return tiny_drafters.write_dflash(path, block=KINDS[kind], window=32 * kind.endswith("window"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafters.write_target(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path, Reference]]:
    drafter = write(request.param, tmp_path_factory.mktemp("drafter") / "d.gguf")
    if request.param == "assistant":
        model = tiny_drafters.write_gemma4(drafter.with_name("gemma4.gguf"))
    reference = Reference(model, drafter, KINDS[request.param])
    yield model, drafter, reference
    reference.close()


def load(model: Path, drafter: Path | str, **more: object) -> Backend:
    spec = {
        "n_ctx": 512,
        "n_seq_max": 4,
        "n_batch": 128,
        "n_threads": 1,
        "drafter": str(drafter),
        **more,
    }
    return backend_type.load(LoadSpec(str(model), **spec))  # type: ignore[arg-type]


def failing(decode: Callable[[int, object], int], n_layers: int) -> Callable[[int, object], int]:
    """Return a llama_decode that fails except for models with that many layers."""
    return lambda context, batch: (
        decode(context, batch)
        if start_native().llama_model_n_layer(start_native().llama_get_model(context)) == n_layers
        else 1
    )


def test_after_any_history_drafters_guess_as_from_scratch(
    pair: tuple[Path, Path, Reference],
) -> None:
    model, drafter, reference = pair
    backend = load(model, drafter)
    guesses_are_those_from_scratch(backend, random.Random(5), reference.draft)
    backend.close()


def test_a_drafter_that_rested_guesses_from_the_newest_tokens(
    pair: tuple[Path, Path, Reference],
) -> None:
    model, drafter, reference = pair
    backend = load(model, drafter, n_ctx=1024)
    resting_heads_guess_from_the_newest_tokens(backend, random.Random(5), reference.draft)
    backend.close()


@pytest.mark.parametrize("confidence", [False, True])
def test_guesses_of_dspark_heads_equal_a_numpy_reference(
    model: Path, tmp_path: Path, *, confidence: bool
) -> None:
    """Both drafters have the same random weights, one without and one with the heads: the writer
    draws the heads' weights last."""
    base = tiny_drafters.write_dflash(tmp_path / "base.gguf", block=8)
    path = tiny_drafters.write_dflash(
        tmp_path / "d.gguf", block=8, markov=True, confidence=confidence
    )
    reference, backend, rng = (
        Reference(model, base, 8, DSparkHeads(path)),
        load(model, path),
        random.Random(8),
    )
    right, lengths = 0, set()
    for _ in range(12):
        line, newest, sequence = (
            words(rng, rng.randrange(3, 90)),
            rng.randrange(3, 500),
            backend.new_sequence(),
        )
        backend.step([Chunk(sequence, line, 0)])
        (guessed,) = backend.draft([(sequence, newest, 8)])
        right += guessed == reference.draft([*line, newest], 8)
        lengths.add(len(guessed))
        backend.drop(sequence)
    backend.close()
    reference.close()
    assert right >= 11, "a near-tie"
    assert (len(lengths) > 1) is confidence, "they end where they are not sure"


def test_several_sequences_in_lockstep_guess_as_each_alone(model: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    for drafter in (
        tiny_drafters.write_eagle3(tmp_path / "e.gguf"),
        tiny_drafters.write_dflash(tmp_path / "d.gguf", block=16),
        tiny_drafters.write_dflash(tmp_path / "s.gguf", block=4, markov=True),
    ):
        backend = load(model, drafter)
        lines = [words(rng, n) for n in (3, 40, 17, 90)]
        alone = []
        for line in lines:
            sequence = backend.new_sequence()
            backend.step([Chunk(sequence, line, 0)])
            alone += backend.draft([(sequence, 9, 16)])
            backend.drop(sequence)
        together = [backend.new_sequence() for _ in lines]
        for sequence, line in zip(together, lines, strict=True):
            backend.step([Chunk(sequence, line, 0)])
        assert backend.draft([(s, 9, 16) for s in together]) == alone
        assert sum(map(len, alone)) >= 8
        assert all(len(d) <= backend.capabilities.drafts for d in alone)
        assert backend.draft([(s, 9, 1) for s in together]) == [d[:1] for d in alone]
        backend.close()


def test_a_drafted_block_is_no_longer_than_in_training(model: Path, tmp_path: Path) -> None:
    for block, markov, longest in ((4, False, 3), (16, False, 15), (4, True, 4)):
        backend = load(
            model, tiny_drafters.write_dflash(tmp_path / "d.gguf", block=block, markov=markov)
        )
        assert (backend.capabilities.drafts, backend.capabilities.draft_kind) == (longest, "dflash")
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, words(random.Random(1), 30), 0)])
        assert len(backend.draft([(sequence, 9, 60)])[0]) <= longest
        backend.close()


def test_the_confidence_of_dspark_ends_a_draft(model: Path, tmp_path: Path) -> None:
    lengths = []
    for confidence in (False, True):
        path = tiny_drafters.write_dflash(
            tmp_path / "d.gguf", block=8, markov=True, confidence=confidence
        )
        backend, rng = load(model, path), random.Random(1)
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, words(rng, 30), 0)])
        lengths.append(sum(len(backend.draft([(sequence, t, 8)])[0]) for t in words(rng, 30)))
        backend.close()
    assert 0 < lengths[1] != lengths[0] > 0


def test_a_drafter_counts_in_memory_and_in_the_fingerprint(model: Path, tmp_path: Path) -> None:
    drafter = tiny_drafters.write_eagle3(tmp_path / "e.gguf")
    other = tiny_drafters.write_eagle3(tmp_path / "e2.gguf", seed=2)
    plain = backend_type.load(
        LoadSpec(str(model), n_ctx=512, n_seq_max=4, n_batch=128, n_threads=1)
    )
    on, second = load(model, drafter), load(model, other)
    assert (
        on.memory().weights_bytes
        > plain.memory().weights_bytes + 0.9 * drafter.stat().st_size * 0.9
    )
    assert on.memory().kv_bytes > plain.memory().kv_bytes
    assert len({b.info.fingerprint for b in (plain, on, second)}) == 3
    for b in (plain, on, second):
        b.close()


def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(drafter: Path, reason: str, target: Path = model) -> None:
        with pytest.raises(LoadError, match=reason):
            load(target, drafter)

    eagle3, dflash = tiny_drafters.write_eagle3, tiny_drafters.write_dflash
    good = eagle3(tmp_path / "good.gguf")
    refused(tmp_path / "absent.gguf", "no file")
    refused(model, "the file is a llama model, not a drafter")
    refused(eagle3(tmp_path / "a.gguf", width=96), "hidden size 96, and this model has 64")
    refused(
        eagle3(tmp_path / "b.gguf", layers=(0, 1, 7)),
        "reads the layers 0, 1, 7, and this model has 3",
    )
    refused(eagle3(tmp_path / "c.gguf", layers=(0, 1, 3)), "the output of the last layer")
    refused(eagle3(tmp_path / "d.gguf", without="blk.0.attn_norm_2"), "can't load")
    refused(dflash(tmp_path / "e.gguf", block=1), "block of 1")
    refused(dflash(tmp_path / "f.gguf", layers=(0, 9)), "reads the layers 0, 9")
    gemma, assistant = (
        tiny_drafters.write_gemma4(tmp_path / "gemma4.gguf"),
        tiny_drafters.write_assistant,
    )
    refused(
        assistant(tmp_path / "g.gguf"),
        "reads the KV of a Gemma 4 model, but this is a 'llama' model",
    )
    refused(
        assistant(tmp_path / "h.gguf", width=96),
        "made for a model with hidden size 96, and this model has 64",
        gemma,
    )
    refused(assistant(tmp_path / "i.gguf", window=16), "its window differ", gemma)
    refused(good, "'gemma3' models", tiny_gguf.write_sliding(tmp_path / "sliding.gguf"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    refused(cut, "can't (load|be read)")
    foreign = good.read_bytes().replace("▁w300".encode(), "▁x300".encode())
    (tmp_path / "foreign.gguf").write_bytes(foreign)
    refused(tmp_path / "foreign.gguf", "token 300 is")
    monkeypatch.setattr(start_native(), "missing", lambda name: f"no {name} in this library")
    refused(good, "no drafters in this library")


def test_a_drafter_that_loses_its_place_changes_no_result(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for drafter in (
        tiny_drafters.write_eagle3(tmp_path / "e.gguf"),
        tiny_drafters.write_dflash(tmp_path / "d.gguf"),
    ):
        backend, rng = load(model, drafter), random.Random(5)
        plain = backend_type.load(
            LoadSpec(str(model), n_ctx=512, n_seq_max=4, n_batch=128, n_threads=1)
        )
        sequence, line, more = backend.new_sequence(), words(rng, 40), words(rng, 50)
        with monkeypatch.context() as patch:
            # Every pass of the drafter fails.
            llama = start_native()
            patch.setattr(llama, "llama_decode", failing(llama.llama_decode, 3))
            backend.step([Chunk(sequence, line)])
            assert backend.draft([(sequence, 5, MOST)]) == [[]]
        got = backend.step([Chunk(sequence, more, 3)]).logits(0).copy()
        check = plain.new_sequence()
        plain.step([Chunk(check, line)])
        expected = plain.step([Chunk(check, more, 3)]).logits(0)
        np.testing.assert_allclose(got, expected, atol=0.02 * float(expected.std()))
        assert any(backend.draft([(sequence, t, MOST)])[0] for t in range(5, 25)), (
            "what was read since is enough"
        )
        for b in (backend, plain):
            with pytest.raises(BackendFailure):
                b.import_range(sequence, b"nothing", 0, 1)
            b.close()
