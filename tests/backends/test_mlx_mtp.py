"""A model's own draft heads on MLX: however a sequence was built, they propose the same tokens as
if they had read it at once.

The expected drafts are computed here separately from the product: by the model and a model of the
head's single layer as mlx-lm loads them, without caches, over the complete history.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from backends.drafted_lines import resting_heads_guess_from_the_newest_tokens
from localllm_backends.contract import Backend, BackendFailure, Chunk, LoadError, LoadSpec
from localllm_backends.mlx import backend_type
from models import tiny_mlx

NO_MLX = backend_type.available()
pytestmark = [pytest.mark.mlx, pytest.mark.skipif(NO_MLX is not None, reason=str(NO_MLX))]
MOST = 4
LATE = 256


class Reference:
    """A model's head, run from scratch for every token."""

    def __init__(self, folder: Path, family: str) -> None:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        whole, _ = load_model(folder)
        layer, _ = load_model(folder / "head")
        self._model = getattr(whole, "language_model", whole)
        self._layer = getattr(layer, "language_model", layer).layers[0]
        prefix, *names = tiny_mlx.MTP_NAMES[family]
        held = mx.load(str(folder / "model-mtp.safetensors"))
        weights = [
            held[f"{prefix.replace('mtp.layers.0.', 'mtp.')}{name}.weight"] for name in names
        ]
        self._first, self._second, self._norm, self._join = weights
        self._hidden_first = family == "mimo"
        self._eps = 1e-5 if family == "mimo" else 1e-6

    def draft(
        self,
        history: list[int],
        most: int,
        unseen: frozenset[int] = frozenset(),
        begin: int = 0,
    ) -> list[int]:
        """Return the head's best guesses after `history`. `unseen`: positions before which the
        hidden row is unknown."""
        import mlx.core as mx

        hidden = self._model.model(mx.array([history[:-1]]))[0]
        known = [0.0 if at in unseen else 1.0 for at in range(len(history))]
        rows = mx.concatenate([mx.zeros((1, hidden.shape[1])), hidden]) * mx.array(known)[:, None]
        tokens = list(history)
        for _ in range(most):
            pair = [mx.fast.rms_norm(self._model.model.embed_tokens(mx.array(tokens)),
                self._norm_of(False), self._eps),
                    mx.fast.rms_norm(rows, self._norm_of(True), self._eps)]  # fmt: skip
            x = mx.concatenate(pair[::-1] if self._hidden_first else pair, axis=-1) @ self._join.T
            made = mx.fast.rms_norm(
                self._layer(x[None, begin:], "causal", None)[0, -1:], self._norm, self._eps
            )
            tokens.append(int(mx.argmax(self._model.lm_head(made)[0])))
            rows = mx.concatenate([rows, made])
        return tokens[len(history) :]

    def _norm_of(self, hidden: bool) -> Any:
        return self._first if hidden is self._hidden_first else self._second


@dataclass
class Line:
    """A sequence's tokens, the head's read position, and the hidden rows that are lost."""

    tokens: list[int] = field(default_factory=list)
    read: int = 0
    unseen: frozenset[int] = frozenset()

    def grow(self, tokens: list[int]) -> None:
        self.tokens += tokens
        if len(self.tokens) - self.read >= LATE:
            self.read = len(self.tokens)

    def cut(self, n: int) -> Line:
        lost = {n} if 0 < n < self.read else set()
        return Line(
            self.tokens[:n],
            min(n, self.read),
            frozenset({at for at in self.unseen if at <= n} | lost),
        )


