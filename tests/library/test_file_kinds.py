"""A file's kind follows from its header and its folder.

Companion files are not models, in any listing or folder.
"""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from library.hub import Hub
from localllm.cli.commands.models_view import listing
from localllm.errors import DownloadError, ModelFileError, UsageError
from localllm.library import folders, store, variants
from localllm.library.catalog import load_catalog, read_model
from localllm.library.describe import describe
from localllm.library.hub import Listing, Patience, RepoFile
from localllm.library.pull import pull
from localllm.library.resolve import resolve
from models import tiny_gguf
from support.examples import examples

GB = 10**9
QUANTS = {
    "Q4_K_M": 4.9,
    "Q8_0": 8.5,
    "Q6_K": 6.6,
    "F16": 16.0,
    "BF16": 16.0,
    "IQ2_M": 2.9,
    "UD-Q4_K_XL": 5.2,
}
# Published companion files ({} is a model's name, {q} a quant), with their sizes as shares of the
# model's weights at 16 bits.
COMPANIONS = {
    "imatrix_unsloth.gguf": 0.001, "{}-imatrix.gguf": 0.01, "{}.imatrix.gguf": 0.01,
    "imatrix.gguf": 0.01,
    "mmproj-{q}.gguf": 0.1, "mmproj-{}-{q}.gguf": 0.1, "{}.mmproj-{q}.gguf": 0.1,
    "clip-model-{q}.gguf": 0.08,
    "{}-vision-{q}.gguf": 0.1, "mtp-{}-{q}.gguf": 0.1, "mtp-{}.gguf": 0.1,
    "MTP/{}-{q}-MTP.gguf": 0.03,
    "draft/{}-draft-0.5B-{q}.gguf": 0.1, "eagle3-{}-{q}.gguf": 0.05, "{}-EAGLE3-{q}.gguf": 0.05,
    "{}-draft-{q}.gguf": 0.1,
    "{}-lora-{q}.gguf": 0.02, "lora-adapter-{q}.gguf": 0.02, "adapter-{q}.gguf": 0.02,
    "WavTokenizer-Large-75-{q}.gguf": 0.02,
    "vocoder-{q}.gguf": 0.02, "ggml-vocab-{}.gguf": 0.001, "._{}-{q}.gguf": 0.0001,
}  # fmt: skip
NAMES = (
    "Qwen3.8-27B",
    "gemma-4-12B-it-qat",
    "Llama-3.2-11B-Vision-Instruct",
    "ornith-9b-mtp-kl",
    "模型-7B",
    "Model, v2 [x]",
)


def file(name: str, n_bytes: float) -> RepoFile:
    return RepoFile(name, int(n_bytes), "0" * 64)


def model_files(model: str, params: float, quants: list[str], split: int) -> list[RepoFile]:
    """Return a model's files in these quants. The first has `split` parts in its own folder."""
    found = []
    for number, quant in enumerate(quants):
        size = params * QUANTS[quant] / 8
        if split > 1 and number == 0:
            found += [
                file(f"{quant}/{model}-{quant}-{n:05d}-of-{split:05d}.gguf", size / split)
                for n in range(1, split + 1)
            ]
        else:
            found.append(file(f"{model}-{quant}.gguf", size))
    return found


@given(
    model=st.sampled_from(NAMES),
    params=st.floats(0.6e9, 400e9),
    quants=st.lists(st.sampled_from(sorted(QUANTS)), min_size=1, unique=True),
    beside=st.lists(
        st.tuples(st.sampled_from(sorted(COMPANIONS)), st.sampled_from(sorted(QUANTS)))
    ),
    split=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(300))
