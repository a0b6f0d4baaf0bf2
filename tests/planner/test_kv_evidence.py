"""`doctor --kv` measures the precision loss of KV types on the real model. The result is stored,
and plans use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm import paths
from localllm.cli import doctor_checks
from localllm.load import kv_evidence
from localllm.planner import kv_sizes
from localllm.planner.quality import KvPrecision, ladder, passes, why
from localllm_backends import registry
from localllm_backends.contract import LoadError, LoadSpec
from localllm_backends.llamacpp import backend_type, context
from localllm_catalog import catalog


@pytest.mark.parametrize("layers", [3, pytest.param(30, marks=pytest.mark.long)])
def test_doctor_measures_kv_types_of_a_model_and_stores_the_result(
    layers: int,
    smollm2: Path,
    few_layers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kv_evidence, "TEXT", kv_evidence.TEXT[:500])
    monkeypatch.setattr(paths, "kv_evidence_dir", lambda: tmp_path)
    doctor_checks.measure_kv(str(smollm2 if layers == 30 else few_layers))
    assert "comparing KV types" in capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    found = kv_evidence.read(file).found
    assert [(f.k, f.v) for f in found] == list(kv_evidence.PAIRS)
    # Measured: 0.004, 0.011 and 0.07 nats, and 3, 5 and 13 % of best tokens. With three layers:
    # 0.001, 0.002, 0.011 nats, and 3, 5, 9 %.
    eight, mixed, four = found
    assert 0 < eight.mean_kl < 0.01
    assert eight.mean_kl < mixed.mean_kl < four.mean_kl
    assert eight.flips < 0.06 < four.flips
    assert kv_evidence.read(file, "another build").found == ()
    assert [check.name for check in doctor_checks.kv_checks(tmp_path)] == ["KV types"]


@pytest.mark.parametrize(
    "body", ["", "{", "[]", '{"build": 1, "found": [{"k": 1}]}', '{"found": 3}']
)
def test_a_damaged_evidence_file_is_ignored(body: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(body)
    assert kv_evidence.read(tmp_path / "m.json").found == ()


def test_a_kv_pair_that_the_engine_does_not_support_is_left_out(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_context = context.new_context

    def refuses(model: object, spec: LoadSpec, **options: Any) -> object:
        if (spec.kv_type_k, spec.kv_type_v) == ("q4_0", "q4_0"):
            raise LoadError("no kernel")
        return new_context(model, spec, **options)

    monkeypatch.setattr(context, "new_context", refuses)
    backend = backend_type.load(LoadSpec(str(tiny_model), n_ctx=256))
    found = backend.compare_kv(kv_evidence.PAIRS, list(range(20, 60)))
    backend.close()
    assert [(f.k, f.v) for f in found] == list(kv_evidence.PAIRS[:2])


# --- what follows from it -------------------------------------------------------------------------

GOOD, BAD = (0.001, 0.01), (0.2, 0.2)


def known(**types: tuple[float, float]) -> tuple[KvPrecision, ...]:
    return tuple(
        KvPrecision(name.replace("__", "/"), kl, flips) for name, (kl, flips) in types.items()
    )


def test_an_agent_gets_four_bit_kv_only_after_a_passed_measurement() -> None:
    assert ladder("coding", (), mixed=True) == ("f16", "q8_0")
    assert ladder("coding", known(q4_0=BAD, q8_0__q4_0=GOOD), mixed=True) == (
        "f16",
        "q8_0",
        "q8_0/q4_0",
    )
    assert ladder("coding", known(q4_0=GOOD), mixed=True) == ("f16", "q8_0", "q4_0")


def test_a_chat_gets_four_bit_kv_unless_a_measurement_failed() -> None:
    assert ladder("chat", (), mixed=True) == ("f16", "q8_0", "q4_0")
    assert ladder("chat", known(q4_0=BAD), mixed=True) == ("f16", "q8_0")
    assert ladder("chat", known(q8_0=BAD, q4_0=BAD), mixed=True) == ("f16",)


def test_kv_types_that_only_mlx_has_require_a_measurement() -> None:
    assert "turbo4" not in ladder("chat", (), mixed=False)
    found = known(q6_0=GOOD, turbo4=GOOD, turbo3=BAD)
    assert ladder("coding", found, mixed=False) == ("f16", "q8_0", "q6_0", "turbo4")
    model = catalog.load().by_id["qwen3-8b"]
    assert not kv_sizes.kv_type_allowed(model, "turbo4", registry.declared("llamacpp"))
    assert kv_sizes.kv_type_allowed(model, "turbo4", registry.declared("mlx"))


def test_kv_pairs_are_offered_only_if_they_have_a_kernel() -> None:
    assert "q8_0/q4_0" not in ladder("coding", known(q8_0__q4_0=GOOD), mixed=False)


def test_a_kv_type_may_pass_for_chats_and_fail_for_agents() -> None:
    between = KvPrecision("q4_0", 0.014, 0.06)
    assert passes(between, "chat")
    assert not passes(between, "coding")
    assert why("q4_0", "coding", [between]).endswith("harmful for coding")
    assert why("q4_0", "chat", ()) == "not measured on this model yet"
