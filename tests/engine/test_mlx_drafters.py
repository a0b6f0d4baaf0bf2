"""Trained drafters on MLX in the complete engine: batching, caching, forks, cancels, disk and a
restart change no answer, and some drafts are accepted."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.crowds import crowds_equal_isolated_runs
from engine.drive import GREEDY, Outcome, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Sampling
from localllm.planner.memory import mlx_companion_bytes
from localllm.planner.types import CompanionDrafter, RunSettings
from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.mlx import backend_type as mlx
from localllm_catalog import catalog
from models import tiny_mlx_drafters
from support.pictures import needs_mlx_vlm
from support.requests import request_for

pytestmark = [pytest.mark.mlx, needs_mlx_vlm()]
# In the engine DFlash2's selector behaves like DSpark's Markov head; the backend's tests cover the
# difference.
KINDS = ("eagle3", "dflash", "dspark")
USUAL = [
    ("eagle3", "full"), ("dflash", "sliding"), ("dspark", "delta"), ("eagle3", "moe"),
]  # fmt: skip


# Tokens per answer.
N = 24


def pair(tmp_path: Path, kind: str, memory: str) -> LoadSpec:
    model = tiny_mlx_drafters.write_target(tmp_path / "model", memory)
    drafter = tiny_mlx_drafters.write_knowing(tmp_path / "drafter", kind, model)
    return LoadSpec(str(model), n_ctx=768, n_seq_max=4, n_batch=64, drafter=str(drafter))


def drafting(spec: LoadSpec, settings: EngineSettings, *, idle: bool = False) -> Engine:
    """Return an engine that drafts whenever a draft has any chance. The clock stands still, and a
    drafted token and a further row cost almost nothing."""
    engine = Engine(mlx.load(spec), settings)
    (drafter,) = engine.speculator.drafters.values()
    # These few tokens would only be enough for some trials, which may all be wrong.
    (account,) = engine.speculator.accounts.values()
    account.trusted = True
    if idle:
        settle(engine)
        assert drafter.token_s > 0, "measured while idle"
    engine.speculator.cost.set({1: 1.0, 32: 1.01})
    engine.speculator.cost.observe = lambda *_: None  # type: ignore[method-assign]
    drafter.clock, drafter.token_s = (lambda: 0.0), 1e-9
    return engine


LONG = [
    pytest.param(kind, memory, marks=pytest.mark.long)
    for kind in KINDS
    for memory in ("full", "sliding", "delta", "moe")
    if (kind, memory) not in USUAL
]


@pytest.mark.parametrize(("kind", "memory"), [*USUAL, *LONG])
def test_random_mixes_with_drafters_equal_isolated_undrafted_runs(
    kind: str, memory: str, tmp_path: Path
) -> None:
    spec = pair(tmp_path, kind, memory)
    alone = mlx.load(replace(spec, drafter=""))
    settings = EngineSettings(
        draft="auto",
        cache_bytes=600_000,
        disk_dir=str(tmp_path / "kv"),
        disk_bytes=10**8,
        headroom_bytes=0,
    )
    accepted = drafted = restored = 0
    # The second engine finds the first one's prefixes on disk, together with the drafter's KV.
    for mixes in (2, 1):
        engine = drafting(spec, settings, idle=True)
        crowds_equal_isolated_runs(
            engine, alone, f"{kind} {memory}", mixes, router_flips=0.05 * (memory == "moe")
        )
        settle(engine)
        snapshot = engine.snapshot()
        restored = int(snapshot["restored_tokens"])
        name = "eagle3" if kind == "eagle3" else "dflash"
        accepted += int(snapshot[f"accepted_{name}_tokens"])
        drafted += int(snapshot[f"drafted_{name}_tokens"])
        engine.close()
    alone.close()
    assert 0 < accepted < drafted
    assert restored > 0


def answer(engine: Engine, prompt: list[int], **how: Any) -> list[int]:
    how = {"sampling": GREEDY, "ignore_eos": True, "cache_prompt": False, **how}
    outcome = Outcome()
    outcome.take(engine.submit(request_for("a", prompt, N, **how), prompt))
    while engine.has_work:
        outcome.take(engine.step())
    return outcome.tokens["a"]


def own_loop(model: Any, drafter: str, prompt: list[int]) -> list[int]:
    """Return the tokens that mlx-vlm's own loop generates."""
    import mlx.core as mx
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.speculative import load_drafter

    own, kind = load_drafter(drafter)
    steps = generate_step(
        mx.array([prompt]), model, None, None, max_tokens=N, temperature=0.0,
        draft_model=own, draft_kind=kind,
    )  # fmt: skip
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("memory", ["gemma4-full", "gemma4", "delta", "moe"])
def test_drafted_text_equals_undrafted_decoding_and_mlx_vlms_loop(
    memory: str, tmp_path: Path
) -> None:
    from mlx_vlm.utils import load_model

    model = tiny_mlx_drafters.write_target(tmp_path / "model", memory)
    spec = LoadSpec(str(model), n_ctx=256, n_seq_max=1, n_batch=64)
    rng = random.Random(7)
    prompt = [rng.randrange(3, 250) for _ in range(40)]
    plain = Engine(mlx.load(spec), EngineSettings())
    expected = answer(plain, prompt)
    warm = {"sampling": Sampling(temperature=0.9, seed=5)}
    sampled = answer(plain, prompt, **warm)
    plain.close()
    theirs = load_model(model)
    for design in tiny_mlx_drafters.DESIGNS:
        drafter = tiny_mlx_drafters.write_knowing(
            tmp_path / design, design, model, layout="speculators"
        )
        engine = drafting(replace(spec, drafter=str(drafter)), EngineSettings(draft="auto"))
        assert answer(engine, prompt) == expected, design
        kind = "eagle3" if design == "eagle3" else "dflash"
        snapshot = engine.snapshot()
        assert int(snapshot[f"drafted_{kind}_tokens"]) > 0
        # Without a selector, DFlash predicts none of these tokens.
        assert design == "dflash" or int(snapshot[f"accepted_{kind}_tokens"]) > 0, design
        # The same seed gives the same text, so drafts do not change the distribution.
        assert answer(engine, prompt, **warm) == sampled, design
        engine.close()
        assert own_loop(theirs, str(drafter), prompt) == expected, design


