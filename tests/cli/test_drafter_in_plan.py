"""A drafter is part of the plan: its memory is counted, and it is loaded as planned."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from localllm.cli.serve.served_models import planned_model
from localllm.device.detect import detect
from localllm.device.name_lookup import resolve
from localllm.engine.worker import backends
from localllm.errors import ModelFileError, UnsupportedError
from localllm.library import folders
from localllm.load.load_plan import load_plan_named
from localllm.load.options import load_spec, run_settings
from localllm.planner.explain import explain
from localllm.server.models.worker import ModelWorker
from localllm.settings import Settings
from localllm_backends.contract import LoadError, LoadSpec
from localllm_backends.mlx import backend_type as mlx
from models import tiny_drafters, tiny_mlx, tiny_mlx_drafters, tiny_mtp
from support.pictures import needs_mlx_vlm


@pytest.mark.parametrize("context", [None, 2048])
def test_a_named_drafter_is_counted_in_the_memory_of_the_worker(
    smollm2: Path, context: int | None
) -> None:
    alone = load_plan_named(str(smollm2), Settings({"context": context, "draft": "off"}))
    drafted = load_plan_named(str(smollm2), Settings({"context": context, "draft": str(smollm2)}))
    assert alone.plan is not None
    assert drafted.plan is not None
    assert drafted.options.draft_path == str(smollm2)
    assert alone.plan.memory.draft_bytes == 0
    assert drafted.plan.memory.draft_bytes > 0.9 * smollm2.stat().st_size
    assert drafted.needs_bytes - alone.needs_bytes == drafted.plan.memory.draft_bytes


def test_the_loaded_settings_equal_the_planned_ones(smollm2: Path) -> None:
    load = load_plan_named(
        str(smollm2), Settings({"context": 4096, "kv_type": "q8_0", "parallel": 3})
    )
    assert load.plan is not None
    spec, planned_model = load.options.spec, load.plan.settings
    assert (spec.n_ctx, spec.n_seq_max, spec.kv_type_k, spec.kv_type_v) == (4096, 3, "q8_0", "q8_0")
    assert (
        planned_model.n_ctx,
        planned_model.slots,
        planned_model.kv_type_k,
        planned_model.kv_type_v,
    ) == (
        4096,
        3,
        "q8_0",
        "q8_0",
    )
    assert (spec.n_batch, spec.n_outputs, spec.n_gpu_layers) == (
        planned_model.n_batch, planned_model.n_outputs, planned_model.placement.gpu_layers,
    )  # fmt: skip
    backend = backends.for_path(str(smollm2)).load(spec)
    try:
        assert (backend.info.n_batch, backend.info.kv_type_k) == (planned_model.n_batch, "q8_0")
    finally:
        backend.close()


def test_a_file_that_cannot_be_planned_is_loaded_with_the_chosen_and_default_settings() -> None:
    chosen = Settings({"context": 4096, "kv_type": "q8_0", "parallel": 3, "draft": "mtp"})
    spec = load_spec("m.gguf", run_settings(None, chosen), n_threads=2)
    assert (spec.n_ctx, spec.n_seq_max, spec.n_batch, spec.n_outputs, spec.n_threads) == (
        4096,
        3,
        0,
        0,
        2,
    )
    assert (spec.kv_type_k, spec.kv_type_v, spec.n_gpu_layers, spec.mtp) == (
        "q8_0",
        "q8_0",
        -1,
        True,
    )
    plain = load_spec("m.gguf", run_settings(None, Settings()))
    assert (plain.n_ctx, plain.kv_type_k, plain.mtp) == (0, "f16", False)


def test_a_trained_drafter_next_to_the_model_is_found_counted_and_loaded(tmp_path: Path) -> None:
    path = tiny_drafters.write_target(tmp_path / "tiny-f32.gguf", layers=40)
    alone = load_plan_named(str(path), Settings({"context": 2048}))
    drafter = tiny_drafters.write_eagle3(tmp_path / "tiny-eagle3-f32.gguf", own=False)
    load = load_plan_named(str(path), Settings({"context": 2048}))
    assert load.plan is not None
    assert alone.plan is not None
    assert alone.options.spec.drafter == ""
    assert load.options.spec.drafter == str(drafter)
    assert load.plan.memory.draft_bytes > drafter.stat().st_size
    assert load.needs_bytes - alone.needs_bytes == load.plan.memory.draft_bytes
    assert load.plan.drafting is not None
    assert "assumed" in load.plan.drafting.basis
    assert any("eagle3" in line for line in explain(load.plan, detect()))
    backend = backends.for_path(str(path)).load(load.options.spec)
    plain = backends.for_path(str(path)).load(alone.options.spec)
    assert backend.capabilities.draft_kind == "eagle3"
    took = backend.memory().total_bytes - plain.memory().total_bytes
    # During decode, each sequence has rows of five layers for up to 256 unread tokens.
    took += 256 * 5 * 4 * load.plan.model.hidden_size * load.plan.settings.slots
    assert took <= load.plan.memory.draft_bytes <= 2.5 * took
    backend.close()
    plain.close()
    for off in ("off", "ngram"):
        assert load_plan_named(str(path), Settings({"draft": off})).options.spec.drafter == ""


def test_an_unsuitable_drafter_is_skipped_if_found_and_refused_if_named(tmp_path: Path) -> None:
    path = tiny_drafters.write_target(tmp_path / "tiny-f32.gguf", layers=40)
    wide = tiny_drafters.write_eagle3(tmp_path / "tiny-eagle3-f32.gguf", width=96)
    assert load_plan_named(str(path), Settings({"context": 2048})).options.spec.drafter == ""
    with pytest.raises(UnsupportedError, match="a hidden size of 96, but") as e:
        load_plan_named(str(path), Settings({"draft": str(wide)}))
    assert "published for this model" in str(e.value.hint)
    # A fault that only loading detects.
    wide.unlink()
    other = tiny_drafters.write_eagle3(
        tmp_path / "tiny-eagle3-f32.gguf", layers=(0, 1, 90), own=False
    )
    found = load_plan_named(str(path), Settings({"context": 2048})).options.spec
    backend = backends.for_path(str(path)).load(found)
    assert backend.capabilities.drafts == 0
    backend.close()

    async def said() -> str:
        """Return the notice that the model's users see."""
        served = planned_model(load_plan_named(str(path), Settings({"context": 2048})))
        worker = ModelWorker("tiny", served)
        await worker.engine()
        await worker.close()
        return worker.notice

    assert (
        "the model runs without its drafter: 'tiny-eagle3-f32.gguf' can't draft"
    ) in asyncio.run(said())
    named = load_plan_named(
        str(path), Settings({"context": 2048, "draft": str(other)})
    ).options.spec
    with pytest.raises(LoadError, match="reads the layers"):
        backends.for_path(str(path)).load(named)


