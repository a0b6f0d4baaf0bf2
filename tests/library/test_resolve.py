"""MODEL references: the meaning of each form, refusals, and the advice in errors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm.errors import LocalLLMError, ModelFileError, ModelNotFoundError, UsageError
from localllm.library import app_folders, names, starter
from localllm.library.resolve import resolve
from localllm.memory.system import SystemMemory
from localllm_catalog import catalog as catalogs
from support.examples import examples
from support.safetensors import safetensors


def cached(repo: str, file: str, content: bytes = b"GGUF" * 2, commit: str = "b" * 40) -> Path:
    """Write a file in the hub's cache like huggingface-hub."""
    import hashlib

    folder = app_folders.hub_cache() / ("models--" + repo.replace("/", "--"))
    blob = folder / "blobs" / hashlib.sha256(content + file.encode()).hexdigest()
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    pointer = folder / "snapshots" / commit / file
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return pointer


def no_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.library.starter.path", lambda: None)


# --- no model, and the starter --------------------------------------------------------------------


def test_the_starter_is_used_if_no_model_is_named_or_installed(smollm2: Path) -> None:
    assert starter.path() == smollm2
    with pytest.raises(UsageError, match="empty"):
        resolve("  ")
    for ref in (None, "smollm2-135m-instruct", "smollm2-135m", "starter"):
        local = resolve(ref)
        assert (local.name, local.path, local.origin) == (
            "smollm2-135m-instruct",
            smollm2,
            "starter",
        )


def test_without_a_name_the_largest_chat_model_within_half_the_memory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models.tiny_gguf import write_llama

    no_starter(monkeypatch)
    with pytest.raises(ModelNotFoundError) as e:
        resolve(None)
    assert "localllm recommend" in e.value.hint
    base = write_llama(tmp_path / "tiny.gguf").read_bytes()  # without a chat template
    cached("maker/Base-GGUF", "Base-Q8_0.gguf", base + b"\0" * 4096)
    with pytest.raises(ModelNotFoundError):
        resolve(None)
    small, big = (with_template(tmp_path, size) for size in (0, 1024))
    cached("maker/Small-GGUF", "Small-Q4_K_M.gguf", small)
    cached("maker/Big-GGUF", "Big-Q4_K_M.gguf", big)
    cached("maker/Big-embed-GGUF", "Big-embed-Q8_0.gguf", big + b"\0" * 4096)
    assert resolve(None).name == "Big-Q4_K_M"
    monkeypatch.setattr(SystemMemory, "available_bytes", lambda self: 2 * len(small))
    assert resolve(None).name == "Small-Q4_K_M"


def with_template(folder: Path, padding: int) -> bytes:
    """Return a GGUF header with only a chat template, followed by `padding` zero bytes."""
    import gguf

    path = folder / f"template-{padding}.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes() + b"\0" * padding


# --- paths ----------------------------------------------------------------------------------------


def test_a_path_selects_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "Mine-1B-Q5_K_M.gguf"
    file.write_bytes(b"GGUF" * 2)
    local = resolve(str(file))
    assert (local.name, local.path, local.quant, local.origin) == (
        "Mine-1B-Q5_K_M",
        file,
        "Q5_K_M",
        "path",
    )
    monkeypatch.chdir(tmp_path)
    assert resolve("Mine-1B-Q5_K_M.gguf").path.resolve() == file
    assert resolve(".").path.resolve() == file


def test_a_path_with_a_quant_selects_the_file_of_that_quant(tmp_path: Path) -> None:
    small, large = tmp_path / "Mine-1B-Q4_K_M.gguf", tmp_path / "Mine-1B-Q8_0.gguf"
    for file in (small, large):
        file.write_bytes(b"GGUF" * 2)
    assert resolve(f"{small}:Q4_K_M").path == small
    assert resolve(f"{tmp_path}:q8_0").path == large
    for ref in (f"{small}:Q8_0", f"{tmp_path}:Q5_K_M"):
        with pytest.raises(ModelNotFoundError, match="is not Q"):
            resolve(ref)
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        resolve(f"{tmp_path}/other.gguf:Q8_0")


