"""A model is loaded with its projector if that fits and can be read; otherwise the reason is
given."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import DoesNotFitError, UnsupportedError
from localllm.library.catalog import read_header
from localllm.load import load_plan
from localllm.load.load_plan import load_plan_named
from localllm.planner.projector import projector_bytes
from localllm.settings import Settings
from localllm_backends.contract import LoadSpec, Placement
from localllm_backends.llamacpp import LlamaCppType, backend_type
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx_vision
from models.tiny_audio import write_hearing
from models.tiny_mtp import write_mtp
from models.tiny_vision import VisionModel, write_vision
from support.pictures import needs_mlx_vlm, needs_mtmd

MLX_VLM = needs_mlx_vlm()


HEARING = ("ultravox", "gemma4ua", "both")


@pytest.fixture(scope="module", params=["llava", "gemma3", "qwen2vl", *HEARING])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    if request.param in HEARING:
        return write_hearing(tmp_path_factory.mktemp("audio"), request.param)
    return write_vision(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume that this build can read images."""
    monkeypatch.setattr(LlamaCppType, "reads_images", lambda _: None)


def test_the_projector_next_to_a_model_is_loaded_and_planned(
    model: VisionModel, able: None
) -> None:
    load = load_plan_named(str(model.text), Settings({}))
    assert load.options.spec.projector == str(model.projector)
    assert load.projector.audio == any(kind in model.projector.name for kind in HEARING)
    without = load_plan_named(str(model.text), Settings({"images": "off"}))
    assert without.options.spec.projector == ""
    assert without.projector.why_not == "switched off (--images off)"
    assert (
        load.needs_bytes - without.needs_bytes
        == load.projector.need_bytes
        > model.projector.stat().st_size
    )


def test_a_projector_that_does_not_fit_is_left_out_with_the_reason(
    model: VisionModel, able: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = load_plan_named(str(model.text), Settings({"images": "off", "context": 2048}))
    monkeypatch.setattr(load_plan, "free_for_models", lambda *_: alone.needs_bytes + 100_000)
    load = load_plan_named(str(model.text), Settings({"context": 2048}))
    assert load.options.spec.projector == ""
    assert "GB are left" in load.projector.why_not
    with pytest.raises(DoesNotFitError, match="--images on"):
        load_plan_named(str(model.text), Settings({"images": "on", "context": 2048}))


def test_a_build_without_mtmd_is_the_reason_for_no_projector(
    model: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCppType, "reads_images", lambda _: "made without it")
    load = load_plan_named(str(model.text), Settings({}))
    assert (load.options.spec.projector, load.projector.why_not) == ("", "made without it")
    with pytest.raises(UnsupportedError, match="made without it"):
        load_plan_named(str(model.text), Settings({"images": "on"}))


def test_draft_heads_and_images_are_loaded_together(
    able: None, tmp_path: Path, model: VisionModel
) -> None:
    text = write_mtp(tmp_path / "heads.gguf")
    projector = tmp_path / "mmproj-heads.gguf"
    projector.write_bytes(model.projector.read_bytes())
    for draft, heads in (("mtp", True), ("off", False), ("ngram", False)):
        spec = load_plan_named(str(text), Settings({"draft": draft, "images": "on"})).options.spec
        assert (spec.mtp, spec.projector) == (heads, str(projector))


def test_images_on_without_a_projector_is_refused(tiny_model: Path) -> None:
    assert load_plan_named(str(tiny_model), Settings({})).projector.why_not == ""
    with pytest.raises(UnsupportedError, match="no image projector"):
        load_plan_named(str(tiny_model), Settings({"images": "on"}))


@needs_mtmd()
def test_the_planned_memory_of_a_projector_is_what_it_uses(model: VisionModel) -> None:
    spec = LoadSpec(
        str(model.text),
        n_ctx=256,
        n_seq_max=1,
        placement=Placement(gpu_layers=0),
        projector=str(model.projector),
    )
    backend = backend_type.load(spec)
    taken = backend.memory().projector_bytes
    backend.close()
    planned = projector_bytes(read_header(model.projector).metadata, model.projector.stat().st_size)
    assert 0.97 * taken <= planned <= 1.15 * taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tiny MLX checkpoint whose weights include a vision tower."""
    return tiny_mlx_vision.write(tmp_path / "sees", "mistral3")


@MLX_VLM
def test_an_mlx_folder_with_a_vision_encoder_is_planned_and_loaded_with_it(folder: Path) -> None:
    load = load_plan_named(str(folder), Settings({}))
    assert load.options.spec.projector == str(folder)
    without = load_plan_named(str(folder), Settings({"images": "off"}))
    assert without.options.spec.projector == ""
    assert without.projector.why_not == "switched off (--images off)"
    added = load.needs_bytes - without.needs_bytes
    assert added == load.projector.need_bytes == mlx.image_bytes(str(folder)) > 0
    shared = load_plan_named(str(folder), Settings({"workers": ["10.0.0.2"]}))
    assert shared.options.spec.projector == ""
    assert "several machines" in shared.projector.why_not


@MLX_VLM
def test_an_mlx_folder_whose_images_cannot_be_read_gives_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "mlx_vlm" else found(name, package)

    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", without)
        load = load_plan_named(str(folder), Settings({}))
        assert "pip install 'localllm[vision]'" in load.projector.why_not
        assert load.options.spec.projector == ""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "idefics3"}))
    assert "'idefics3'" in load_plan_named(str(folder), Settings({})).projector.why_not
    with pytest.raises(UnsupportedError, match=r"--images on.*'idefics3'"):
        load_plan_named(str(folder), Settings({"images": "on"}))
