"""The formulas of planner.memory agree with llama.cpp's own plan (no_alloc) for header-only files
of real shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.planner import kv_sizes, memory
from localllm.planner.types import MemoryNeed, RunSettings
from localllm_backends.contract import LoadError, LoadSpec, Placement
from localllm_backends.llamacpp import backend_type
from localllm_catalog import from_gguf, gguf
from localllm_catalog.types import Model
from models import sparse_gemma4, sparse_gguf, tiny_gguf
from support import plan_probe
from support.plan_probe import Planned, ProbeSettings

CONTEXTS = (4096, 32768, 131072)
KV_TYPES = ("f16", "q8_0", "q4_0")
SLOTS = (1, 4)
GRID = [
    ProbeSettings(n_ctx=c, n_seq_max=s, kv_type_k=k, kv_type_v=k)
    for c in CONTEXTS
    for k in KV_TYPES
    for s in SLOTS
]
# llama.cpp needs a second to plan the graph of this hybrid, and the test plans it eighteen times.
LONG = {"qwen3.5-27b"}
SHAPES = {**sparse_gguf.SHAPES, **sparse_gemma4.SHAPES}
_LOG_ROUNDING = 0.00501 * memory.MIB


def shapes() -> list[object]:
    return [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in SHAPES]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparse")


def read(name: str, files: Path) -> tuple[Model, Path]:
    path = sparse_gguf.write(SHAPES[name], files)
    return from_gguf.model_from_gguf(gguf.read(path)), path


def run_settings(s: ProbeSettings) -> RunSettings:
    return RunSettings(
        n_ctx=s.n_ctx,
        kv_type_k=s.kv_type_k,
        kv_type_v=s.kv_type_v,
        slots=s.n_seq_max,
        n_batch=s.n_ubatch,
        n_outputs=max(s.n_outputs, s.n_seq_max * (1 + s.n_rewind)),
        n_rewind=s.n_rewind,
    )


def predicted(model: Model, s: ProbeSettings) -> MemoryNeed:
    return memory.need(model, model.variants[0], run_settings(s))


def check(model: Model, s: ProbeSettings, planned: Planned) -> None:
    need = predicted(model, s)
    # Weights and cell counts are exact. The log rounds each cache to a hundredth of a MiB.
    assert need.weights_bytes == planned.weights_bytes
    layout = kv_sizes.layout(run_settings(s))
    cells = {layer.mixer.cells(layout) for layer in model.layers} - {0}
    assert cells == {c for c, _ in planned.kv_cells}, s
    assert abs(need.kv_bytes - planned.kv_bytes) <= _LOG_ROUNDING * len(planned.kv_cells), s
    assert abs(need.recurrent_bytes - planned.recurrent_bytes) <= _LOG_ROUNDING, s
    error = need.total_bytes / planned.total_bytes - 1
    assert -0.01 <= error <= 0.03, (s, error)


@pytest.mark.parametrize("name", shapes())
def test_closed_form_agrees_with_llamacpp(name: str, files: Path) -> None:
    model, path = read(name, files)
    for settings, planned in zip(GRID, plan_probe.plan(path, GRID), strict=True):
        check(model, settings, planned)


def test_closed_form_follows_the_settings_our_backend_uses(files: Path) -> None:
    asked = [
        ProbeSettings(n_ctx=16384, n_seq_max=9, n_outputs=64),
        ProbeSettings(n_ctx=8192, n_seq_max=9, n_ubatch=128, n_outputs=64),
        ProbeSettings(n_ctx=5000, n_seq_max=3, n_ubatch=512),
        ProbeSettings(n_ctx=32768, n_seq_max=4, n_rewind=4),
        ProbeSettings(n_ctx=4096, n_ubatch=2048),
        ProbeSettings(n_ctx=65536, n_seq_max=9, n_ubatch=1024, n_outputs=64),
        ProbeSettings(n_ctx=65536, n_seq_max=9, n_ubatch=4096, n_outputs=64),
    ]
    for name in ("llama-3.2-1b", "gemma-3-270m", "gpt-oss-20b", "lfm2-1.2b", "qwen3-30b-a3b"):
        model, path = read(name, files)
        for settings, planned in zip(asked, plan_probe.plan(path, asked), strict=True):
            check(model, settings, planned)


@pytest.mark.parametrize(
    ("n_ctx", "n_batch", "slots", "kv"),
    [(8192, 0, 8, "f16"), (4096, 512, 2, "f16"), (8192, 128, 4, "q8_0"), (8192, 2048, 4, "f16")],
)
def test_a_real_load_allocates_what_was_predicted(
    smollm2: Path, n_ctx: int, n_batch: int, slots: int, kv: str
) -> None:
    model = from_gguf.model_from_gguf(gguf.read(smollm2))
    kv_types: Any = {"kv_type_k": kv, "kv_type_v": kv}
    # One memory pool, like a plan without a GPU. With a card, the host keeps a copy of the mask
    # (tests/backends/test_placement.py).
    spec = LoadSpec(
        str(smollm2),
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_seq_max=slots,
        placement=Placement(gpu_layers=0),
        **kv_types,
    )
    backend = backend_type.load(spec)
    try:
        ran = RunSettings(
            n_ctx=n_ctx,
            slots=slots + 1,  # the backend adds one to receive imported prefixes
            n_batch=backend.info.n_batch,
            n_outputs=backend.info.n_outputs,
        )
        need = memory.need(model, model.variants[0], ran.with_kv_type(kv))
        real = backend.memory()
    finally:
        backend.close()
    assert abs(need.kv_bytes - real.kv_bytes) <= _LOG_ROUNDING
    assert need.total_bytes == pytest.approx(real.total_bytes, rel=0.03)


@pytest.mark.parametrize("write", [tiny_gguf.write_sliding, tiny_gguf.write_hybrid])
def test_the_additional_sequence_of_a_backend_is_counted(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    """If each sequence has its own window or state, the backend's additional sequence costs memory
    too."""
    path = write(tmp_path / "model.gguf")
    model = from_gguf.model_from_gguf(gguf.read(path))
    for slots in (1, 4):
        spare = memory.spare_sequences(model, model.variants[0], heads=False)
        ran = RunSettings(n_ctx=512, slots=slots, spare=spare, n_batch=64, n_outputs=slots)
        backend = backend_type.load(
            LoadSpec(str(path), n_ctx=512, n_batch=64, n_seq_max=slots, n_outputs=slots)
        )
        try:
            real = backend.memory()
        finally:
            backend.close()
        need = memory.need(model, model.variants[0], ran)
        assert abs(need.kv_bytes - real.kv_bytes) <= 4 * _LOG_ROUNDING, (slots, need, real)
        assert abs(need.recurrent_bytes - real.recurrent_bytes) <= _LOG_ROUNDING, (
            slots,
            need,
            real,
        )


def test_a_file_llamacpp_refuses_is_an_error_not_a_crash(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(LoadError, match=r"bad\.gguf"):
        plan_probe.plan(bad, [ProbeSettings()])


def test_settings_that_abort_llamacpp_are_an_error_too(files: Path) -> None:
    _, path = read("smollm2-135m", files)
    with pytest.raises(LoadError):
        plan_probe.plan(path, [ProbeSettings(n_ctx=4096, kv_type_v="q8_0", flash_attention=False)])


def test_values_missing_in_the_log_are_unknown() -> None:
    planned = plan_probe.parse(
        ["llama_kv_cache: size =  720.00 MiB ( 32768 cells,  30 layers,  1/1 seqs)"], 5
    )
    assert planned.kv_bytes == 720 * memory.MIB
    assert planned.compute_bytes is None
    assert planned.output_bytes is None