def test_any_part_of_a_split_model_selects_all_of_its_parts(tmp_path: Path) -> None:
    parts = [tmp_path / f"Big-Q8_0-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"GGUF" * 2)
    local = resolve(str(parts[2]))
    assert (local.path, local.files, local.size_bytes, local.name) == (
        parts[0],
        tuple(parts),
        24,
        "Big-Q8_0",
    )
    parts[1].unlink()
    with pytest.raises(ModelFileError, match="one of 3 parts"):
        resolve(str(parts[0]))


def test_an_mlx_folder_needs_all_its_shards(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-4bit"
    folder.mkdir()
    (folder / "config.json").write_text('{"quantization": {"bits": 4}}')
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}'
    )
    (folder / "m1.safetensors").write_bytes(safetensors(b"1"))
    with pytest.raises(ModelFileError):
        resolve(str(folder))
    (folder / "m2.safetensors").write_bytes(safetensors(b"2"))
    local = resolve(str(folder))
    assert (local.name, local.format, local.quant, local.size_bytes) == (
        "Tiny-4bit",
        "mlx",
        "4bit",
        2 * len(safetensors(b"1")),
    )


@pytest.mark.parametrize("ref", ["/nowhere/x.gguf", "x.gguf", "./nothing", "~/nothing"])
def test_a_missing_path_is_an_error_with_a_hint(ref: str) -> None:
    with pytest.raises(ModelNotFoundError) as e:
        resolve(ref)
    assert e.value.exit_code == 3
    assert e.value.hint


# --- names ----------------------------------------------------------------------------------------


def test_catalog_ids_names_and_repositories_find_what_is_cached() -> None:
    q4 = cached("unsloth/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf")
    q8 = cached("unsloth/Qwen3-8B-GGUF", "Qwen3-8B-Q8_0.gguf", b"GGUF, and bigger")
    address = "https://huggingface.co/unsloth/Qwen3-8B-GGUF/blob/main/Qwen3-8B-Q4_K_M.gguf"
    repo = "unsloth/Qwen3-8B-GGUF:Q4_K_M"
    for ref in (
        "qwen3-8b:Q4_K_M",
        "qwen3-8b:q4_k_m",
        "Qwen3-8B-Q4_K_M",
        "qwen3-8b-q4_k_m.gguf",
        repo,
        f"hf.co/{repo}",
        address,
    ):
        assert resolve(ref).path == q4, ref
    for ref in ("qwen3-8b", "unsloth/Qwen3-8B-GGUF"):
        assert resolve(ref).path == q8, "of several, the biggest that leaves half the memory"
    with pytest.raises(ModelNotFoundError):
        resolve("Qwen/Qwen3-8B-GGUF:Q8_0")


def test_a_models_other_publishers_answer_to_its_id_too() -> None:
    pointer = cached("bartowski/Qwen_Qwen3-8B-GGUF", "Qwen_Qwen3-8B-Q5_K_M.gguf")
    assert resolve("qwen3-8b").path == pointer


def test_an_mlx_repository_answers_to_the_catalogs_id(monkeypatch: pytest.MonkeyPatch) -> None:
    cached("mlx-community/Qwen3-0.6B-4bit", "config.json", b'{"quantization": {"bits": 4}}')
    pointer = cached("mlx-community/Qwen3-0.6B-4bit", "model.safetensors", safetensors(b"1"))
    assert resolve("qwen3-0.6b").path == pointer.parent
    assert resolve("qwen3-0.6b").name in ("qwen3-0.6b", "Qwen3-0.6B-4bit")


def test_the_error_for_a_known_model_that_is_not_installed_names_the_pull_command() -> None:
    with pytest.raises(ModelNotFoundError) as e:
        resolve("qwen3-8b:Q4_K_M")
    assert "`localllm pull qwen3-8b:Q4_K_M`" in e.value.hint
    cached("unsloth/Qwen3-8B-GGUF", "Qwen3-8B-Q8_0.gguf")
    with pytest.raises(ModelNotFoundError) as e:
        resolve("qwen3-8b:Q4_K_M")
    assert "installed: Q8_0" in e.value.hint


def test_a_mistyped_name_is_answered_with_similar_names() -> None:
    cached("maker/My-Finetune-GGUF", "My-Finetune-Q4_K_M.gguf")
    with pytest.raises(ModelNotFoundError) as e:
        resolve("qwn3-8b")
    assert "qwen3-8b" in e.value.hint
    with pytest.raises(ModelNotFoundError) as e:
        resolve("my-finetun-q4_k_m")
    assert "My-Finetune-Q4_K_M" in e.value.hint


