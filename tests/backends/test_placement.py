"""Weights and KV are placed as a LoadSpec specifies. Every placement gives the same tokens, and
impossible placements are refused.

If the build has no accelerator, placement uses the same patterns and parameters, but every place is
system memory. If it has one, layers and experts are really in different places.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from localllm_backends.contract import Backend, Chunk, LoadError, LoadSpec, Placement
from localllm_backends.llamacpp import backend_type, context, devices
from localllm_backends.llamacpp.native import start_native
from models import sparse_gguf, tiny_gguf

PROMPT = [5 + (7 * i) % 400 for i in range(70)]
N_TOKENS = 24


@contextmanager
def loaded(path: Path, gpu_layers: int = -1, **placed: object) -> Iterator[Backend]:
    placement = Placement(gpu_layers, **placed)  # type: ignore[arg-type]
    spec = LoadSpec(str(path), n_ctx=512, n_seq_max=2, n_batch=64, n_threads=1, placement=placement)
    backend = backend_type.load(spec)
    try:
        yield backend
    finally:
        backend.close()


def greedy(backend: Backend, n_tokens: int = N_TOKENS) -> list[int]:
    sequence = backend.new_sequence()
    tokens = []
    result = backend.step([Chunk(sequence, PROMPT[:64], outputs=0)])
    result = backend.step([Chunk(sequence, PROMPT[64:], outputs=1)])
    for _ in range(n_tokens):
        tokens += result.argmax(0)
        result = backend.step([Chunk(sequence, tokens[-1:], outputs=1)])
    backend.drop(sequence)
    return tokens


PLACEMENTS = [
    {"experts_on_host": 1},
    {"experts_on_host": -1},
    {"gpu_layers": 1},
    {"gpu_layers": 2, "experts_on_host": -1},
    {"kv_on_host": True},
    {"weights": "read"},
    {"weights": "mapped"},
    {"tables": "disk"},
    {"layout": "stored"},
    {"tensor_split": (1.0,)},
    {"cards": (0,)},
]


@pytest.mark.parametrize(
    "write", [tiny_gguf.write_moe, tiny_gguf.write_llama, tiny_gguf.write_sliding]
)
def test_the_placement_does_not_change_tokens(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf")
    with loaded(path, 0) as plain:
        expected = greedy(plain)
    for placed in PLACEMENTS:
        if "cards" in placed and not _has_device():
            continue  # there is no card with number 0
        with loaded(path, **placed) as backend:  # type: ignore[arg-type]
            assert greedy(backend) == expected, placed


def test_a_real_model_answers_the_same_half_offloaded_or_with_kv_on_the_host(
    smollm2: Path,
) -> None:
    with loaded(smollm2, 0) as plain:
        expected = greedy(plain, 40)
    for placed in ({"gpu_layers": 15}, {"kv_on_host": True}):
        with loaded(smollm2, **placed) as backend:  # type: ignore[arg-type]
            assert greedy(backend, 40) == expected, placed


class _Library:
    """ggml's device registry with GPUs of these names and PCI addresses, in the order in which it
    lists them."""

    def __init__(self, *gpus: tuple[str, str]) -> None:
        self._gpus = gpus
        self._names, self._addresses = (
            [ctypes.create_string_buffer(said.encode()) for said in texts]
            for texts in zip(*gpus, strict=True)
        )

    def _write_properties(self, i: int, props: object) -> None:
        """ggml-backend.h: name, description, free, total, type, and then `device_id`."""
        fields = ctypes.cast(props, ctypes.POINTER(ctypes.c_void_p))  # type: ignore[arg-type]
        fields[0] = ctypes.addressof(self._names[i])
        if self._gpus[i][1]:
            fields[5] = ctypes.addressof(self._addresses[i])

    def take_place(self, patch: pytest.MonkeyPatch) -> None:
        functions: dict[str, Callable[..., Any]] = {
            "ggml_backend_dev_count": lambda: len(self._gpus) + 1,
            "ggml_backend_dev_get": lambda i: i,  # the last one is the CPU
            "ggml_backend_dev_type": lambda i: 1 if i < len(self._gpus) else 0,
            "ggml_backend_dev_get_props": self._write_properties,
        }
        for name, function in functions.items():
            patch.setattr(start_native(), name, function)


@pytest.mark.parametrize(
    ("gpus", "cards", "names"),
    [
        # CUDA lists the fastest card first; the driver's tools sort by address.
        ([("CUDA0", "0000:41:00.0"), ("CUDA1", "0000:01:00.0")], (0,), ["CUDA1"]),
        ([("CUDA0", "0000:41:00.0"), ("CUDA1", "0000:01:00.0")], (0, 1), ["CUDA1", "CUDA0"]),
        ([("Vulkan0", "0000:C1:00.0"), ("Vulkan1", "0000:0a:00.0")], (1,), ["Vulkan0"]),
        ([("Vulkan0", ""), ("Vulkan1", "")], (1,), ["Vulkan1"]),
        ([("CUDA0", "0000:41:00.0"), ("CUDA1", "0000:01:00.0")], (), ["CUDA0", "CUDA1"]),
    ],
)
def test_cards_are_counted_by_their_addresses(
    gpus: list[tuple[str, str]],
    cards: tuple[int, ...],
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Library(*gpus).take_place(monkeypatch)
    assert [found.name for found in devices.accelerators(cards)] == names


def test_a_missing_card_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _Library(("CUDA0", "0000:41:00.0")).take_place(monkeypatch)
    with pytest.raises(LoadError, match="GPU 1"):
        devices.accelerators((1,))


def test_every_process_counts_cuda_cards_by_address() -> None:
    code = "import os, localllm_backends.llamacpp.devices; print(os.environ['CUDA_DEVICE_ORDER'])"
    for said, wanted in (
        ({}, "PCI_BUS_ID"),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST"),
    ):
        plain = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_ORDER"}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**plain, **said}, capture_output=True, check=True
        )
        assert done.stdout.decode().strip() == wanted


def _has_device() -> bool:
    start_native()
    return len(devices.accelerators()) > 0


def test_allocated_memory_is_reported_for_each_device(tmp_path: Path) -> None:
    path = tiny_gguf.write_moe(tmp_path / "moe.gguf")
    with loaded(path, 0, weights="read") as backend:
        memory = backend.memory()
    assert memory.places
    assert all(name.startswith("CPU") for name in memory.places), memory.places
    # All memory is assigned: weights (some may be repacked), KV and buffers.
    assert sum(memory.places.values()) == pytest.approx(memory.total_bytes, rel=0.05)


def test_zero_gpu_layers_use_no_accelerator(tmp_path: Path) -> None:
    path = tiny_gguf.write_llama(tmp_path / "model.gguf")
    spec = LoadSpec(str(path), placement=Placement(gpu_layers=0))
    # The list is empty. A missing list would mean every device.
    assert context.model_params(start_native(), spec).devices
    with loaded(path, 0) as backend:
        assert {name.split("_")[0] for name in backend.memory().places} == {"CPU"}


def test_only_routed_experts_are_named_by_the_pattern() -> None:
    first = re.compile(context.experts_pattern(3))
    assert first.search("blk.2.ffn_gate_exps.weight")
    assert first.search("blk.0.ffn_down_exps.bias")
    assert not first.search("blk.3.ffn_up_exps.weight")
    assert not first.search("blk.12.ffn_up_exps.weight")
    assert not first.search("blk.1.ffn_up_shexp.weight")
    assert not first.search("blk.1.ffn_gate_inp.weight")
    assert re.search(context.experts_pattern(-1), "blk.61.ffn_gate_up_exps.weight")


def test_a_split_over_more_devices_than_there_can_be_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write_llama(tmp_path / "model.gguf")
    with (
        pytest.raises(LoadError, match=r"at most \d+ devices"),
        loaded(path, tensor_split=(1.0,) * 100),
    ):
        pass


def test_a_load_spec_reaches_the_worker_unchanged() -> None:
    spec = LoadSpec("x.gguf", placement=Placement(7, experts_on_host=3, tensor_split=(0.6, 0.4)))
    assert LoadSpec.from_json(json.loads(json.dumps(asdict(spec)))) == spec
    assert LoadSpec.from_json({"path": "x.gguf"}) == LoadSpec("x.gguf")


def test_repacked_weights_are_not_resident_twice(tmp_path: Path) -> None:
    """llama.cpp copies repacked weights out of the mapped file and leaves the file's pages resident
    (8B at Q4_K: 9.2 GB instead of 5.1)."""
    shape = sparse_gguf.Shape("wide", "llama", 2, 1024, 4096, 8, 8, 128, tiny_gguf.VOCAB)
    path = sparse_gguf.write(
        shape, tmp_path, lambda writer, _n_tokens: tiny_gguf.vocabulary(writer)
    )
    with loaded(path, 0) as backend:
        places = backend.memory().places
        if "CPU_REPACK" not in places:
            pytest.skip(
                "this processor multiplies the format as it lies in the file: nothing is copied"
            )
        assert _resident_of(path) < 0.1 * path.stat().st_size


def test_weights_are_used_as_stored_in_the_file_if_requested(
    tmp_path: Path,
) -> None:
    shape = sparse_gguf.Shape("wide", "llama", 2, 1024, 4096, 8, 8, 128, tiny_gguf.VOCAB)
    path = sparse_gguf.write(
        shape, tmp_path, lambda writer, _n_tokens: tiny_gguf.vocabulary(writer)
    )
    with loaded(path, 0, layout="stored") as backend:
        assert "CPU_REPACK" not in backend.memory().places
        sequence = backend.new_sequence()
        assert backend.step([Chunk(sequence, PROMPT[:64], outputs=1)]).argmax(0)


def _resident_of(path: Path) -> int:
    """Return the bytes of `path` that are mapped into this process and resident."""
    found, ours = 0, False
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("only Linux says what of a mapping is resident")
    for line in smaps.read_text(encoding="utf-8", errors="replace").splitlines():
        if line[:1] in "0123456789abcdef" and "-" in line.split(" ")[0]:
            ours = line.endswith(str(path.resolve()))
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found
