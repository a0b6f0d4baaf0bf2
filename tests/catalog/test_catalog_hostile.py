"""Headers are untrusted: hundreds of damaged ones, and crafted ones that have broken other
readers."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm_catalog import gguf
from localllm_catalog.errors import BadHeaderError, CatalogError
from localllm_catalog.from_gguf import model_from_gguf
from support.examples import examples

from .conftest import gguf_header

SEED = gguf_header(
    {
        "general.architecture": "qwen35",
        "general.alignment": 32,
        "qwen35.block_count": 4,
        "qwen35.embedding_length": 256,
        "qwen35.feed_forward_length": [512, 512, 512, 512],
        "qwen35.attention.head_count": 8,
        "qwen35.attention.head_count_kv": [2, 2, 2, 2],
        "qwen35.attention.sliding_window_pattern": [True, False, True, False],
        "qwen35.ssm.inner_size": 64,
        "qwen35.ssm.state_size": 16,
        "qwen35.expert_count": 4,
        "qwen35.expert_used_count": 2,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(40)],
        "tokenizer.chat_template": "{{ messages }}<think>",
        "split.count": 1,
        "f": 1.5,
    },
    [("token_embd.weight", (256, 40), "Q8_0"), ("blk.0.ffn_up_exps.weight", (256, 32, 4), "Q4_K")],
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return the seed header after one to six cuts, insertions, overwrites and copies, followed by
    its data or less."""
    data = bytearray(SEED[0] + bytes(SEED[1]))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        action = draw(st.sampled_from(["byte", "u64", "u32", "cut", "insert", "copy", "end"]))
        if action == "byte":
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif action == "u64":
            data[at : at + 8] = struct.pack(
                "<Q", draw(st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1 << 63]))
            )
        elif action == "u32":
            data[at : at + 4] = struct.pack(
                "<I", draw(st.integers(0, 20) | st.integers(0, (1 << 32) - 1))
            )
        elif action == "cut":
            del data[at : at + draw(st.integers(1, 64))]
        elif action == "insert":
            data[at:at] = draw(st.binary(max_size=64))
        elif action == "copy":
            data[at:at] = data[: draw(st.integers(0, len(data)))]
        else:
            del data[at:]
    return bytes(data)


# The limit for one header is several times the highest cost measured here, because a shared core
# takes twice as long.
CPU_S = 4.0


def within_bounds(path: Path) -> bool:
    """Return whether a header gives a Model or a CatalogError within CPU_S and 256 MB."""
    start = time.process_time()
    tracemalloc.start()
    try:
        model_from_gguf(gguf.read(path))
    except CatalogError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return time.process_time() - start < CPU_S and peak < 256_000_000


def test_the_undamaged_seed_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "seed.gguf"
    path.write_bytes(SEED[0] + bytes(SEED[1]))
    assert model_from_gguf(gguf.read(path)).experts is not None


