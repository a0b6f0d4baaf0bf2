"""A file that cannot run causes an error with the reason and a suitable file.

Only a damaged file's error suggests another download.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localllm.errors import ModelFileError
from localllm.library.catalog import read_header, read_model
from localllm_backends import registry
from localllm_backends.backend_type import BackendType
from localllm_backends.contract import LoadError, LoadSpec
from models import tiny_gguf


def backend() -> BackendType:
    found = registry.backends().get("llamacpp")
    assert found is not None
    return found


Change = Callable[[bytes], bytes]


def model(path: Path, arch: str = "llama", tensors: tuple[str, ...] = (), **keys: Any) -> Path:
    """Write the header of a language model of two layers.

    `keys` are further keys (`__` for dots), and `tensors` further tensors.
    """
    writer = gguf.GGUFWriter(str(path), arch)
    for name, value in {
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "context_length": 512,
    }.items():
        writer.add_uint32(f"{arch}.{name}", value)
    writer.add_uint32(f"{arch}.attention.head_count", 4)
    for name, value in keys.items():
        key = name.replace("__", ".")
        _ = (
            writer.add_array(key, value)
            if isinstance(value, list)
            else writer.add_string(key, value)
        )
    for name in ("token_embd.weight", "blk.0.attn_q.weight", *tensors):
        writer.add_tensor(name, np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


OLLAMAS: list[dict[str, Any]] = [
    {"arch": "gemma3", "tensors": ("v.blk.0.attn_q.weight", "mm.mm_input_projection.weight")},
    {"arch": "qwen35", "tensors": ("mtp.fc.weight",)},
    {"arch": "mistral3", "tensors": ("v.patch_conv.weight",)},
    {"arch": "gemma4", "tensors": ("a.blk.0.attn_q.weight",)},
    {"arch": "gptoss"},
    {"arch": "qwen35", "qwen35__rope__dimension_sections": [11, 11, 10]},
    {"arch": "qwen3vl", "qwen3vl__rope__dimension_sections": [24, 20, 20]},
]


@pytest.mark.parametrize("made", OLLAMAS)
def test_a_file_in_ollamas_own_layout_is_an_error_that_names_the_layout(
    tmp_path: Path, made: dict[str, Any]
) -> None:
    with pytest.raises(ModelFileError, match="Ollama's own layout") as e:
        read_model(model(tmp_path / "m.gguf", **made))
    assert "run it with Ollama" in e.value.hint
    assert "download" not in e.value.hint


def test_a_file_with_four_rope_sections_is_accepted(tmp_path: Path) -> None:
    read_model(
        model(tmp_path / "m.gguf", "qwen3vl", qwen3vl__rope__dimension_sections=[24, 20, 20, 0])
    )


@pytest.mark.parametrize("size", [5 << 20, 9 << 20, 30 << 20])
def test_a_long_unused_string_in_a_header_is_skipped(tmp_path: Path, size: int) -> None:
    path = model(
        tmp_path / "m.gguf", tokenizer__huggingface__json="x" * size, tokenizer__after="here"
    )
    assert read_header(path).text("tokenizer.after") == "here"
    assert len(read_model(path).layers) == 2


PLACES: list[tuple[bytes, str, str]] = [
    (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        "Git LFS pointer",
        "git lfs pull",
    ),
    (b"<!doctype html><title>Sign in</title>", "web page", "download the file again"),
    (b"\n<html></html>", "web page", "download the file again"),
    (bytes(4096), "only zero bytes", "download the file again"),
    (b"PK\3\4" + bytes(99), "not a GGUF", "give a .gguf"),
]


@pytest.mark.parametrize(("content", "said", "hint"), PLACES)
def test_other_content_in_place_of_a_gguf_is_named(
    tmp_path: Path, content: bytes, said: str, hint: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelFileError, match=said) as e:
        read_model(tmp_path / "m.gguf")
    assert hint in e.value.hint


@pytest.mark.parametrize("number", [97, 137, 153, 230])
def test_formats_of_another_program_name_it(tmp_path: Path, number: int) -> None:
    content = model(tmp_path / "m.gguf").read_bytes()
    at = content.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    (tmp_path / "m.gguf").write_bytes(
        content[:at] + number.to_bytes(4, "little") + content[at + 4 :]
    )
    with pytest.raises(ModelFileError, match=r"ik_llama\.cpp"):
        read_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("key", ["block_count", "embedding_length"])
def test_a_complete_file_without_a_needed_key_is_not_to_be_downloaded_again(
    tmp_path: Path, key: str
) -> None:
    content = model(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(
        content.replace(f"llama.{key}".encode(), f"llama.{key[::-1]}".encode())
    )
    with pytest.raises(ModelFileError, match=key) as e:
        read_model(tmp_path / "m.gguf")
    assert "download" not in e.value.hint
    assert "another file" in e.value.hint


# --- llama.cpp's own refusals ---------------------------------------------------------------------

REFUSED: dict[str, tuple[Change, str]] = {
    "unknown architecture": (lambda b: b.replace(b"\5" + bytes(7) + b"llama",
    b"\5" + bytes(7) + b"zzzzz", 1), "newer llama.cpp"),
    "missing key": (lambda b: b.replace(b"layer_norm_rms_epsilon", b"layer_norm_rms_nolispe", 1),
    "does not support the file's layout"),
    "missing tensor": (lambda b: b.replace(b"blk.1.attn_norm.weight", b"blk.1.morn_ntta.weight", 1),
    "does not support the file's layout"),
    "further tensor": (lambda b: b.replace(b"blk.1.", b"v.blk.", 2), "does not support the file's layout"),
    "cut short": (lambda b: b[: len(b) - len(b) // 4], ""),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_llama_cpps_refusals_name_a_way_out(tmp_path: Path, what: str) -> None:
    change, hint = REFUSED[what]
    path = tiny_gguf.write_llama(tmp_path / "m.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(LoadError) as e:
        backend().load(LoadSpec(str(path), n_ctx=64))
    assert hint in e.value.hint
    assert bool(hint) == bool(e.value.hint), (
        "a damaged file alone is to be downloaded again, which is what no hint means"
    )


def test_a_models_name_need_not_be_text(tmp_path: Path) -> None:
    path = tiny_gguf.write_llama(tmp_path / "plain.gguf").rename(tmp_path / "latin\udce9.gguf")
    backend().load(LoadSpec(str(path), n_ctx=64)).close()