@pytest.mark.parametrize("kind", tiny_mlx_drafters.DESIGNS)
def test_a_full_disk_and_a_restart_change_no_answer(kind: str, tmp_path: Path) -> None:
    spec = pair(tmp_path, kind, "full")
    rng = random.Random(8)
    prompt = [rng.randrange(3, 250) for _ in range(200)]
    plain = Engine(mlx.load(replace(spec, drafter="")), EngineSettings())
    expected = answer(plain, prompt)
    plain.close()
    folder = str(tmp_path / "kv")
    written = EngineSettings(draft="auto", disk_dir=folder, disk_bytes=10**8, headroom_bytes=0)
    # More free space than any disk has is required: no data is written, but existing data can still
    # be read.
    full = replace(written, disk_free_bytes=10**15)
    restored = []
    for settings in (full, written, full):
        engine = drafting(spec, settings)
        assert answer(engine, prompt, cache_prompt=True) == expected
        settle(engine)
        restored.append(int(engine.snapshot()["restored_tokens"]))
        engine.close()
    assert restored[:2] == [0, 0]
    assert restored[2] > 100


def test_a_plan_counts_rows_that_the_drafter_has_not_processed(tmp_path: Path) -> None:
    """The plan covers these rows for each sequence. The tiny model's rows have 32 bits, and plans
    assume 16."""
    held = []
    for asked in (1, 4):
        backend = mlx.load(pair(tmp_path / str(asked), "dflash", "full"))
        sequences = [backend.new_sequence() for _ in range(asked)]
        for sequence in sequences:
            backend.step([Chunk(sequence, [5], 1)]).argmax(0)
        before = mx.get_active_memory()
        for token in range(150):
            backend.step([Chunk(s, [5 + token % 90], 1) for s in sequences]).argmax(0)
        held.append(mx.get_active_memory() - before)
        backend.close()
    read = CompanionDrafter("dflash", "", 0, kv_elements=0, width=64, is_folder=True)
    model = replace(catalog.load().models[0], hidden_size=64, vocab_size=0)
    one, four = (
        mlx_companion_bytes(model, read, RunSettings(512, slots=n, n_batch=64)) for n in (1, 4)
    )
    assert 3 * 150 * 64 * 4 < held[1] - held[0] <= 2 * (four - one)