@settings(max_examples=examples(1_000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged())
def test_a_thousand_rearranged_headers_crash_hang_and_allocate_nothing(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "mutant.gguf"
    path.write_bytes(data)
    assert within_bounds(path)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs the kernel's limit on address space"
)
@pytest.mark.parametrize("n", [250, pytest.param(1_000, marks=pytest.mark.long)])
def test_damaged_copies_of_a_real_header(smollm2: Path, tmp_path: Path, n: int) -> None:
    script = Path(__file__).with_name("byte_flips.py")
    done = subprocess.run(
        [sys.executable, str(script), str(smollm2), str(tmp_path), str(n), "20261121"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(gguf.__file__).parents[1])},
        timeout=240,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["crashes"] == []
    assert result["refused"] + result["accepted"] == n
    assert result["refused"] > 0.3 * n
    assert result["slowest_s"] < 1.0


# --- crafted --------------------------------------------------------------------------------------


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _file(
    *pairs: bytes,
    tensors: list[bytes] | None = None,
    n_keys: int | None = None,
    padding: int = 4096,
) -> bytes:
    tensors = tensors or []
    start = struct.pack(
        "<4sIQQ", b"GGUF", 3, len(tensors), len(pairs) if n_keys is None else n_keys
    )
    return start + b"".join(pairs) + b"".join(tensors) + bytes(padding)


def _array(key: str, kind: int, count: int, body: bytes = b"") -> bytes:
    return _text(key) + struct.pack("<IIQ", 9, kind, count) + body


def _tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (_file(n_keys=HUGE), "more than any model"),
        (struct.pack("<4sIQQ", b"GGUF", 3, HUGE, 0) + bytes(64), "more than any model"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 60_000, 0) + bytes(64), "60000 tensors"),
        (_file(struct.pack("<Q", HUGE) + b"x"), "longer than"),
        (_file(_text("k") + struct.pack("<IQ", 8, HUGE)), "past the end"),
        (_file(_text("k") + struct.pack("<IQ", 8, 1 << 21)), "past the end"),
        (_file(_array("k", 4, HUGE)), "past the end"),
        (_file(_array("k", 8, 1 << 61)), "past the end"),
        (_file(_array("k", 9, 1, struct.pack("<IQ", 9, 1) * 50)), "array of arrays"),
        (_file(_array("k", 77, 1)), "unknown type 77"),
        (_file(_text("k") + struct.pack("<I", 13)), "unknown type 13"),
        (_file(_text("k") + struct.pack("<IB", 7, 2)), "boolean"),
        (
            _file(_text("a") + struct.pack("<IB", 0, 1), _text("a") + struct.pack("<IB", 0, 1)),
            "twice",
        ),
        (_file(_text("bad\nkey") + struct.pack("<IB", 0, 1)), "control characters"),
        (_file(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)), "UTF-8"),
        (_file(_text("general.alignment") + struct.pack("<II", 4, 0)), "alignment"),
        (_file(_text("general.alignment") + struct.pack("<II", 4, 48)), "alignment"),
        (_file(_text("general.alignment") + struct.pack("<II", 4, 1 << 31)), "alignment"),
        (_file(tensors=[_tensor("t", (1 << 32, 1 << 32))]), "impossible shape"),
        (_file(tensors=[_tensor("t", (1 << 21, 1 << 21, 1 << 21, 2))]), "impossible shape"),
        (_file(tensors=[_tensor("t", (0, 5))]), "impossible shape"),
        (_file(tensors=[_tensor("t", (1,) * 5)]), "5 dimensions"),
        (_file(tensors=[_tensor("t", ())]), "0 dimensions"),
        (_file(tensors=[_tensor("t", (8,), kind=4)]), "llama.cpp removed"),
        (_file(tensors=[_tensor("t", (8,), kind=999)]), "unknown tensor type"),
        (_file(tensors=[_tensor("t", (33,), kind=8)]), "a multiple of Q8_0's block size"),
        (_file(tensors=[_tensor("t", (8,), offset=7)]), "not a multiple of the alignment"),
        (_file(tensors=[_tensor("t", (8,), offset=HUGE - 31)]), "file of"),
        (_file(tensors=[_tensor("t", (1 << 20,))]), "file of"),
        (_file(tensors=[_tensor("t", (8,)), _tensor("t", (8,), offset=32)]), "twice"),
        (_file(tensors=[_tensor("a", (64,)), _tensor("b", (8,), offset=32)]), "overlaps"),
        (_file(tensors=[_tensor("", (8,))]), "empty"),
        (_file(tensors=[_tensor("x" * 300, (8,))]), "longer than 256"),
        (struct.pack("<4sI", b"GGUF", 1) + bytes(64), "version 1"),
        (b"GGUF", "past the end"),
        (b"", "past the end"),
    ],
)
def test_crafted_headers_are_refused_for_the_right_reason(
    tmp_path: Path, data: bytes, says: str
) -> None:
    path = tmp_path / "crafted.gguf"
    path.write_bytes(data)
    with pytest.raises(BadHeaderError, match=says) as caught:
        gguf.read(path)
    assert str(path) in caught.value.message


BOMBS: dict[str, Callable[[], bytes]] = {
    "two million empty strings": lambda: _file(_array("k", 8, 2_000_000, bytes(16_000_000))),
    "more strings than any vocabulary": lambda: _file(_array("k", 8, 3_000_000, bytes(24_000_000))),
    "many short arrays of strings": lambda: _file(
        *[_array(f"k{i}", 8, 4_096, bytes(32_768)) for i in range(400)]
    ),
    "many short arrays of bytes": lambda: _file(
        *[_array(f"k{i}", 0, 4_096, bytes(4_096)) for i in range(4_000)]
    ),
    "much text": lambda: _file(
        *[_text(f"k{i}") + struct.pack("<I", 8) + _text("é" * 1_000_000) for i in range(20)]
    ),
    "twenty thousand keys": lambda: _file(
        *[_text(f"k{i}") + struct.pack("<IB", 0, 1) for i in range(20_000)]
    ),
    "sixty thousand tensors": lambda: _file(
        tensors=[_tensor(f"t{i}", (8,), offset=32 * i) for i in range(60_000)], padding=32 * 60_001
    ),
    "a header without end": lambda: _file(
        *[_array(f"k{i}", 0, 1 << 22, bytes(1 << 22)) for i in range(20)]
    ),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the measure is Linux's")
@pytest.mark.parametrize(
    "bomb",
    [pytest.param(name, marks=[pytest.mark.long] if i % 2 else []) for i, name in enumerate(BOMBS)],
)
def test_the_largest_headers_that_fit_the_limits_stay_cheap(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "bomb.gguf"
    path.write_bytes(BOMBS[bomb]())
    said = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("header_cost.py")), str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(gguf.__file__).parents[1])},
        timeout=240,
        check=True,
    ).stdout
    cpu_s, n_bytes = json.loads(said)
    assert cpu_s < CPU_S
    assert n_bytes < 256_000_000


def test_layers_cannot_be_counted_by_one_reader_and_indexed_by_another(
    write_gguf: Callable[..., Path],
) -> None:
    # In other readers, a block number far above block_count and arrays longer than the model caused
    # out-of-bounds writes.
    facts: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": [1] * 4_000,
    }
    tensors = [("blk.999999.attn_q.weight", (64, 64), "F32"), ("blk.4294967297.x", (32,), "F32")]
    model = model_from_gguf(gguf.read(write_gguf(facts, tensors)))
    assert len(model.layers) == 2
    assert model.variants[0].mtp_bytes == 64 * 64 * 4