@pytest.fixture(scope="module", params=["mimo", "qwen"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mlx.write_mtp(tmp_path_factory.mktemp("mtp") / family, family)


@pytest.fixture(scope="module")
def reference(folder: Path, family: str) -> Reference:
    return Reference(folder, family)


def load(path: Path, **more: object) -> Backend:
    spec = {"n_ctx": 2048, "n_seq_max": 6, "n_batch": 128, "mtp": True, "n_rewind": MOST, **more}
    return backend_type.load(LoadSpec(str(path), **spec))  # type: ignore[arg-type]


def test_a_head_that_rests_guesses_from_the_newest_tokens(
    folder: Path, reference: Reference
) -> None:
    backend = load(folder)
    resting_heads_guess_from_the_newest_tokens(backend, random.Random(5), reference.draft)
    backend.close()


def words(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, 250) for _ in range(n)]


def test_guesses_are_those_from_scratch_after_any_history(
    folder: Path, reference: Reference
) -> None:
    backends, rng = [load(folder), load(folder)], random.Random(1)
    # If states are stored separately from the KV, a sequence is truncated and forked only at stored
    # states.
    stateful = backends[0].capabilities.states
    held: list[tuple[Backend, int, Line]] = []
    asked = good = guessed = 0
    kinds: set[str] = set()
    for _ in range(60):
        here = rng.choice(backends)
        mine = [h for h in held if h[0] is here]
        kind = rng.choice(["new", "read", "draft", "draft", "draft", "fork", "cut", "move", "drop"])
        if kind == "new" and len(mine) < 3:
            held.append((here, here.new_sequence(), Line()))
        elif kind == "read" and mine:
            chunks = {s: (line, words(rng, rng.choice([1, 2, 20, 50]))) for _, s, line in mine[:2]}
            here.step([Chunk(s, tokens, rng.randint(0, 1)) for s, (_, tokens) in chunks.items()])
            for line, tokens in chunks.values():
                line.grow(tokens)
        elif kind == "draft" and (begun := [h for h in mine if h[2].tokens]):
            newest = [rng.randrange(3, 250) for _ in begun]
            drafts = here.draft([(s, n, MOST) for (_, s, _), n in zip(begun, newest, strict=True)])
            for (_, _, line), n, draft in zip(begun, newest, drafts, strict=True):
                line.read = len(line.tokens)
                expected = reference.draft([*line.tokens, n], MOST, line.unseen)
                asked += 1
                good += draft == expected[: len(draft)]
                guessed += len(draft)
            chunks_read = [
                Chunk(s, [n, *d], 1 + len(d))
                for (_, s, _), n, d in zip(begun, newest, drafts, strict=True)
            ]
            here.step(chunks_read)
            for (_, s, line), chunk in zip(begun, chunks_read, strict=True):
                kept = 1 + rng.randrange(len(chunk.tokens))
                line.grow(list(chunk.tokens[:kept]))
                here.truncate(s, len(line.tokens))
        elif kind == "fork" and mine and len(mine) < 4:
            _, s, line = rng.choice(mine)
            at = len(line.tokens) if stateful else rng.randint(0, len(line.tokens))
            held.append((here, here.fork(s, at), line.cut(at)))
        elif kind == "cut" and mine:
            _, s, line = rng.choice(mine)
            at = 0 if stateful else rng.randint(0, len(line.tokens))
            here.truncate(s, at)
            shorter = line.cut(at)
            line.tokens, line.read, line.unseen = shorter.tokens, shorter.read, shorter.unseen
        elif kind == "move" and (begun := [h for h in mine if len(h[2].tokens) > 1]):
            _, s, line = rng.choice(begun)
            n, there = len(line.tokens), rng.choice(backends)
            if len([h for h in held if h[0] is there]) > 4:
                continue
            cuts = [0, rng.randint(1, n - 1), n]
            blocks = [(a, b, here.export_range(s, a, b)) for a, b in pairwise(cuts)]
            line.read = n
            copy = there.new_sequence()
            for a, b, data in blocks:
                there.import_range(copy, data, a, b)
            if stateful:
                there.import_state(copy, here.export_state(s), n)
            held.append((there, copy, Line(list(line.tokens), n, line.unseen | {n})))
        elif kind == "drop" and len(mine) > 2:
            held.remove(mine[0])
            here.drop(mine[0][1])
        else:
            continue
        kinds.add(kind)
    assert kinds == {"new", "read", "draft", "fork", "cut", "move", "drop"}
    assert asked > 20
    assert good >= asked - asked // 20, "near-ties aside"
    assert guessed > 2 * asked, "they dare more than a token"
    for backend in backends:
        backend.check_integrity()
        backend.close()


def test_checkpoints_with_and_without_draft_heads_are_distinguished(folder: Path) -> None:
    on, off, rng = load(folder), load(folder, mtp=False), random.Random(2)
    assert (on.capabilities.drafts, on.capabilities.draft_kind) == (16, "mtp")
    assert off.capabilities.drafts == 0
    assert on.info.fingerprint != off.info.fingerprint
    with pytest.raises(BackendFailure, match="without its draft heads"):
        off.draft([(0, 1, 1)])
    tokens = words(rng, 60)
    for one, other in ((on, off), (off, on)):
        source, copy = one.new_sequence(), other.new_sequence()
        one.step([Chunk(source, tokens)])
        with pytest.raises(BackendFailure, match="KV block"):
            other.import_range(copy, one.export_range(source, 0, 60), 0, 60)
    assert on.memory().kv_bytes > off.memory().kv_bytes
    for backend in (on, off):
        backend.close()


def test_draft_heads_do_not_change_logits(folder: Path) -> None:
    import numpy as np

    on, off, tokens = load(folder), load(folder, mtp=False), words(random.Random(3), 90)
    rows = []
    for backend in (on, off):
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, tokens[:80], 0)])
        rows.append(backend.step([Chunk(sequence, tokens[80:], 10)]).logits(0).copy())
        backend.close()
    np.testing.assert_array_equal(*rows)


