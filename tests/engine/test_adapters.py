"""LoRA adapters on both engines: they match merged weights, and KV of another adapter is never
used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from engine.crowds import crowds_equal_isolated_runs
from engine.drive import GREEDY, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.load.load_plan import load_plan_named
from localllm.settings import Settings
from localllm_backends.contract import Backend, Chunk, LoadError, LoadSpec, LoraAdapter, Placement
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.mlx import backend_type as mlx
from models import tiny_gguf, tiny_lora, tiny_mlx
from support.requests import request_for

# Tolerance for logits of tiny float32 models: separately added adapters round differently.
NOISE = 2e-3
PROMPT = [510, *(3 + i * 7 % 247 for i in range(300))]


@dataclass(frozen=True)
class Family:
    """A tiny model with two adapters, and the functions that load and merge it."""

    base: Path
    first: Path
    second: Path
    load: Callable[[LoadSpec], Backend]
    merge: Callable[..., Path]

    def spec(self, *adapters: LoraAdapter) -> LoadSpec:
        placed = Placement(gpu_layers=0)
        spec = LoadSpec(str(self.base), n_ctx=768, n_seq_max=4, n_batch=64, placement=placed)
        return replace(spec, adapters=adapters)

    def merged(self, path: Path, scale: float = 1.0) -> Backend:
        """Load the model with the first adapter merged into its weights."""
        made = self.merge(path, self.base, self.first, scale)
        return self.load(replace(self.spec(), path=str(made)))


FAMILIES = [
    "llamacpp",
    pytest.param(
        "mlx",
        marks=[
            pytest.mark.mlx,
            pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
        ],
    ),
]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    return family_of(request.param, tmp_path)


def family_of(kind: str, folder: Path) -> Family:
    if kind == "mlx":
        base = tiny_mlx.write_llama(folder / "base")
        first, second = (
            tiny_lora.write_mlx(folder / name, base, seed=seed)
            for seed, name in enumerate(("first", "second"))
        )
        return Family(base, first, second, mlx.load, tiny_lora.merge_mlx)
    base = tiny_gguf.write_llama(folder / "base.gguf")
    first, second = (
        tiny_lora.write(folder / f"{name}.gguf", base, seed=seed)
        for seed, name in enumerate(("first", "second"))
    )
    return Family(base, first, second, llamacpp.load, tiny_lora.merge)


def rows(backend: Backend, tokens: list[int] = PROMPT) -> np.ndarray:
    """Return the logits after every 64th of `tokens` and close `backend`."""
    sequence = backend.new_sequence()
    found = [
        backend.step([Chunk(sequence, tokens[i : i + 64])]).logits(0)[-1].copy()
        for i in range(0, len(tokens), 64)
    ]
    backend.close()
    return np.stack(found)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(a).max())


def test_an_adapter_equals_merged_weights_and_at_scale_0_the_base_model(
    family: Family, tmp_path: Path
) -> None:
    first = str(family.first)
    plain = rows(family.load(family.spec()))
    assert apart(rows(family.load(family.spec(LoraAdapter(first, 0.0)))), plain) < 1e-5
    for scale in (1.0, 0.5):
        laid = rows(family.load(family.spec(LoraAdapter(first, scale))))
        assert apart(laid, rows(family.merged(tmp_path / f"m{scale}", scale))) < NOISE
        assert apart(laid, plain) > 5 * NOISE, "it changes nothing: this would show nothing"


@pytest.mark.mlx
@pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available()))
def test_adapter_logits_equal_those_of_mlx_lm(tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_adapters, load_model

    base = tiny_mlx.write_4bit(tmp_path / "base")
    laid = tiny_lora.write_mlx(tmp_path / "laid", base)
    family = Family(base, laid, laid, mlx.load, tiny_lora.merge_mlx)
    ours = rows(family.load(family.spec(LoraAdapter(str(laid)))), PROMPT[:64])
    model = load_adapters(load_model(base)[0], str(laid))
    model.eval()
    theirs = np.array(model(mx.array([PROMPT[:64]]))[0, -1])
    assert apart(ours[0], theirs) < NOISE


def test_experts_can_be_adapted(tmp_path: Path) -> None:
    base = tiny_gguf.write_moe(tmp_path / "moe.gguf")
    laid = tiny_lora.write(tmp_path / "laid.gguf", base, targets=("ffn_up_exps", "ffn_down_exps"))
    family = Family(base, laid, laid, llamacpp.load, tiny_lora.merge)
    found = rows(family.load(family.spec(LoraAdapter(str(laid)))))
    assert apart(found, rows(family.merged(tmp_path / "merged.gguf"))) < NOISE
    [adapter] = load_plan_named(str(base), Settings({"lora": [str(laid)]})).options.spec.adapters
    assert adapter.n_bytes > 0


def test_no_kv_of_another_adapter_is_read_now_or_after_a_restart(
    family: Family, tmp_path: Path
) -> None:
    copied = tmp_path / "under-another-name"
    (shutil.copytree if family.first.is_dir() else shutil.copy)(family.first, copied)
    first, second = str(family.first), str(family.second)
    kinds = [(), (LoraAdapter(first),), (LoraAdapter(second),), (LoraAdapter(first, 0.5),)]

    def ask(*adapters: LoraAdapter) -> tuple[list[int], list[int]]:
        """Return the answers of two requests to one engine and their numbers of cached tokens."""
        settings = EngineSettings(disk_dir=str(tmp_path / "kv"), disk_bytes=10**9)
        engine = Engine(family.load(family.spec(*adapters)), settings)
        tokens, cached = [], []
        for key in ("a", "b"):
            request = request_for(key, PROMPT, max_tokens=8, sampling=GREEDY, ignore_eos=True)
            outcome = run(engine, request)
            settle(engine)
            tokens += outcome.tokens[key]
            cached.append(outcome.finish(key).usage.cached_tokens)
        engine.close()
        return tokens, cached

    before = [ask(*adapters) for adapters in kinds]
    assert [cached for _, cached in before] == [[0, len(PROMPT) - 1]] * len(kinds)
    answers = [tuple(tokens) for tokens, _ in before]
    assert len(set(answers)) == len(kinds), "they answer the same: this would show nothing"
    for adapters, answer in zip(
        [*kinds, (LoraAdapter(str(copied)),)], [*answers, answers[1]], strict=True
    ):
        tokens, cached = ask(*adapters)
        assert tuple(tokens) == answer
        assert cached == [len(PROMPT) - 1] * 2


def test_concurrent_requests_with_an_adapter_answer_like_the_merged_model(
    family: Family, tmp_path: Path
) -> None:
    """The crowd includes forks, truncated prompts, parking and the disk."""
    settings = EngineSettings(cache_bytes=600_000, disk_dir=str(tmp_path / "kv"), disk_bytes=10**8)
    engine = Engine(family.load(family.spec(LoraAdapter(str(family.first)))), settings)
    alone = family.merged(tmp_path / "merged")
    crowds_equal_isolated_runs(engine, alone, "adapters", 5, router_flips=0.0)
    engine.close()
    alone.close()


def test_additional_contexts_also_apply_the_adapter(tmp_path: Path) -> None:
    """This covers the context of a long prompt and the contexts that compare KV types."""
    base = tiny_gguf.write_llama(tmp_path / "base.gguf")
    laid = tiny_lora.write(tmp_path / "laid.gguf", base)
    merged = tiny_lora.merge(tmp_path / "merged.gguf", base, laid)
    spec = LoadSpec(str(base), n_ctx=768, placement=Placement(gpu_layers=0))
    found = []
    for one in (
        replace(spec, adapters=(LoraAdapter(str(laid)),)), replace(spec, path=str(merged)), spec,
    ):  # fmt: skip
        backend = llamacpp.load(one)
        sequence = backend.new_sequence()
        slices = backend.slice_prefill(sequence, PROMPT)
        while slices.run(1.0) < len(PROMPT):
            pass
        while slices.join():
            pass
        slices.close()
        row = backend.step([Chunk(sequence, [60])]).logits(0)[-1].copy()
        fidelity = backend.compare_kv([("q4_0", "q4_0")], PROMPT[:32])
        backend.close()
        found.append((row, fidelity[0].mean_kl))
    (row, loss), (expected, expected_loss), (plain, plain_loss) = found
    assert apart(row, expected) < NOISE < apart(row, plain)
    assert abs(loss / expected_loss - 1) < 0.05 < abs(loss / plain_loss - 1)


def test_an_adapter_that_does_not_fit_the_model_is_a_one_line_error(
    family: Family, tmp_path: Path
) -> None:
    if family.base.is_dir():
        config = {**tiny_mlx.LLAMA, "hidden_size": 128}
        other = tiny_lora.write_mlx(
            tmp_path / "other-lora", tiny_mlx.write(tmp_path / "other", config)
        )
    else:
        wide = tiny_gguf.write_llama(tmp_path / "wide.gguf", e=128)
        other = tiny_lora.write(tmp_path / "other-lora", wide)
    with pytest.raises(LoadError, match="'other-lora' is not a LoRA adapter for this model: ") as e:
        family.load(family.spec(LoraAdapter(str(other))))
    assert "\n" not in str(e.value)
    assert str(tmp_path) not in str(e.value)
