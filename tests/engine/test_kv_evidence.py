"""What KV types cost in precision is measured on the real model where a plan uses quantised KV,
kept, and decides what plans use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.drive import GREEDY, run, settle
from localllm import paths
from localllm.cli.commands import doctor
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.host import kv_evidence
from localllm.planner.quality import KvPrecision, ladder, passes, why
from localllm_backends.contract import Backend, BackendFailure, LoadError, LoadSpec
from localllm_backends.llamacpp import backend_type, kv_fidelity
from localllm_backends.llamacpp.backend import LlamaCppBackend
from support.requests import request_for
from support.scripted_backend import ScriptedBackend


@pytest.fixture(autouse=True)
def _at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits ten seconds here; one test is about the rest itself."""
    monkeypatch.setattr(kv_evidence, "REST_S", 0.0)


def engine_for(model: Path, folder: Path) -> Engine:
    """An engine that serves with quantised KV, as a plan would where f16 does not fit."""
    return Engine(quantised(model), EngineSettings(kv_evidence_dir=str(folder)))


def quantised(model: Path) -> Backend:
    return backend_type.load(LoadSpec(str(model), n_ctx=512, kv_type_k="q8_0", kv_type_v="q8_0"))


@pytest.mark.parametrize("layers", [3, pytest.param(30, marks=pytest.mark.long)])
def test_a_model_is_measured_once_after_its_first_answer_and_remembered(
    layers: int, smollm2: Path, few_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = smollm2 if layers == 30 else few_layers
    monkeypatch.setattr(kv_evidence, "TEXT", kv_evidence.TEXT[:500])
    engine = engine_for(model, tmp_path)
    settle(engine)
    assert "kv_flips_q8_0" not in engine.snapshot()
    run(engine, request_for("a", "Hello", max_tokens=2, sampling=GREEDY))
    settle(engine)
    found = engine.snapshot()
    # Seen: 0.004, 0.011 and 0.07 nats, 3, 5 and 13 % of best tokens; with three layers 0.001,
    # 0.002, 0.011 and 3, 5, 9 %.
    assert 0 < found["kv_divergence_q8_0"] < 0.01  # type: ignore[operator]
    assert (
        found["kv_divergence_q8_0"] < found["kv_divergence_q8_0_q4_0"] < found["kv_divergence_q4_0"]
    )  # type: ignore[operator]
    assert found["kv_flips_q8_0"] < 0.06 < found["kv_flips_q4_0"]  # type: ignore[operator]
    file = kv_evidence.file_for(tmp_path, engine.backend.info.fingerprint)
    meaning = engine.backend.info.kv_meaning
    engine.close()
    assert [(f.k, f.v) for f in kv_evidence.read(file, meaning).found] == list(kv_evidence.PAIRS)
    assert kv_evidence.read(file, "another build").found == ()

    again = engine_for(model, tmp_path)
    assert again.snapshot()["kv_flips_q4_0"] == found["kv_flips_q4_0"]
    again.close()


def test_a_request_is_answered_between_two_pieces(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_evidence, "TEXT", kv_evidence.TEXT[:500])
    engine = engine_for(tiny_model, tmp_path)
    run(engine, request_for("a", "hello", max_tokens=2, sampling=GREEDY))
    between = 0
    while engine.idle():
        between += "kv_flips_q8_0" not in engine.snapshot()
        outcome = run(
            engine, request_for("b", "hello", max_tokens=3, sampling=GREEDY, ignore_eos=True)
        )
        assert len(outcome.tokens["b"]) == 3
    assert between > 5
    assert engine.snapshot()["kv_flips_q8_0"] >= 0
    engine.close()


def test_nothing_is_measured_before_a_rest(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_evidence, "REST_S", 10.0)
    monkeypatch.setattr(kv_evidence, "TEXT", kv_evidence.TEXT[:100])
    now = 0.0
    engine = Engine(
        quantised(tiny_model), EngineSettings(kv_evidence_dir=str(tmp_path)), clock=lambda: now
    )
    run(engine, request_for("a", "hello", max_tokens=2, sampling=GREEDY))
    settle(engine)
    now = 9.0
    assert not engine.idle()
    now = 10.5
    assert engine.idle()
    run(engine, request_for("b", "hello", max_tokens=2, sampling=GREEDY))
    assert not engine.idle()
    now = 30.0
    settle(engine)
    assert "kv_flips_q8_0" in engine.snapshot()
    engine.close()


@pytest.mark.parametrize(
    "body", ["", "{", "[]", '{"build": 1, "found": [{"k": 1}]}', '{"found": 3}']
)
def test_a_damaged_file_is_no_evidence(body: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(body)
    assert kv_evidence.read(tmp_path / "m.json").found == ()


def test_a_pair_that_the_engine_can_not_have_is_asked_for_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_context = kv_fidelity.new_context

    def refuses(model: object, spec: LoadSpec, **options: Any) -> object:
        if (spec.kv_type_k, spec.kv_type_v) == ("q4_0", "q4_0"):
            raise LoadError("no kernel")
        return new_context(model, spec, **options)

    monkeypatch.setattr(kv_fidelity, "new_context", refuses)
    monkeypatch.setattr(kv_evidence, "TEXT", kv_evidence.TEXT[:100])
    asked: list[object] = []
    compare = LlamaCppBackend.compare_kv
    monkeypatch.setattr(
        LlamaCppBackend, "compare_kv", lambda *given: (asked.append(given), compare(*given))[1]
    )
    for _ in range(2):
        engine = engine_for(tiny_model, tmp_path)
        run(engine, request_for("a", "hello", max_tokens=2, sampling=GREEDY))
        settle(engine)
        assert "kv_flips_q8_0" in engine.snapshot()
        assert "kv_flips_q4_0" not in engine.snapshot()
        engine.close()
    assert len(asked) == 1
    said = doctor.kv_checks(tmp_path)
    assert len(said) == 1
    assert "q8_0 for " in said[0].message
    assert "q4_0 for" not in said[0].message.replace("q8_0/q4_0", "")


def test_nothing_is_measured_where_the_plan_has_f16(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_evidence, "TEXT", kv_evidence.TEXT[:100])
    engine = Engine(
        backend_type.load(LoadSpec(str(tiny_model), n_ctx=512)),
        EngineSettings(kv_evidence_dir=str(tmp_path)),
    )
    run(engine, request_for("a", "hello", max_tokens=2, sampling=GREEDY))
    settle(engine)
    assert not list(tmp_path.iterdir())
    engine.close()


def test_doctor_measures_when_it_is_asked(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kv_evidence, "TEXT", kv_evidence.TEXT[:100])
    monkeypatch.setattr(paths, "kv_evidence_dir", lambda: tmp_path)
    doctor.measure_kv(str(tiny_model))
    assert "comparing KV types" in capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert [(f.k, f.v) for f in kv_evidence.read(file).found] == list(kv_evidence.PAIRS)
    assert [check.name for check in doctor.kv_checks(tmp_path)] == ["KV types"]
    engine = engine_for(tiny_model, tmp_path)
    assert engine.snapshot()["kv_flips_q8_0"] >= 0, "the engine knows it, and measures no more"
    engine.close()


def test_a_backend_that_can_not_compare_is_left_alone(tmp_path: Path) -> None:
    engine = Engine(ScriptedBackend(), EngineSettings(kv_evidence_dir=str(tmp_path)))
    run(engine, request_for("a", "hello", max_tokens=2, sampling=GREEDY))
    settle(engine)
    assert not list(tmp_path.iterdir())


def test_a_type_llamacpp_does_not_know_is_refused_by_name(tiny_model: Path) -> None:
    backend = backend_type.load(LoadSpec(str(tiny_model), n_ctx=256))
    with pytest.raises(BackendFailure, match="q3_9"):
        backend.compare_kv([("q3_9", "f16")], [1, 2, 3])
    backend.close()


# --- what follows from it -------------------------------------------------------------------------

GOOD, BAD = (0.001, 0.01), (0.2, 0.2)


def known(**types: tuple[float, float]) -> tuple[KvPrecision, ...]:
    return tuple(
        KvPrecision(name.replace("__", "/"), kl, flips) for name, (kl, flips) in types.items()
    )


def test_four_bits_are_never_for_an_agent_unless_they_pass() -> None:
    assert ladder("coding", (), mixed=True) == ("f16", "q8_0")
    assert ladder("coding", known(q4_0=BAD, q8_0__q4_0=GOOD), mixed=True) == (
        "f16",
        "q8_0",
        "q8_0/q4_0",
    )
    assert ladder("coding", known(q4_0=GOOD), mixed=True) == ("f16", "q8_0", "q4_0")


def test_a_chat_gets_four_bits_without_evidence_and_not_against_it() -> None:
    assert ladder("chat", (), mixed=True) == ("f16", "q8_0", "q4_0")
    assert ladder("chat", known(q4_0=BAD), mixed=True) == ("f16", "q8_0")
    assert ladder("chat", known(q8_0=BAD, q4_0=BAD), mixed=True) == ("f16",)


def test_pairs_are_offered_only_where_they_have_a_kernel() -> None:
    assert "q8_0/q4_0" not in ladder("coding", known(q8_0__q4_0=GOOD), mixed=False)


def test_what_is_harmless_in_a_chat_may_be_harmful_for_an_agent() -> None:
    between = KvPrecision("q4_0", 0.014, 0.06)
    assert passes(between, "chat")
    assert not passes(between, "coding")
    assert why("q4_0", "coding", [between]).endswith("harmful for coding")
    assert why("q4_0", "chat", ()) == "not measured on this model yet"