def test_failed_draft_heads_recover_and_change_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm_backends.mlx.mtp import MtpModule

    backend, rng = load(folder), random.Random(4)
    sequence = backend.new_sequence()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(MtpModule, "__call__", broken)
        backend.step([Chunk(sequence, words(rng, 40))])
        assert backend.draft([(sequence, 5, MOST)]) == [[]]
    backend.step([Chunk(sequence, words(rng, 40))])
    firsts = range(5, 15)
    assert any(backend.draft([(sequence, t, MOST)])[0] for t in firsts), (
        "what was read since is enough to guess from"
    )
    copy = backend.new_sequence()
    backend.import_range(copy, backend.export_range(sequence, 0, 80), 0, 80)
    if backend.capabilities.states:
        backend.import_state(copy, backend.export_state(sequence), 80)
    backend.step([Chunk(sequence, [7, 8]), Chunk(copy, [7, 8])])
    assert any(backend.draft([(sequence, t, MOST), (copy, t, MOST)])[1] for t in firsts)
    backend.close()


@pytest.mark.parametrize("family", ["qwen", "qwen-moe"])
def test_a_checkpoint_in_the_published_layout_has_the_same_heads(
    family: str, tmp_path: Path
) -> None:
    folder = tiny_mlx.write_mtp(tmp_path / "mlx", family)
    backends, tokens = (
        [load(folder), load(tiny_mlx.as_published(folder, tmp_path / "raw"))],
        words(random.Random(5), 50),
    )
    drafts = []
    for backend in backends:
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, tokens)])
        drafts.append([backend.draft([(sequence, newest, MOST)]) for newest in range(20, 40)])
        backend.close()
    assert sum(a == b for a, b in zip(*drafts, strict=True)) >= 19


def test_models_whose_heads_cannot_run_are_refused_with_the_reason(tmp_path: Path) -> None:
    import mlx.core as mx

    folder = tiny_mlx.write_mtp(tmp_path / "qwen", "qwen")

    def refused(path: Path, reason: str, **more: object) -> None:
        with pytest.raises(LoadError, match=reason):
            load(path, **more)
        left = load(path, drafter_optional=True, **more)
        assert left.capabilities.drafts == 0
        assert any(reason.split("'")[0] in note for note in left.info.load_notes)
        left.close()

    refused(
        tiny_mlx.write_llama(tmp_path / "llama"),
        "draft heads of 'llama' models are not supported on MLX",
    )
    without = tmp_path / "without"
    shutil.copytree(folder, without, ignore=shutil.ignore_patterns("head", "model-mtp*"))
    refused(without, "contains no draft heads")
    held = mx.load(str(folder / "model-mtp.safetensors"))
    second = tmp_path / "second"
    shutil.copytree(folder, second, ignore=shutil.ignore_patterns("head"))
    more = {
        name.replace("layers.0.", "layers.1."): value
        for name, value in held.items()
        if "layers.0." in name
    }
    mx.save_safetensors(str(second / "model-mtp2.safetensors"), more)
    refused(second, "several draft heads")
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut, ignore=shutil.ignore_patterns("head"))
    few = dict(list(held.items())[:-1])
    mx.save_safetensors(str(cut / "model-mtp.safetensors"), few)
    refused(cut, "can't be read")


def test_quantised_heads_are_loaded_with_their_quantisation(tmp_path: Path) -> None:
    """The model and its head are quantised to 8 bits. The head then makes the same guesses as the
    unquantised one, most of the time."""
    import mlx.core as mx

    folder = tiny_mlx.write_mtp(tmp_path / "whole", likeness=0.3)
    small = tmp_path / "small"
    shutil.copytree(folder, small, ignore=shutil.ignore_patterns("head", "*.safetensors"))
    for file in folder.glob("*.safetensors"):
        packed = {}
        for name, value in mx.load(str(file)).items():
            if value.ndim == 2:
                parts = mx.quantize(value, group_size=32, bits=8)
                names = (
                    name,
                    *(name.removesuffix("weight") + kind for kind in ("scales", "biases")),
                )
                packed |= dict(zip(names, parts, strict=True))
            else:
                packed[name] = value
        mx.save_safetensors(str(small / file.name), packed, {"format": "mlx"})
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(
        json.dumps({**config, "quantization": {"group_size": 32, "bits": 8}})
    )
    tokens, firsts = words(random.Random(6), 50), []
    make: Callable[[Path], Backend] = load
    for path in (folder, small):
        backend = make(path)
        sequence = backend.new_sequence()
        backend.step([Chunk(sequence, tokens)])
        firsts.append([backend.draft([(sequence, newest, 1)]) for newest in range(20, 50)])
        backend.close()
    assert sum(a == b != [[]] for a, b in zip(*firsts, strict=True)) >= 20
