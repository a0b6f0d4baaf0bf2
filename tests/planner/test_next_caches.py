"""GLM-5.3-Flash's pooled indexer and DeepSeek V4's compressed rows agree with llama.cpp's own plan
and the catalog's entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.planner import kv_sizes, memory
from localllm.planner.types import RunSettings
from localllm_catalog import catalog, from_gguf, gguf
from localllm_catalog.types import Model
from models import sparse_gguf, sparse_next
from support import plan_probe
from support.plan_probe import ProbeSettings

GRID = [ProbeSettings(n_ctx=c, n_seq_max=s) for c in (4096, 131072) for s in (1, 4)]
KNOWN = {model.id: model for model in catalog.load().models}


def read(shape: sparse_gguf.Shape, folder: Path) -> tuple[Model, Path]:
    path = sparse_gguf.write(shape, folder)
    return from_gguf.model_from_gguf(gguf.read(path)), path


def settings(asked: ProbeSettings) -> RunSettings:
    return RunSettings(
        n_ctx=asked.n_ctx, slots=asked.n_seq_max, n_batch=asked.n_ubatch, n_outputs=asked.n_seq_max
    )


def test_a_pooling_indexer_stores_three_keys_per_token(tmp_path: Path) -> None:
    model, path = read(sparse_next.GLM_FLASH_NEXT, tmp_path)
    for asked, planned in zip(GRID, plan_probe.plan(path, GRID), strict=True):
        need = memory.need(model, model.variants[0], settings(asked))
        assert need.weights_bytes == planned.weights_bytes
        assert need.kv_bytes == planned.kv_bytes, asked
        assert need.recurrent_bytes == pytest.approx(planned.recurrent_bytes, abs=0.01 * memory.MIB)


def test_each_sequence_has_its_own_compressed_rows(tmp_path: Path) -> None:
    """The plan does not count the last tokens' rows of compressing layers: 768 cells of 512 f16
    values per layer and sequence."""
    model, path = read(sparse_next.DEEPSEEK_FLASH, tmp_path)
    compressing = sum(layer.kind == "full" for layer in model.layers)
    for asked, planned in zip(GRID, plan_probe.plan(path, GRID), strict=True):
        need = memory.need(model, model.variants[0], settings(asked))
        left_out = asked.n_seq_max * compressing * 768 * 512 * 2
        assert need.weights_bytes == planned.weights_bytes
        assert (
            abs(need.kv_bytes + left_out - planned.kv_bytes) <= asked.n_seq_max * 0.6 * memory.MIB
        ), asked


@pytest.mark.parametrize(
    ("model_id", "shape"),
    [
        ("glm-5.3-flash", sparse_next.GLM_FLASH_NEXT),
        ("deepseek-v4-flash", sparse_next.DEEPSEEK_FLASH),
    ],
)
def test_catalog_layers_equal_those_read_from_a_file(
    model_id: str, shape: sparse_gguf.Shape, tmp_path: Path
) -> None:
    read_layers, listed = read(shape, tmp_path)[0].layers[:6], KNOWN[model_id].layers
    for mine, its in zip(listed, read_layers, strict=False):
        assert (mine.kind, type(mine.mixer)) == (its.kind, type(its.mixer))
        assert mine.mixer.state_floats == its.mixer.state_floats
        assert mine.mixer.elements == its.mixer.elements
        layout = kv_sizes.layout(RunSettings(4096))
        assert mine.mixer.cells(layout) == its.mixer.cells(layout)
        stated, counted = (one.mixer.to_row().get("mixer_params", 0) for one in (mine, its))
        assert stated == pytest.approx(counted, rel=0.01)