def test_a_quant_label_selects_a_complete_model_of_that_quant_or_lists_the_available_ones(
    model: str,
    params: float,
    quants: list[str],
    beside: list[tuple[str, str]],
    split: int,
    seed: int,
) -> None:
    models = model_files(model, params, quants, split)
    others = [
        file(name.format(model, q=q), params * COMPANIONS[name] * QUANTS[q] / 8)
        for name, q in beside
    ]
    files = list({f.name: f for f in [*models, *others]}.values())
    random.Random(seed).shuffle(files)
    there = Listing("org/name", "a" * 40, tuple(files))
    offered = {f.name for s in variants.selections(there) for f in s.files}
    assert offered == {f.name for f in models}
    for asked in QUANTS:
        if asked not in quants and f"UD-{asked}" not in quants:
            with pytest.raises(DownloadError) as e:
                variants.pick(there, quant=asked, described=None, choose=None)
            assert all(quant in e.value.hint for quant in quants)
        else:
            picked = variants.pick(there, quant=asked, described=None, choose=None)
            assert picked.quant == asked
            assert len(picked.files) == (split if asked == quants[0] else 1)
            assert set(picked.files) <= set(models)


def test_two_models_of_one_quant_are_an_error_that_names_both() -> None:
    there = Listing("org/name", "a" * 40, (
        file("Deck-Q6_K-MTP.gguf", 34 * GB), file("Deck-Q6_K-PT-MTP.gguf", 34 * GB),
        file("Deck-Q4_K_M-MTP.gguf", 25 * GB),
    ))  # fmt: skip
    with pytest.raises(
        DownloadError,
        match=r"2 models in Q6_K: "
        r".*Q6_K-MTP.gguf.*Q6_K-PT-MTP.gguf",
    ) as e:
        variants.pick(there, quant="Q6_K", described=None, choose=None)
    assert "blob/main/Deck-Q6_K" in e.value.hint
    assert (
        variants.pick(there, quant="Q4_K_M", described=None, choose=None).files[0].name
        == "Deck-Q4_K_M-MTP.gguf"
    )


def test_a_draft_model_alone_in_a_repository_is_listed_as_a_model() -> None:
    there = Listing(
        "org/name",
        "a" * 40,
        (file("Qwen-DRAFT-0.6B-Q4_0.gguf", GB), file("Qwen-DRAFT-0.6B-Q8_0.gguf", GB)),
    )
    assert len(variants.selections(there)) == 2


def test_a_projector_is_used_for_the_model_in_its_name() -> None:
    files = [
        file(n, GB)
        for n in ("Alpha-9B-Q4_K_M.gguf", "beta-26B-it-Q4_K_M.gguf", "beta-26B-it.mmproj-q8_0.gguf")
    ]
    there = Listing("org/name", "a" * 40, tuple(files))
    assert variants.projector_of(there, "Alpha-9B-Q4_K_M.gguf") is None
    found = variants.projector_of(there, "beta-26B-it-Q4_K_M.gguf")
    assert found is not None
    assert found.name == "beta-26B-it.mmproj-q8_0.gguf"


# --- headers --------------------------------------------------------------------------------------