def test_a_quant_in_the_name_selects_only_that_quant() -> None:
    cached("maker/Tiny-GGUF", "Tiny-Q4_K_M.gguf")
    for ref in ("tiny", "tiny:Q4_K_M", "Tiny-Q4_K_M"):
        assert resolve(ref).quant == "Q4_K_M"
    for ref in ("Tiny-Q8_0", "tiny-q8_0.gguf", "tiny:Q8_0"):
        with pytest.raises(ModelNotFoundError):
            resolve(ref)


def test_a_newer_snapshot_wins_and_a_dangling_link_does_not_count() -> None:
    cached("maker/M-GGUF", "M-Q4_K_M.gguf", b"GGUF old", commit="a" * 40)
    new = cached("maker/M-GGUF", "M-Q4_K_M.gguf", b"GGUF new", commit="c" * 40)
    assert resolve("maker/M-GGUF").path == new
    new.resolve().unlink()
    assert resolve("maker/M-GGUF").path.read_bytes() == b"GGUF old"


def test_a_download_that_is_not_finished_is_not_offered() -> None:
    pointer = cached("maker/M-GGUF", "M-Q4_K_M-00001-of-00002.gguf")
    (
        app_folders.hub_cache() / "models--maker--M-GGUF" / "blobs" / ("d" * 64 + ".incomplete")
    ).write_bytes(b"GGUF" * 2)
    assert pointer.exists()
    with pytest.raises(ModelNotFoundError):
        resolve("maker/M-GGUF")


# --- hostile and strange --------------------------------------------------------------------------


KNOWN = catalogs.load()


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=st.sampled_from("abQ4_K.M:/\\-~%@ é\0\n"), max_size=30))
def test_any_text_selects_a_model_or_raises_our_own_error(ref: str) -> None:
    with contextlib.suppress(LocalLLMError):
        assert resolve(ref, catalog=KNOWN).path.exists()


@pytest.mark.parametrize("ref", [
    "org/../../etc",
    "a/b/../c",
    "org/na me",
    "x" * 5000,
    "ftp://huggingface.co/a/b",
    "https://evil.example/a/b.gguf",
    "https://huggingface.co/a/b/resolve/main/../../x.gguf",
    "https://huggingface.co/a/b/resolve/..%2f..%2fx/y.gguf",
])  # fmt: skip
def test_references_that_could_contain_a_path_are_refused(ref: str) -> None:
    with pytest.raises((UsageError, ModelNotFoundError)):
        resolve(ref, catalog=KNOWN)


QUANTS = st.sampled_from(["Q4_K_M", "UD-Q4_K_XL", "IQ4_XS", "BF16", "Q8_0"])


# A name that ends in "UD" with a quant forms the name of another quant: UD-Q4_K_M.
STEMS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.-]{0,20}", fullmatch=True).filter(
    lambda s: not s.upper().endswith("UD")
)


@given(STEMS, QUANTS)
def test_names_are_parsed_with_quants_splits_and_folders(stem: str, quant: str) -> None:
    base = f"{stem}-{quant}-00002-of-00007.gguf"
    assert names.quant_of(f"{stem}-{quant}.gguf") == quant
    assert names.stem_of(f"folder/{base}") == f"{stem}-{quant}"
    assert names.split_of(base) == (f"{stem}-{quant}", 2, 7)


# --- speed ----------------------------------------------------------------------------------------


def test_resolving_loads_nothing_heavy_and_takes_milliseconds() -> None:
    code = (
        "import sys, time; from localllm.library.resolve import resolve; t = time.process_time(); "
        "resolve(None);"
        "print((time.process_time() - t) * 1000);"
        "print([m for m in ('huggingface_hub', 'httpx', 'numpy', 'pydantic', 'llama_cpp') if m in "
        "sys.modules]);"
        # Only the catalog's rules for names are imported, not its models.
        "print(sorted(m for m in sys.modules if m.startswith('localllm_catalog.')))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert out[1] == "[]"
    assert out[2] == "['localllm_catalog.errors', 'localllm_catalog.names']"
    assert float(out[0]) < 500, "milliseconds of the processor: 25 or so"


def test_an_unknown_quant_is_answered_with_the_listed_ones() -> None:
    with pytest.raises(ModelNotFoundError) as e:
        resolve("qwen3-8b:Q99")
    assert "Q99" in e.value.message
    assert "Q4_K_M" in e.value.hint
    with pytest.raises(ModelNotFoundError) as e:
        resolve("qwen3-8b:Q4_K_M")
    assert "localllm pull qwen3-8b:Q4_K_M" in e.value.hint
