"""Errors for unsupported cases on MLX: a missing compiler, unavailable settings, broken files, too
little memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm_backends.contract import (
    LoadError,
    LoadSpec,
    OutOfMemoryError,
)
from localllm_backends.mlx import MlxType, backend_type, needs_compiler

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]


def test_only_a_linux_cpu_needs_a_compiler() -> None:
    assert needs_compiler("linux", lambda _: None)
    assert not needs_compiler("linux", lambda name: f"/usr/bin/{name}")
    assert not needs_compiler("darwin", lambda _: None)
    assert not needs_compiler("linux", lambda _: None, cuda=True)


def test_a_missing_compiler_is_reported_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("shutil.which", lambda _: None)
    said = MlxType().available()
    assert said is not None
    assert "compiler" in said
    assert "g++" in said


def test_mlx_accepts_checkpoint_folders_and_their_weight_files(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    assert backend_type.accepts(str(folder))
    assert backend_type.accepts(str(folder / "model.safetensors"))
    assert not backend_type.accepts(str(folder / "config.json"))
    assert not backend_type.accepts(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert not backend_type.accepts(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"n_threads": 4}, "threads"),
        ({"kv_type_k": "q8_0"}, "the same type"),
        ({"kv_type_k": "q5_1", "kv_type_v": "q5_1"}, "f32"),
        ({"kv_type_k": "bf16", "kv_type_v": "bf16"}, "f32"),
    ],
)
def test_settings_that_mlx_lacks_are_refused(
    load: Callable[..., Any], spec: dict[str, Any], said: str
) -> None:
    with pytest.raises(LoadError, match=said):
        load(**spec)


@pytest.mark.parametrize("shape", ["sliding", "mla"])
def test_a_cache_that_cannot_be_quantised_is_refused_with_the_reason(
    load: Callable[..., Any], shape: str
) -> None:
    assert load(shape).info.kv_type_k == "f32"
    with pytest.raises(LoadError, match="can't be stored as q8_0"):
        load(shape, kv_type_k="q8_0", kv_type_v="q8_0")


class WholeNumbers:
    """A model whose keys and values are integers."""

    layers = (None,)

    def __call__(self, ids: Any, cache: Any) -> Any:
        import mlx.core as mx

        kv = mx.zeros((1, 2, ids.shape[1], 32), dtype=mx.int32)
        cache[0].update_and_fetch(kv, kv)
        return mx.zeros((1, ids.shape[1], 8))


def test_a_type_of_kv_that_mlx_does_not_know_is_a_load_error_with_its_name() -> None:
    from localllm_backends.mlx.load import probe

    with pytest.raises(
        LoadError, match=r"int32, which the MLX backend does not support \(it supports"
    ):
        probe(WholeNumbers(), LoadSpec("model"), 64)


def test_broken_checkpoints_are_load_errors(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    good = checkpoint("llama")

    def copy(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in good.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    def config(folder: Path, **changes: Any) -> None:
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**said, **changes}))

    cut = copy("cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    alien = copy("alien")
    config(alien, model_type="no_such_thing")
    code = copy("code")
    (code / "model.py").write_text("raise SystemExit('the checkpoint ran its own code')")
    config(code, model_file="model.py")
    shape = copy("shape")
    config(shape, hidden_size=128)
    words = copy("words")
    (words / "tokenizer.json").write_text("{")
    nothing = copy("nothing")
    (nothing / "model.safetensors").unlink()
    for folder in (
        cut,
        alien,
        code,
        shape,
        words,
        nothing,
        tmp_path / "absent",
        good / "config.json",
    ):
        with pytest.raises(LoadError):
            backend_type.load(LoadSpec(str(folder), n_ctx=128))


def test_a_model_larger_than_memory_is_refused_before_loading_with_both_sizes(
    load: Callable[..., Any],
) -> None:
    with pytest.raises(OutOfMemoryError, match=r"needs .* GB, but .* GB are available"):
        load(n_ctx=10**10)


def test_the_working_set_apple_recommends_is_the_limit_on_metal() -> None:
    from localllm_backends.mlx.memory import usable_bytes

    # Measured on an M5 Max with 128 GB: 107.52 GiB (github.com/antirez/ds4/pull/893).
    recommended = int(107.52 * 2**30)
    device = {"max_recommended_working_set_size": recommended, "memory_size": 128 * 2**30}
    # The system's available memory does not count there: the working set is the limit.
    assert usable_bytes(device, 100 * 10**9, 10**9, 5 * 10**9) == recommended - 100 * 10**9
    assert usable_bytes({"architecture": "x86_64"}, 0, 10**9, 5 * 10**9) == 6 * 10**9 - 256 * 2**20
    cuda = {"architecture": "sm_120", "total_memory": 32 * 10**9, "free_memory": 20 * 10**9}
    assert usable_bytes(cuda, 4 * 10**9, 10**9, 5 * 10**9) == 21 * 10**9 - 256 * 2**20
    # The free memory was read once at first use, and the memory has been filled since.
    assert usable_bytes(cuda, 30 * 10**9, 0, 5 * 10**9) == 2 * 10**9 - 256 * 2**20
