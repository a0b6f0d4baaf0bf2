"""KV types: their memory matches llama.cpp's report, their answers stay close to those of f16, and
a slow type is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm_backends.contract import Backend, BackendFailure, Chunk, KvType, LoadSpec
from localllm_backends.llamacpp import backend_type, kv_probe
from localllm_backends.llamacpp.devices import Accelerator
from localllm_backends.llamacpp.kv_probe import Pair, Timing, choose
from support.plan_probe import ProbeSettings, plan

CONTEXT = 1024
POSITIONS = 200
TEXT = (
    "The lighthouse keeper wrote in his diary every evening about the ships, the weather and the "
    "birds that passed. "
    "He counted 14 gulls on Monday and 23 on Tuesday; nobody knew why. "
) * 8
# Measured with SmolLM2-135M over these 200 positions, KL(f16 || type) in nats: q8_0 mean 0.0007,
# worst 0.014, same best token at 98.8 %; q4_0 mean 0.014, worst 0.18, same best token at 95 %. The
# bounds are three times that. To them, three times the difference of f16 from itself with another
# split of the text is added: kernels of some devices round by the shape of a batch (q8_0 on an
# H200: mean 0.0096).
BOUNDS: dict[KvType, tuple[float, float, float]] = {
    "q8_0": (0.002, 0.05, 0.04),
    "q4_0": (0.05, 0.6, 0.12),
}

Logits = NDArray[np.float64]


def pairs(kind: KvType) -> LoadSpec:
    return LoadSpec("", n_ctx=CONTEXT, kv_type_k=kind, kv_type_v=kind, n_outputs=64)


@pytest.fixture(autouse=True)
def _as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the speed measurement: these tests check the types, not how busy the machine is."""
    monkeypatch.setattr(kv_probe, "measure_pair", lambda *_: Timing(1.0, 1.0))