def test_heads_in_the_models_own_file_are_found_counted_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft heads in the model's own file are found, counted and loaded.

    This uses a card: its step of 120 layers takes longer than the host's work for a draft. A CPU
    gains nothing, so it uses the heads only on request.
    """
    path = tiny_mtp.write_mtp(tmp_path / "tiny.gguf", layers=120, likeness=0.35)
    unasked = load_plan_named(str(path), Settings({"context": 2048}))
    assert not unasked.options.spec.mtp
    card = resolve("RTX 4090")
    monkeypatch.setattr("localllm.device.detect.detect", lambda: card)
    load = load_plan_named(str(path), Settings({"context": 2048}))
    alone = load_plan_named(str(path), Settings({"context": 2048, "draft": "ngram"}))
    named = load_plan_named(str(path), Settings({"context": 2048, "draft": "mtp"}))
    assert load.plan is not None
    assert named.plan is not None
    assert (
        load.options.spec.mtp,
        load.options.spec.drafter_optional,
        load.options.engine["draft"],
    ) == (
        True,
        True,
        "mtp",
    )
    assert (alone.options.spec.mtp, named.options.spec.drafter_optional) == (False, False)
    assert (
        load.needs_bytes - alone.needs_bytes
        == load.plan.memory.draft_bytes
        == named.plan.memory.draft_bytes
        > 0
    )
    assert load.plan.drafting is not None
    assert "published" in load.plan.drafting.basis
    said = " ".join(" ".join(explain(load.plan, card)).split())
    assert "mtp, one stream" in said
    assert load.plan.drafting.basis in said
    assert planned_model(load).facts.physics["drafting"]["basis"] == load.plan.drafting.basis


@pytest.mark.mlx
@pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available()))
@pytest.mark.parametrize(("family", "rewind"), [("mimo", 0), ("qwen", 3)])
def test_heads_in_an_mlx_folder_are_loaded_by_name_and_planned(
    family: str, rewind: int, tmp_path: Path
) -> None:
    path = str(tiny_mlx.write_mtp(tmp_path / family, family))
    named, alone = (
        load_plan_named(path, Settings({"context": 1024, "draft": draft}))
        for draft in ("mtp", "auto")
    )
    assert (named.options.spec.mtp, named.options.spec.n_rewind) == (True, rewind)
    assert (alone.options.spec.mtp, alone.options.spec.n_rewind) == (False, 0)
    assert named.plan is not None
    assert alone.plan is not None
    assert named.plan.memory.draft_bytes > 0
    assert named.needs_bytes > alone.needs_bytes


def test_an_assistant_drafter_is_counted_and_loaded_by_its_path(tmp_path: Path) -> None:
    target = tiny_drafters.write_gemma4(tmp_path / "g4.gguf")
    fits, wide = (tiny_drafters.write_assistant(tmp_path / f"{w}.gguf", width=w) for w in (64, 96))
    load = load_plan_named(str(target), Settings({"context": 1024, "draft": str(fits)}))
    assert load.plan is not None
    assert load.options.spec.drafter == str(fits)
    assert load.plan.memory.draft_bytes > fits.stat().st_size
    with pytest.raises(UnsupportedError, match="a hidden size of 96, but g4 has 64"):
        load_plan_named(str(target), Settings({"context": 1024, "draft": str(wide)}))


def test_draft_heads_that_disable_a_feature_or_cannot_run_are_left_out(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV of windows and states is stored in blocks only without drafting, as agents and several
    # streams need.
    monkeypatch.setattr("localllm.device.detect.detect", lambda: resolve("RTX 4090"))
    for write in (tiny_mtp.write_sliding_mtp, tiny_mtp.write_hybrid_mtp):
        path = str(write(tmp_path / "m.gguf"))
        for chosen, purpose in (({}, "coding"), ({"parallel": 2}, "chat")):
            settings = Settings({"context": 2048, **chosen})
            assert not load_plan_named(path, settings, purpose).options.spec.mtp
    backend = backends.for_path(str(tiny_model)).load(
        LoadSpec(str(tiny_model), n_ctx=256, mtp=True, drafter_optional=True)
    )
    assert backend.capabilities.drafts == 0
    assert "its header lists no draft heads" in backend.info.load_notes[0]
    backend.close()


@needs_mlx_vlm()
@pytest.mark.mlx
def test_a_drafter_next_to_an_mlx_folder_is_found_counted_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.device.detect.detect", lambda: resolve("M4 Max 128GB"))
    path = tiny_mlx.write(tmp_path / "Tiny-1B-4bit", {**tiny_mlx.LLAMA, "num_hidden_layers": 40})
    settings = Settings({"context": 2048})
    alone = load_plan_named(str(path), settings)
    assert alone.plan is not None
    assert alone.options.spec.drafter == ""
    tiny_mlx_drafters.write(tmp_path / "Other-1B-DFlash", "dflash")
    assert load_plan_named(str(path), settings).options.spec.drafter == ""
    drafter = tiny_mlx_drafters.write(tmp_path / "Tiny-1B-DFlash-b8", "dflash")
    load = load_plan_named(str(path), settings)
    assert load.plan is not None
    assert load.options.spec.drafter == str(drafter)
    stored = (drafter / "model.safetensors").stat().st_size
    assert load.plan.memory.draft_bytes > stored
    assert load.needs_bytes - alone.needs_bytes == load.plan.memory.draft_bytes
    assert load.plan.drafting is not None
    assert load.plan.drafting.low < load.plan.drafting.high
    assert any("dflash, one stream" in line for line in explain(load.plan, detect()))
    backend = backends.for_path(str(path)).load(load.options.spec)
    assert backend.capabilities.draft_kind == "dflash"
    backend.close()
    assert load_plan_named(str(path), Settings({"draft": "off"})).options.spec.drafter == ""
    # A drafter from the hub is requested by its repository.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--tiny-org--Tiny-DFlash" / "snapshots" / "abc"
    tiny_mlx_drafters.write(snapshot, "dflash2")
    named = load_plan_named(str(path), Settings({"draft": "tiny-org/Tiny-DFlash"}))
    assert named.options.spec.drafter == str(snapshot)
    # A folder with quantised weights is a model, unless its config is that of a drafter.
    tiny_mlx_drafters.write(tmp_path / "packed-DFlash", "dflash", bits=8)
    assert [model.path for model in folders.scan(tmp_path, "folder")] == [path]


@pytest.mark.mlx
@pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available()))
def test_a_drafter_of_the_other_format_is_refused(tmp_path: Path) -> None:
    drafters = {
        str(tiny_mlx.write_llama(tmp_path / "mlx")): tiny_drafters.write_eagle3(
            tmp_path / "e.gguf"
        ),
        str(tiny_drafters.write_target(tmp_path / "m.gguf")): tiny_mlx_drafters.write(
            tmp_path / "d", "eagle3"
        ),
    }
    for path, drafter in drafters.items():
        with pytest.raises(UnsupportedError, match="which drafts only for a"):
            load_plan_named(path, Settings({"context": 1024, "draft": str(drafter)}))


@pytest.mark.mlx
@pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available()))
def test_a_drafter_whose_weights_are_a_dead_link_is_skipped_if_found_and_refused_if_named(
    tmp_path: Path,
) -> None:
    path = tiny_mlx.write_llama(tmp_path / "Tiny-1B-4bit")
    drafter = tiny_mlx_drafters.write(tmp_path / "Tiny-1B-DFlash", "dflash")
    (drafter / "model.safetensors").unlink()
    for to in ("absent", "model.safetensors"):
        (drafter / "model.safetensors").symlink_to(drafter / to)
        assert load_plan_named(str(path), Settings({"context": 1024})).options.spec.drafter == ""
        with pytest.raises(ModelFileError, match="is not a model"):
            load_plan_named(str(path), Settings({"context": 1024, "draft": str(drafter)}))
        (drafter / "model.safetensors").unlink()
