"""Weights on a Mac's GPU: wired after loading, within Metal's limit, and in the type that the chip
computes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from localllm_backends.mlx import backend_type

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]

# mx.device_info() of an M4 with 24 GB.
TOTAL, RECOMMENDED = 25_769_803_776, 17_179_885_568


class Metal:
    """The functions of mlx.core that memory.py uses, as on a Mac's GPU with that much memory
    active. `calls` records the calls in order."""

    def __init__(self, active_bytes: int, *, device: str = "gpu") -> None:
        self.calls: list[tuple[str, int]] = []
        self.active_bytes, self.device, self.cpu = active_bytes, device, "cpu"

    def default_device(self) -> str:
        return self.device

    def Device(self, kind: str) -> str:  # noqa: N802 (MLX's name)
        return kind

    def device_info(self) -> dict[str, Any]:
        return {
            "device_name": "Apple M4",
            "max_recommended_working_set_size": RECOMMENDED,
            "memory_size": TOTAL,
        }

    def get_active_memory(self) -> int:
        return self.active_bytes

    def clear_cache(self) -> None:
        self.calls.append(("clear_cache", 0))

    def set_wired_limit(self, limit: int) -> None:
        self.calls.append(("set_wired_limit", limit))


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Metal]:
    def become(active_bytes: int, **how: Any) -> Metal:
        metal = Metal(active_bytes, **how)
        monkeypatch.setattr("localllm_backends.mlx.memory.mx", metal)
        return metal

    return become


@pytest.mark.parametrize(
    "active", [13 * 10**9, 15 * 10**9, RECOMMENDED, RECOMMENDED + 1, 24 * 10**9]
)
def test_a_large_model_is_wired_after_the_cache_is_cleared(
    on_metal: Callable[..., Metal], active: int
) -> None:
    from localllm_backends.mlx.memory import wire

    metal = on_metal(active)
    wire(enabled=True)
    assert metal.calls == [("clear_cache", 0), ("set_wired_limit", min(active, RECOMMENDED))]


@pytest.mark.parametrize(
    ("active", "how", "wanted"),
    [
        (10**9, {}, True),
        (12 * 10**9, {}, True),
        (16 * 10**9, {}, False),
        (16 * 10**9, {"device": "cpu"}, True),
    ],
)
def test_small_models_cpus_and_a_disabled_setting_are_not_wired(
    on_metal: Callable[..., Metal], active: int, how: dict[str, Any], wanted: bool
) -> None:
    from localllm_backends.mlx.memory import wire

    metal = on_metal(active, **how)
    wire(enabled=wanted)
    assert not [call for call in metal.calls if call[0] == "set_wired_limit"]


def test_without_a_gpu_no_weights_are_wired_or_cast(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    def refuse(limit: int) -> int:
        raise AssertionError(limit)

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    assert load("llama").info.kv_type_k == "f32"


@pytest.mark.parametrize(
    ("chip", "family", "half"),
    [
        ("Apple M1", "llama", True),
        ("Apple M2 Ultra", "qwen3_5_moe", True),
        ("Apple M1 Max", "mistral", True),
        ("Apple M3", "llama", False),
        ("Apple M10", "llama", False),
        ("AMD EPYC", "llama", False),
        *[
            ("Apple M1", family, False)
            for family in (
                "gemma",
                "gemma2",
                "gemma3_text",
                "gemma3n",
                "gemma4",
                "falcon_h1",
                "qwen3",
                "",
            )
        ],
    ],
)
def test_float16_is_used_if_bfloat16_is_emulated_and_the_family_allows_it(
    chip: str, family: str, half: bool
) -> None:
    from localllm_backends.mlx.load import half_precision

    assert half_precision(chip, family) is half


@pytest.mark.parametrize(("family", "becomes"), [("llama", "float16"), ("gemma3_text", "bfloat16")])
def test_only_bfloat16_parts_are_cast(
    family: str, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    from localllm_backends.mlx import load as loading

    told: dict[str, Any] = {}
    parts = {
        "w": mx.zeros(2, dtype=mx.bfloat16),
        "packed": mx.zeros(2, dtype=mx.uint32),
        "wide": mx.zeros(2),
    }
    model = SimpleNamespace(parameters=lambda: parts, update=told.update)
    m1 = SimpleNamespace(
        device_info=lambda: {"device_name": "Apple M1 Pro"},
        default_device=lambda: mx.Device(mx.gpu),
        Device=mx.Device, cpu=mx.cpu, float16=mx.float16, bfloat16=mx.bfloat16,
    )  # fmt: skip
    monkeypatch.setattr(loading, "mx", m1)
    loading.use_fastest_type(model, {"model_type": family})
    types = {name: str(part.dtype).rpartition(".")[2] for name, part in {**parts, **told}.items()}
    assert types == {"w": becomes, "packed": "uint32", "wide": "float32"}