def companion(path: Path, arch: str = "", tensors: int = 1, **keys: str | int) -> Path:
    """Write a GGUF with these keys (`__` for dots) and no language model."""
    writer = gguf.GGUFWriter(str(path), arch or "none")
    if not arch:
        writer.kv_data[0].pop("general.architecture")
    for key, value in keys.items():
        name = key.replace("__", ".")
        _ = (
            writer.add_string(name, value)
            if isinstance(value, str)
            else writer.add_uint32(name, value)
        )
    if arch == "llama" and not tensors:
        writer.add_token_list([b"a", b"b"])
    for i in range(tensors):
        writer.add_tensor(f"t{i}", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HEADERS = {
    "importance matrix": {"general__type": "imatrix", "imatrix__chunk_count": 10},
    "LoRA": {"arch": "llama", "general__type": "adapter", "adapter__type": "lora"},
    "projector": {"arch": "clip", "general__type": "mmproj"},
    "vocabulary": {"arch": "llama", "tensors": 0, "llama__block_count": 2},
    "vocoder": {"arch": "wavtokenizer-dec", "wavtokenizer-dec__block_count": 12},
    "MTP heads": {"arch": "gemma4-assistant", "gemma4-assistant__block_count": 2},
    "draft model": {"arch": "qwen35", "qwen35__block_count": 1, "qwen35__nextn_predict_layers": 1},
    "image or video": {"arch": "flux"},
    "speech recogniser": {"arch": "whisper"},
    "by diffusion": {"arch": "diffusion-gemma"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one model, and every kind of companion under a neutral name."""
    place = tmp_path / "models"
    place.mkdir()
    tiny_gguf.write_llama(place / "Good-1B-Q4_K_M.gguf")
    for number, keys in enumerate(HEADERS.values()):
        companion(place / f"x{number}-Q8_0.gguf", **keys)
    return place


def test_a_folders_companions_are_named_and_not_listed(folder: Path) -> None:
    (folder / "._Good-1B-Q4_K_M.gguf").write_bytes(b"\0\5\x16\7" + bytes(4000))
    (model,) = store.adopt(folder)
    assert model.name == "Good-1B-Q4_K_M"
    assert model.mmproj == folder / "x2-Q8_0.gguf"
    assert {f.name for _, f in model.companions} == {
        f"x{n}-Q8_0.gguf" for n in range(len(HEADERS)) if n != 2
    }
    assert resolve(str(folder)).path == model.path
    said = "\n".join(listing([model]))
    for what in set(HEADERS) - {"projector", "draft model"}:
        assert what in said


@pytest.mark.parametrize("kind", HEADERS)
def test_a_companion_named_by_its_path_is_refused_with_its_kind(folder: Path, kind: str) -> None:
    path = folder / f"x{list(HEADERS).index(kind)}-Q8_0.gguf"
    for ask in (lambda: resolve(str(path)), lambda: read_model(path)):
        with pytest.raises(ModelFileError, match=kind) as e:
            ask()
        assert "download" not in e.value.hint
    with pytest.raises(ModelFileError) as e:
        resolve(str(path))
    assert "Good-1B-Q4_K_M.gguf" in e.value.hint


def test_projectors_in_a_folder_of_several_models_are_matched_by_name(tmp_path: Path) -> None:
    for name in ("Alpha-9B-Q4_K_M", "Alpha-9B-Q8_0", "beta-26B-it-Q4_K_M", "Gamma-2B-Q8_0"):
        tiny_gguf.write_llama(tmp_path / f"{name}.gguf")
    companion(tmp_path / "beta-26B-it.mmproj-f16.gguf", "clip")
    companion(tmp_path / "p.gguf", "clip", general__base_model__0__name="Gamma 2B")
    companion(tmp_path / "mmproj-F16.gguf", "clip")  # with several models, it belongs to none
    _rename(tmp_path / "Gamma-2B-Q8_0.gguf", "Gamma 2B")
    found = {m.name: m.mmproj.name if m.mmproj else "" for m in store.adopt(tmp_path)}
    assert found == {
        "Alpha-9B-Q4_K_M": "", "Alpha-9B-Q8_0": "",
        "beta-26B-it-Q4_K_M": "beta-26B-it.mmproj-f16.gguf", "Gamma-2B-Q8_0": "p.gguf",
    }  # fmt: skip


def test_a_projector_named_for_another_model_is_not_used(
    tmp_path: Path,
) -> None:
    tiny_gguf.write_llama(tmp_path / "Qwen3-VL-8B-Q4_K_M.gguf")
    companion(tmp_path / "mmproj-gemma-3-4b-it-f16.gguf", "clip")
    assert [m.mmproj for m in store.adopt(tmp_path)] == [None]
    for its_own in ("mmproj-F16.gguf", "mmproj-Qwen3-VL-8B-Instruct-f16.gguf"):
        made = companion(tmp_path / its_own, "clip")
        assert [m.mmproj for m in store.adopt(tmp_path)] == [made], its_own
        made.unlink()


def test_a_git_lfs_pointer_is_not_a_model(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4368439584\n"
    (tmp_path / "Qwen3-8B-Q4_K_M.gguf").write_bytes(pointer)
    with pytest.raises(UsageError, match=r"Qwen3-8B-Q4_K_M.gguf is a Git LFS pointer"):
        store.adopt(tmp_path)
    tiny_gguf.write_llama(tmp_path / "Qwen3-8B-Q8_0.gguf")
    assert [m.quant for m in store.adopt(tmp_path)] == ["Q8_0"]
    with pytest.raises(ModelFileError, match="Git LFS pointer") as e:
        resolve(str(tmp_path / "Qwen3-8B-Q4_K_M.gguf"))
    assert "git lfs pull" in e.value.hint


def _rename(path: Path, name: str) -> None:
    """Write the tiny model's header again with another name."""
    companion(path, "llama", general__name=name, llama__block_count=2)


# --- from a hub -----------------------------------------------------------------------------------


def test_a_file_whose_header_shows_no_model_is_skipped_for_the_next_file(
    hub: Hub, patience: Patience, tmp_path: Path
) -> None:
    model = tiny_gguf.write_llama(tmp_path / "m.gguf").read_bytes()
    other = companion(tmp_path / "c.gguf", "gemma4-assistant", pad="x" * 12_000).read_bytes()
    hub.add(
        "org/Some-GGUF",
        {"Some-Q8_0.gguf": model, "alpha-Q8_0-new.gguf": other[:-16], "small-Q4_K_M.gguf": other},
    )
    with pytest.raises(DownloadError, match="2 models in Q8_0"):
        pull("org/Some-GGUF:Q8_0", patience=patience)
    assert pull("org/Some-GGUF", patience=patience).path.name == "Some-Q8_0.gguf"
    with pytest.raises(DownloadError, match=r"small-Q4_K_M.gguf is a drafter") as e:
        pull("org/Some-GGUF:Q4_K_M", patience=patience)
    assert "Q8_0" in e.value.hint
    with pytest.raises(DownloadError, match="drafter"):
        pull("https://huggingface.co/org/Some-GGUF/blob/main/small-Q4_K_M.gguf", patience=patience)
    described, _ = describe("org/Some-GGUF", load_catalog())
    assert len(described.layers) == len(read_model(tmp_path / "m.gguf").layers)


def test_an_empty_file_is_not_a_variant(hub: Hub, patience: Patience) -> None:
    hub.add("org/Empty-GGUF", {"zero-Q4_K_M.gguf": b"", "README.md": b"hi"})
    with pytest.raises(DownloadError, match=r"zero-Q4_K_M.gguf"):
        pull("org/Empty-GGUF", patience=patience)


@pytest.mark.parametrize("ending", [".gguf", ".GGUF", ".Gguf"])
def test_splits_are_found_with_any_spelling_of_their_extension(tmp_path: Path, ending: str) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "Split-F32.gguf"), "llama", split_max_tensors=2)
    for name, value in {
        "block_count": 1,
        "embedding_length": 64,
        "context_length": 64,
        "attention.head_count": 2,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    for i in range(5):
        writer.add_tensor(f"blk.0.t{i}.weight", np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = [p.rename(p.with_suffix(ending)) for p in sorted(tmp_path.glob("Split*"))]
    (tmp_path / ("imatrix" + ending)).write_bytes(b"")
    (found,) = store.adopt(tmp_path)
    assert (found.name, found.quant, list(found.files)) == ("Split-F32", "F32", parts)
    for part in parts:
        assert resolve(str(part)).files == tuple(parts)
        assert read_model(part).params_total == 5 * 64 * 64
    assert resolve("split-f32").path == resolve(f"{tmp_path}:F32").path == parts[0]


def test_a_model_in_deeply_nested_folders_is_found(tmp_path: Path) -> None:
    deep = tmp_path.joinpath("z", *"abcdefghij")
    deep.mkdir(parents=True)
    tiny_gguf.write_llama(deep / "Deep-F32.gguf")
    tiny_gguf.write_llama(tmp_path / "a-F32.gguf")
    (tmp_path / "m" / "n").mkdir(parents=True)
    assert [m.name for m in store.adopt(tmp_path)] == ["a-F32", "Deep-F32"]


def test_an_unknown_video_models_file_is_not_the_chat_model(tmp_path: Path) -> None:
    """Diffusion programs write the architecture, but none of its dimensions."""
    tiny_gguf.write_llama(tmp_path / "small-Q8_0.gguf")
    writer = gguf.GGUFWriter(tmp_path / "video-Q8_0.gguf", "ltx9")
    writer.add_tensor("blocks.0.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [model.path.name for model in folders.scan(tmp_path)] == ["small-Q8_0.gguf"]
