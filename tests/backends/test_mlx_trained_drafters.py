"""Trained drafters on MLX: however a sequence was built, they propose the same tokens as mlx-vlm's
own classes do from scratch, without our memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.drafted_lines import (
    MOST,
    guesses_are_those_from_scratch,
    resting_heads_guess_from_the_newest_tokens,
    words,
)
from localllm_backends.contract import Backend, Chunk, LoadError, LoadSpec
from localllm_backends.drafter_config import drafter_config
from localllm_backends.mlx import backend_type
from models import tiny_mlx, tiny_mlx_drafters
from support.pictures import needs_mlx_vlm

pytestmark = [pytest.mark.mlx, needs_mlx_vlm()]
# For each kind: arguments of the writer, the model's layers whose outputs the drafter reads, and
# the tokens of a block.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "eagle3": ({"design": "eagle3", "layout": "speculators"}, (0, 1, 1), 0),
    "eagle3-d2t": (
        {"design": "eagle3", "layout": "speculators", "n_draft_vocab": 100},
        (0, 1, 1),
        0,
    ),
    "dflash": ({"design": "dflash"}, (0, 1), 8),
    "dflash-window": ({"design": "dflash", "window": 32}, (0, 1), 8),
    "dflash2": ({"design": "dflash2"}, (0, 1), 8),
    "dspark": ({"design": "dspark", "confidence": False}, (0, 1), 9),
    "dspark-gemma4": ({"design": "gemma4_dspark"}, (0, 1), 9),
}


class Reference:
    """A drafter run by mlx-vlm, after the model run by mlx-lm, both without earlier state."""

    def __init__(self, model: Path, drafter: Path, layers: tuple[int, ...], block: int) -> None:
        from mlx_lm.utils import load_model
        from mlx_vlm.speculative import load_drafter

        self._model, _ = load_model(model)
        # mlx-vlm drafts only for models that can roll back; these tests roll back no tokens.
        self._model.rollback_speculative_cache = None
        self._drafter, self._kind = load_drafter(str(drafter))
        # Gemma 4's layers have one projection for keys and values. mlx-vlm 0.7.10 looks for two.
        for layer in self._drafter.layers:
            if "v_proj" not in layer.self_attn:
                layer.self_attn.v_proj = layer.self_attn.k_proj
        self._layers, self._block = layers, block

    def draft(
        self, line: list[int], most: int, unseen: tuple[int, ...] = (), begin: int = 0
    ) -> list[int]:
        import mlx.core as mx

        ids, newest = mx.array([line[:-1]]), line[-1]
        hidden, outputs = self._model.model.embed_tokens(ids), []
        for layer in self._model.model.layers:
            hidden = layer(hidden, "causal", None)
            outputs.append(hidden)
        rows = mx.concatenate([outputs[i] for i in self._layers], axis=-1)
        known = [0.0 if at + 1 in unseen else 1.0 for at in range(len(line) - 1)]
        rows = rows * mx.array(known)[None, :, None]
        # Each token is read together with the row before it.
        first = max(begin - 1, 0)
        ids, rows = ids[:, first:], rows[:, first:]
        memory = self._drafter.reset(self._model)

        def best(logits: Any) -> Any:
            return mx.argmax(logits, axis=-1)

        if self._kind == "eagle3":
            self._drafter.prefill_from_target_hidden(ids, rows, newest, best, greedy=True)
            made = self._drafter.draft_block(newest, rows, memory, most + 1, best, greedy=True)
        else:
            made = self._drafter.draft_block(newest, rows, memory, self._block, best)
        tokens: list[int] = made[0].tolist()
        return tokens[:most]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mlx.write_llama(tmp_path_factory.mktemp("model") / "m")


def load(model: Path, drafter: Path | str, **more: object) -> Backend:
    spec = {"n_ctx": 512, "n_seq_max": 4, "n_batch": 128, "drafter": str(drafter), **more}
    return backend_type.load(LoadSpec(str(model), **spec))  # type: ignore[arg-type]


def embeddings(model: Path) -> np.ndarray:
    import mlx.core as mx

    return np.array(mx.load(str(model / "model.safetensors"))["model.embed_tokens.weight"])


def with_reference(
    kind: str, model: Path, folder: Path, **more: object
) -> tuple[Backend, Reference]:
    """Load the model with a drafter of this kind, written to `folder`. Return it with the reference
    for its drafts."""
    how, layers, block = KINDS[kind]
    if how["design"] == "eagle3":
        # mlx-vlm assumes that a head's embeddings are copies of the model's.
        how = {**how, "changed": {"embed_tokens.weight": embeddings(model)}}
    drafter = tiny_mlx_drafters.write(folder, **how)
    return load(model, drafter, **more), Reference(model, drafter, layers, block)


@pytest.mark.parametrize("kind", KINDS)
def test_after_any_history_drafters_guess_as_from_scratch(
    kind: str, model: Path, tmp_path: Path
) -> None:
    backend, reference = with_reference(kind, model, tmp_path / "d")
    guesses_are_those_from_scratch(backend, random.Random(5), reference.draft)
    backend.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_rested_guesses_from_the_newest_tokens(
    kind: str, model: Path, tmp_path: Path
) -> None:
    backend, reference = with_reference(kind, model, tmp_path / "d", n_ctx=1024)
    resting_heads_guess_from_the_newest_tokens(backend, random.Random(5), reference.draft)
    backend.close()


def guesses(backend: Backend, seed: int = 3) -> list[list[int]]:
    """Return the drafts after four sequences of different lengths, each drafted alone. Drafting all
    together gives the same."""
    rng = random.Random(seed)
    sequences = []
    for n in (3, 40, 17, 90):
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, words(rng, n), 0)])
        sequences.append(sequence)
    alone = [backend.draft([(s, 9, 16)])[0] for s in sequences]
    assert backend.draft([(s, 9, 16) for s in sequences]) == alone
    assert all(len(draft) <= backend.capabilities.drafts for draft in alone)
    assert backend.draft([(s, 9, 1) for s in sequences]) == [draft[:1] for draft in alone]
    backend.close()
    return alone


@pytest.mark.parametrize("design", tiny_mlx_drafters.DESIGNS)
def test_several_sequences_guess_as_each_alone(design: str, model: Path, tmp_path: Path) -> None:
    backend = load(model, tiny_mlx_drafters.write(tmp_path / "d", design, bits=8))
    longest = {"eagle3": 16, "dflash": 7, "dflash2": 7, "dspark": 8}[design]
    kind = "eagle3" if design == "eagle3" else "dflash"
    assert (backend.capabilities.drafts, backend.capabilities.draft_kind) == (longest, kind)
    assert sum(map(len, guesses(backend))) >= 4


def test_published_layouts_of_an_eagle3_head_are_the_same_head(model: Path, tmp_path: Path) -> None:
    layouts = []
    for layout in ("sglang", "speculators"):
        same: dict[str, Any] = {"layout": layout, "norm_before_residual": True}
        drafter = tiny_mlx_drafters.write_eagle3(tmp_path / layout, **same)
        layouts.append(guesses(load(model, drafter)))
    assert layouts[0] == layouts[1]
    # Without its own tables, the head uses the model's embedding and output tables.
    shared = tiny_mlx_drafters.write_eagle3(tmp_path / "shared", own_tables=False)
    assert guesses(load(model, shared)) != layouts[0]
    # Without a list of layers, the head reads the usual three, which this small model does not
    # have.
    unnamed = tiny_mlx_drafters.write_eagle3(tmp_path / "unnamed", eagle_config={})
    with pytest.raises(LoadError, match="it reads 3 layers of a model with 2"):
        load(model, unnamed)


def test_the_confidence_of_dspark_ends_a_draft(model: Path, tmp_path: Path) -> None:
    sure = {}
    for confidence in (False, True):
        path = tiny_mlx_drafters.write_dflash(
            tmp_path / f"d{confidence}", "dspark", confidence=confidence
        )
        drafts = [draft for seed in range(3) for draft in guesses(load(model, path), seed)]
        sure[confidence] = [len(draft) for draft in drafts]
    assert sure[True] != sure[False]
    assert len(set(sure[True])) > 1


def test_a_drafter_counts_in_memory_and_in_the_fingerprint(model: Path, tmp_path: Path) -> None:
    drafter = tiny_mlx_drafters.write_eagle3(tmp_path / "e")
    other = tiny_mlx_drafters.write_eagle3(tmp_path / "e2", seed=4)
    plain, on, second = load(model, ""), load(model, drafter), load(model, other)
    stored = (drafter / "model.safetensors").stat().st_size
    more_bytes = on.memory().weights_bytes - plain.memory().weights_bytes
    assert more_bytes == pytest.approx(stored, rel=0.01)
    for backend in (plain, on):
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, words(random.Random(1), 40))])
        if backend is on:
            # The drafter processes the tokens when it drafts.
            backend.draft([(sequence, 5, MOST)])
    assert on.memory().kv_bytes > plain.memory().kv_bytes
    assert len({b.info.fingerprint for b in (plain, on, second)}) == 3
    for backend in (plain, on, second):
        backend.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_planned_numbers_of_kv_are_those_in_memory(
    kind: str, model: Path, tmp_path: Path
) -> None:
    drafter = tiny_mlx_drafters.write(tmp_path / "d", **KINDS[kind][0])
    known = drafter_config(json.loads((drafter / "config.json").read_text()))
    assert known is not None
    kv_bytes = []
    for path in ("", drafter):
        backend = load(model, path)
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, words(random.Random(1), 90))])
        if path:
            backend.draft([(sequence, 5, MOST)])
        kv_bytes.append(backend.memory().kv_bytes)
        backend.close()
    plain_bytes, more_bytes = kv_bytes[0], kv_bytes[1] - kv_bytes[0]
    # Both caches have room for as many tokens, give or take a block, with 32 bits for a number.
    model_elements = 2 * tiny_mlx.LLAMA["num_hidden_layers"] * tiny_mlx.LLAMA["head_dim"]
    n_cells = plain_bytes / (4 * model_elements)
    assert more_bytes == pytest.approx(known.kv_elements * 4 * n_cells, rel=0.15)


def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter("abcdefghijklmnopq")

    def refused(reason: str, design: str = "dflash", **more: Any) -> None:
        drafter = tiny_mlx_drafters.write(tmp_path / next(names), design, **more)
        with pytest.raises(LoadError, match=reason):
            load(model, drafter)

    refused("hidden size 96, and this model has 64", hidden_size=96)
    refused("its vocabulary has 300 tokens, and the model's", vocab_size=300)
    refused("reads the outputs of layers 0, 9, and this model has 2", layers=(0, 9))
    refused("block of 100 tokens is not supported", block=100)
    refused("block of 0 tokens", block=0)
    refused("needs its own Python code", model_file="evil.py")
    refused("can't be read", num_hidden_layers=3)
    refused("can't be read", "dspark", markov_head_type="gated")
    for mask in (10**9, -1, "x"):
        refused(
            "its mask token names the token",
            dflash_config={"mask_token_id": mask, "target_layer_ids": [0, 1]},
        )
    # Without a mask, mlx-vlm takes that of Qwen3.5.
    refused("outside of its vocabulary", dflash_config={"target_layer_ids": [0, 1]})
    beyond = np.full(100, 10**7, np.int64)
    refused("its table d2t", "eagle3", n_draft_vocab=100, changed={"d2t": beyond})
    refused("elements of the type", changed={"fc.weight": np.ones((64, 128), np.int8)})
    with pytest.raises(LoadError, match="describes no drafter"):
        load(model, model)
    nested = tiny_mlx_drafters.write(tmp_path / "nested", "dflash")
    (nested / "config.json").write_text("[" * 10**5)
    with pytest.raises(LoadError, match=r"config\.json can't be read"):
        load(model, nested)
    with pytest.raises(LoadError, match="there is no folder"):
        load(model, tmp_path / "absent")
    good = tiny_mlx_drafters.write(tmp_path / "good", "dflash")
    left = load(model, tmp_path / "a", drafter_optional=True)
    assert left.capabilities.drafts == 0
    assert any("runs without its drafter" in note for note in left.info.load_notes)
    left.close()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"pip install 'localllm\[vision\]'"):
        load(model, good)


@pytest.mark.parametrize("design", ["eagle3", "dspark"])
def test_a_failed_drafter_changes_no_result(
    design: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter fails only when it runs: its norms raise an error."""
    backend = load(model, tiny_mlx_drafters.write(tmp_path / "d", design))
    plain = load(model, "")
    rng = random.Random(5)
    line, more = words(rng, 40), words(rng, 50)
    sequence, check = backend.new_sequence(), plain.new_sequence()
    import mlx.nn as nn

    with monkeypatch.context() as patch:
        # The model's steps are finished, so only the drafter computes.
        backend.step([Chunk(sequence, line[:39])])
        backend.step([Chunk(sequence, line[39:])])
        patch.setattr(nn.RMSNorm, "__call__", lambda *_: 1 / 0)
        assert backend.draft([(sequence, 5, MOST)]) == [[]]
    got = backend.step([Chunk(sequence, more, 3)]).logits(0).copy()
    plain.step([Chunk(check, line)])
    np.testing.assert_allclose(got, plain.step([Chunk(check, more, 3)]).logits(0), atol=1e-3)
    assert any(backend.draft([(sequence, t, MOST)])[0] for t in range(5, 25))
    backend.close()
    plain.close()


def test_a_model_without_a_drafter_imports_no_drafters(model: Path) -> None:
    code = (
        "import sys; from localllm_backends.contract import LoadSpec;"
        "from localllm_backends.mlx import backend_type;"
        f"backend_type.load(LoadSpec({str(model)!r}, n_ctx=256)).close();"
        "print(*[m for m in sys.modules if 'mlx_vlm' in m or 'dflash' in m or 'eagle3' in m])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert not loaded.stdout.strip()