@pytest.fixture
def loaded(smollm2: Path, request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = backend_type.load(replace(pairs(request.param), path=str(smollm2)))
    yield backend
    backend.close()


def log_probabilities(backend: Backend, piece: int = 50) -> Logits:
    sequence = backend.new_sequence()
    tokens = backend.tokenize(TEXT)[:POSITIONS]
    rows = []
    for at in range(0, POSITIONS, piece):
        chunk = Chunk(sequence, tokens[at : at + piece], piece)
        rows.append(np.array(backend.step([chunk]).logits(0), dtype=np.float64))
    backend.drop(sequence)
    values: Logits = np.concatenate(rows)
    values -= values.max(axis=1, keepdims=True)
    normal: Logits = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return normal


@pytest.mark.parametrize("loaded", ["f16", "q8_0", "q4_0"], indirect=True)
def test_kv_memory_equals_the_plan_of_llama_cpp_and_the_shapes(
    loaded: Backend, smollm2: Path
) -> None:
    kind = loaded.info.kv_type_k
    # A second source from llama.cpp: the size of the cache that it logs for a context planned
    # separately and never allocated.
    said = plan(
        smollm2,
        [
            ProbeSettings(
                n_ctx=CONTEXT, n_seq_max=loaded.info.n_seq_max + 1, kv_type_k=kind, kv_type_v=kind
            )
        ],
    )
    # SmolLM2-135M: 30 layers, 3 KV heads of 64; blocks of 32 take 34 bytes as q8_0 and 18 as q4_0.
    shapes = 2 * 30 * CONTEXT * 3 * 64 * {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}[kind]
    assert loaded.memory().kv_bytes == pytest.approx(said[0].kv_bytes, rel=0.01)
    assert loaded.memory().kv_bytes == pytest.approx(shapes, rel=0.01)


def said_with(path: Path, kind: KvType, piece: int = 50) -> Logits:
    """Return the log probabilities with KV of this type, prefilled in chunks of that many
    tokens."""
    backend = backend_type.load(replace(pairs(kind), path=str(path)))
    assert backend.info.kv_type_k == kind
    said = log_probabilities(backend, piece)
    backend.close()
    return said


def differences(exact: Logits, near: Logits) -> tuple[float, float, float]:
    """Return the mean and worst divergence in nats, and the share of positions with another best
    token."""
    divergence = (np.exp(exact) * (exact - near)).sum(axis=1)
    flips = (exact.argmax(axis=1) != near.argmax(axis=1)).mean()
    return float(divergence.mean()), float(divergence.max()), float(flips)


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Logits:
    return said_with(smollm2, "f16")


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantised_logits_stay_near_f16(smollm2: Path, exact: Logits, kind: KvType) -> None:
    found = differences(exact, said_with(smollm2, kind))
    assert found[0] > 0
    if any(value >= bound for value, bound in zip(found, BOUNDS[kind], strict=True)):
        # How much f16 differs from itself on this device. This takes long to measure, so only now.
        noise = differences(exact, said_with(smollm2, "f16", piece=4))
        for value, bound, own in zip(found, BOUNDS[kind], noise, strict=True):
            assert value < bound + 3 * own


@pytest.mark.parametrize("pair", [("q8_0", "q4_0"), ("q8_0", "f16"), ("f16", "q8_0")])
def test_k_and_v_may_differ(few_layers: Path, pair: Pair) -> None:
    backend = backend_type.load(
        LoadSpec(str(few_layers), n_ctx=CONTEXT, kv_type_k=pair[0], kv_type_v=pair[1])
    )
    assert (backend.info.kv_type_k, backend.info.kv_type_v) == pair
    assert not backend.info.load_notes
    backend.close()


@pytest.mark.parametrize("cards", [0, 1])
def test_a_real_probe_times_both_types_and_also_at_depth_on_a_gpu(
    few_layers: Path, monkeypatch: pytest.MonkeyPatch, cards: int
) -> None:
    monkeypatch.undo()
    there = [Accelerator(0, "a card", 1 << 30)] * cards
    monkeypatch.setattr(kv_probe, "accelerators", lambda _: there)
    timings = []

    def measure(model: object, spec: LoadSpec, pair: Pair) -> Timing:
        timings.append(kv_probe.measure_pair(model, spec, pair))
        return Timing(1.0, 1.0)

    monkeypatch.setattr(kv_probe, "timing_of", lambda _, *rest: measure(*rest))
    backend_type.load(replace(pairs("q8_0"), path=str(few_layers))).close()
    assert len(timings) == 1
    assert timings[0].wanted_s > 0
    assert timings[0].f16_s > 0
    # Near the start: a prompt of 64 tokens and 8 to 64 decoded ones. With a fast card, the
    # measurement is at half of the context.
    assert timings[0].depth <= (CONTEXT // 2 if cards else 128)


# --- the decision ---------------------------------------------------------------------------------


def decide(
    monkeypatch: pytest.MonkeyPatch,
    spec: LoadSpec,
    speeds: dict[Pair, float | str],
    *,
    room: bool = True,
) -> tuple[Pair, str]:
    """Choose KV types for `spec` when each pair decodes `speeds` times as fast as f16, or fails to
    load with a message."""

    def measure(_model: object, _spec: LoadSpec, pair: Pair) -> Timing:
        speed = speeds[pair]
        if isinstance(speed, str):
            raise BackendFailure(speed)
        return Timing(0.01 / speed, 0.01)

    monkeypatch.setattr(kv_probe, "f16_fits", lambda *_: room)
    chosen, note = choose(None, spec, measure)
    return (chosen.kv_type_k, chosen.kv_type_v), note


def asked(k: KvType, v: KvType) -> LoadSpec:
    return LoadSpec("m.gguf", kv_type_k=k, kv_type_v=v)


def test_a_fast_type_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(monkeypatch, asked("q8_0", "q8_0"), {("q8_0", "q8_0"): 0.9}) == (
        ("q8_0", "q8_0"),
        "",
    )


def test_a_slow_type_becomes_f16_with_both_speeds_in_the_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, note = decide(
        monkeypatch, asked("q4_0", "q4_0"), {("q4_0", "q4_0"): 0.25, ("q4_0", "f16"): 0.3}
    )
    assert pair == ("f16", "f16")
    assert "25 tok/s" in note
    assert "f16 at 100" in note


def test_a_slow_mixed_pair_falls_back_to_ks_type_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, note = decide(
        monkeypatch, asked("q8_0", "q4_0"), {("q8_0", "q4_0"): 0.2, ("q8_0", "q8_0"): 1.0}
    )
    assert pair == ("q8_0", "q8_0")
    assert note.startswith("KV type q8_0 K with q4_0 V was replaced by q8_0")


def test_a_type_llamacpp_refuses_is_replaced_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "block size 32 does not divide the head"
    pair, note = decide(
        monkeypatch, asked("q8_0", "q8_0"), {("q8_0", "q8_0"): said, ("q8_0", "f16"): said}
    )
    assert pair == ("f16", "f16")
    assert said in note


def test_a_slow_type_is_used_if_f16_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: dict[Pair, float | str] = {("q8_0", "q8_0"): 0.2, ("q8_0", "f16"): 0.2}
    pair, note = decide(monkeypatch, asked("q8_0", "q8_0"), slow, room=False)
    assert pair == ("q8_0", "q8_0")
    assert "does not fit" in note


def test_a_cost_at_depth_is_extrapolated_to_the_used_context() -> None:
    """An 8B model on an RTX 3080: at 128 and at 4,096 tokens the types differ only by noise, but at
    52,000 tokens q8_0 has 0.6 of f16's speed."""
    near, deep = Timing(0.0120, 0.0120, 128), Timing(0.0132, 0.0124, 4096)
    assert not near.slow
    assert not deep.slow
    assert deep.extrapolated(near, 52_000).slow
    assert not deep.extrapolated(near, 8192).slow


def test_a_type_that_is_faster_at_depth_is_not_extrapolated_as_slower() -> None:
    near, deep = Timing(0.0120, 0.0120, 128), Timing(0.0121, 0.0124, 4096)
    there = deep.extrapolated(near, 65_536)
    assert there.wanted_s < there.f16_s
    assert there.depth == 65_536


def test_the_note_names_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_probe, "f16_fits", lambda *_: True)
    _, note = choose(None, asked("q8_0", "q8_0"), lambda *_: Timing(0.025, 0.015, 52_000))
    assert (
        "with 52,000 tokens of context this type decodes at 40 tok/s on this machine, f16 at 67"
        in note
    )


def test_one_slow_measurement_is_noise() -> None:
    seen = iter([Timing(5.0, 1.0), Timing(4.0, 1.0), Timing(1.0, 1.0)])
    assert choose(None, asked("q8_0", "q8_0"), lambda *_: next(seen))[1] == ""


def test_f16_is_never_probed() -> None:
    def never(*_: object) -> Timing:
        raise AssertionError("probed")

    assert choose(None, asked("f16", "bf16"), never) == (asked("f16", "bf16"), "")
